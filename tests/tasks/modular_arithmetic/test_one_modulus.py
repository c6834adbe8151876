"""Modular addition and multiplication."""

import itertools
import math

import pytest
import torch

import tasks
from tasks.modular_arithmetic import ModularAddition, ModularMultiplication


@pytest.mark.parametrize("p", [13, 97, 113])
def test_every_answer_against_python_integers(p):
    sums, products = ModularAddition(p=p).input_grid(), ModularMultiplication(p=p).input_grid()
    assert (len(sums), len(products)) == (p * p, p * (p - 1))
    assert sums.targets.tolist() == [(a + b) % p for a, b, _ in sums.tokens.tolist()]
    assert products.targets.tolist() == [(a * b) % p for a, b, _ in products.tokens.tolist()]
    assert set(sums.tokens[:, 2].tolist()) == {p}
    assert 0 not in products.tokens[:, 1]


@pytest.mark.parametrize("name", ["modular-addition", "modular-multiplication"])
@pytest.mark.parametrize("extra_class", [False, True])
def test_loss_and_accuracy_by_hand(name, extra_class):
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
    assert metrics["loss"].tolist() == pytest.approx(losses, rel=1e-12, abs=1e-14)
    assert metrics["accuracy"].tolist() == hits
    assert task.loss(output, batch).item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


@pytest.mark.parametrize("p", [3, 7, 13, 97, 113])
def test_multiplication_adds_exponents(p):
    first, second = ModularMultiplication(p=p).grid_axes()
    assert first.values == second.values
    assert sorted(first.values) == list(range(1, p))
    for i, j in itertools.product(range(0, p - 1, 3), repeat=2):
        assert first.values[i] * first.values[j] % p == first.values[(i + j) % (p - 1)]


@pytest.mark.parametrize("name", ["modular-addition", "modular-multiplication"])
def test_an_operator_stands_between_the_operands(name):
    """[a, op, b, '='] of Lee et al.'s code, with everything that says where the operands are."""
    plain, task = tasks.get(name, p=7), tasks.get(name, p=7, operator_token=True)
    without, grid = plain.input_grid(), task.input_grid()
    assert grid.tokens.tolist() == [[a, 8, b, 7] for a, b, _ in without.tokens.tolist()]
    assert torch.equal(grid.targets, without.targets)
    assert (task.sequence_length, task.d_vocab, task.d_vocab_out, task.read_positions) == (4, 9, 7, (3,))
    assert tasks.get(name, p=7, operator_token=True, equals_class=True).d_vocab_out == 9
    for split in ("train", "validation", "test"):
        assert torch.equal(
            task.sample(None, split=split).tokens[:, [0, 2, 3]], plain.sample(None, split=split).tokens
        )
    assert [axis.position for axis in task.grid_axes()] == [0, 2]
    assert [axis.values for axis in task.grid_axes()] == [axis.values for axis in plain.grid_axes()]
    batch = task.sample(20)
    found = task.probe_targets(batch)
    assert found.positions == (3,)
    assert torch.equal(found.targets["a"].values, batch.tokens[:, 0])
    assert torch.equal(found.targets["b"].values, batch.tokens[:, 2])
    templates = {
        key: value[3].nonzero().flatten().tolist() for key, value in task.attention_templates().items()
    }
    assert templates == {
        "operand_1": [0],
        "operand_2": [2],
        "operands": [0, 2],
        "equals": [3],
        "operator": [1],
    }
    assert "operator" not in plain.attention_templates()


def test_the_preset_paper_is_the_benchmark():
    preset = ModularMultiplication.presets["paper"]
    task = ModularMultiplication(**preset["task"])
    assert len(task.sample(None, split="train")) == 97 * 96 // 2
    model = task.build_model(0, task.Model(**preset["model"]))
    assert (model.cfg.n_layers, model.cfg.d_model, model.cfg.n_heads, model.cfg.d_mlp) == (2, 128, 4, 512)
    # Their count, and what ours has besides: an unembedding bias of 99, less the fifth row of their position table.
    block = 2 * 2 * 128 + 4 * (128 * 128 + 128) + 2 * 128 * 512 + 512 + 128
    theirs = 99 * 128 + 5 * 128 + 2 * block + 2 * 128 + 99 * 128
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == theirs + 99 - 128
