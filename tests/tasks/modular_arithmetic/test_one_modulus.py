"""Modular addition and multiplication."""

from __future__ import annotations

import math

import pytest
import torch

import tasks
from tasks import pool
from tasks.modular_arithmetic import ModularAddition, ModularMultiplication


@pytest.mark.parametrize("p", [13, 113])
def test_every_sum_against_python_integers(p: int) -> None:
    grid = ModularAddition(p=p).input_grid()
    assert len(grid) == p * p
    assert grid.targets.tolist() == [(a + b) % p for a, b, _ in grid.tokens.tolist()]
    assert set(grid.tokens[:, 2].tolist()) == {p}


@pytest.mark.parametrize("p", [13, 97, 113])
def test_every_product_against_python_integers(p: int) -> None:
    grid = ModularMultiplication(p=p).input_grid()
    assert len(grid) == p * (p - 1)
    assert grid.targets.tolist() == [(a * b) % p for a, b, _ in grid.tokens.tolist()]
    assert 0 not in grid.tokens[:, 1]
    assert 0 in grid.tokens[:, 0]


@pytest.mark.parametrize("name", ["modular-addition", "modular-multiplication"])
@pytest.mark.parametrize("extra_class", [False, True])
def test_loss_and_accuracy_by_hand(name: str, extra_class: bool) -> None:
    """The '=' class, where there is one, takes part in the softmax as in the published code."""
    task = tasks.get(name, p=7, equals_class=extra_class)
    assert task.d_vocab_out == 7 + extra_class
    batch = task.sample(None, split="train")
    output = torch.randn(len(batch), 3, task.d_vocab_out, generator=torch.Generator().manual_seed(0))
    metrics = task.metrics(output, batch)
    losses, hits = [], []
    for row, answer in zip(output[:, 2].tolist(), batch.targets.tolist(), strict=True):
        losses.append(math.log(math.fsum(math.exp(x) for x in row)) - row[answer])
        hits.append(float(row.index(max(row)) == answer))
    assert isinstance(metrics["loss"], torch.Tensor)
    assert isinstance(metrics["accuracy"], torch.Tensor)
    assert metrics["loss"].tolist() == pytest.approx(losses, rel=1e-12, abs=1e-14)
    assert metrics["accuracy"].tolist() == hits
    assert task.loss(output, batch).item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


def test_equal_logits_cost_ln_p() -> None:
    task = ModularAddition()
    batch = task.sample(50)
    assert task.loss(torch.zeros(50, 3, 113), batch).item() == pytest.approx(math.log(113), rel=1e-14)
    right = torch.nn.functional.one_hot(batch.targets, 113)[:, None].float() * 25
    assert pool(task.metrics(right, batch))["accuracy"] == 1
    assert task.loss(right, batch).item() == pytest.approx(math.log1p(112 * math.exp(-25)), abs=1e-14)


def test_the_read_position_alone_gives_the_same_numbers() -> None:
    task = ModularAddition(p=11)
    batch = task.sample(30)
    output = torch.randn(30, 3, 11, generator=torch.Generator().manual_seed(0))
    changed = output.clone()
    changed[:, :2] = torch.nan
    full, lean, elsewhere = (task.metrics(x, batch) for x in (output, output[:, 2:], changed))
    for name in full:
        assert torch.equal(full[name], lean[name])  # type: ignore[arg-type]
        assert torch.equal(full[name], elsewhere[name])  # type: ignore[arg-type]
    assert task.loss(output, batch) == task.loss(output[:, 2:], batch) == task.loss(changed, batch)
