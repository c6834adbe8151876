"""The remainders modulo many primes: answers, variants, and the weighted loss."""

import math
from collections import Counter

import numpy
import pytest
import torch
from torch import Tensor

from tasks import pool
from tasks.modular_arithmetic import Miiii

#: A float64 sum of up to 109 terms near 1 is right to this; what is left of its logarithm cannot be better.
ROUNDING = 109 * 2**-53


def random_output(task, batch, seed=0):
    return 3 * torch.randn(len(batch), 3, task.d_vocab_out, generator=torch.Generator().manual_seed(seed))


def rows_of(values):
    return Counter(map(tuple, values.tolist()))


@pytest.mark.parametrize("p", [13, 113])
@pytest.mark.parametrize("digits", ["low-first", "high-first"])
def test_every_remainder_against_python_integers(p, digits):
    task = Miiii(p=p, digits=digits)
    grid = task.input_grid()
    expected, moduli = [], task.moduli
    for first, second, equals in grid.tokens.tolist():
        number = first + second * p if digits == "low-first" else second + first * p
        assert equals == p
        expected.append([number % q for q in moduli])
    assert len(expected) == p * p
    assert grid.targets.tolist() == expected


def test_the_published_task_has_29_primes():
    """q = 2 to 109, sum 1480, chance accuracy 6.3%."""
    task = Miiii()
    assert len(task.moduli) == task.n_read_outs == 29
    assert (task.moduli[0], task.moduli[-1], sum(task.moduli), task.d_vocab_out) == (2, 109, 1480, 1480)
    assert round(sum(1 / q for q in task.moduli) / 29, 3) == 0.063
    assert task.d_vocab == 114


def test_shuffling_permutes_whole_rows_before_the_split():
    plain, shuffled = Miiii(p=13), Miiii(p=13, variant="shuffled")
    before, after = plain.input_grid().targets, shuffled.input_grid().targets
    assert rows_of(before) == rows_of(after)
    # 2·3·5·7·11 exceeds 13², so all rows differ and the rows that moved can be counted.
    assert len(rows_of(before)) == 169
    assert (before != after).any(1).sum() > 150
    for split in ("train", "validation", "test"):
        ours, theirs = shuffled.sample(None, split=split), plain.sample(None, split=split)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert rows_of(ours.targets) != rows_of(theirs.targets)


def test_masking_takes_the_four_easiest_primes_out_of_the_loss_only():
    plain, masked = Miiii(), Miiii(variant="masked")
    assert masked.loss_weights[:4] == (0, 0, 0, 0)
    assert masked.moduli[:4] == (2, 3, 5, 7)
    assert (
        masked.loss_weights[4:]
        == plain.loss_weights[4:]
        == pytest.approx([1 / math.log(q) for q in plain.moduli[4:]])
    )
    batch = masked.sample(40)
    assert torch.equal(batch.targets, plain.sample(40).targets)
    output = random_output(plain, batch)
    pooled = pool(masked.metrics(output, batch))
    assert pooled == pool(plain.metrics(output, batch))
    others = [pooled[f"loss_{q}"] for q in masked.moduli[4:]]
    # 25 tasks in the sum, 29 in the denominator.
    assert masked.loss(output, batch).item() == pytest.approx(sum(x for x in others if x) / 29, rel=1e-12)
    output.requires_grad_()
    masked.loss(output, batch).backward()
    assert (output.grad[:, 2, :17] == 0).all()
    assert (output.grad[:, 2, 17:] != 0).all()


def numbers_by_hand(task, output, batch):
    """CE_q / ln q and accuracy per example and prime, in numpy float64."""
    losses, hits = (numpy.zeros((len(batch), len(task.moduli))) for _ in range(2))
    for example, logits in enumerate(output[:, 2].double().numpy()):
        start = 0
        for column, q in enumerate(task.moduli):
            own = logits[start : start + q]
            start += q
            answer = batch.targets[example, column].item()
            log_sum = own.max() + numpy.log(numpy.exp(own - own.max()).sum())
            losses[example, column] = (log_sum - own[answer]) / numpy.log(q)
            hits[example, column] = own.argmax() == answer
    return losses, hits


@pytest.mark.parametrize("config", [{}, {"p": 13}, {"primes": (3, 11)}], ids=str)
def test_loss_and_metrics_against_numpy(config):
    task = Miiii(**config)
    batch = task.sample(30)
    output = random_output(task, batch)
    losses, hits = numbers_by_hand(task, output, batch)
    metrics = {
        name: value for name, value in task.metrics(output, batch).items() if isinstance(value, Tensor)
    }
    assert set(metrics) == {f"{kind}_{q}" for kind in ("loss", "accuracy") for q in task.moduli} | {
        "loss",
        "accuracy",
    }
    for column, q in enumerate(task.moduli):
        numpy.testing.assert_allclose(
            metrics[f"loss_{q}"].numpy(), losses[:, column], rtol=1e-12, atol=ROUNDING
        )
        assert metrics[f"accuracy_{q}"].tolist() == hits[:, column].tolist()
    numpy.testing.assert_allclose(metrics["loss"].numpy(), losses.mean(1), rtol=1e-12, atol=ROUNDING)
    numpy.testing.assert_allclose(metrics["accuracy"].numpy(), hits.mean(1), rtol=1e-12)
    loss = task.loss(output, batch)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(losses.mean(), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_losses_of_all_primes_at_once_are_those_of_each(scale):
    """On a CUDA device the loss is computed so; logits of 300 would overflow where the largest were not taken out."""
    task = Miiii(p=23)
    batch = task.sample(20)
    found = []
    for losses_of in (task._cross_entropies, task._cross_entropies_at_once):
        output = (scale * random_output(task, batch).double()).requires_grad_()
        losses = losses_of(output, batch)
        assert losses.shape == (20, 8)
        (losses.square() @ torch.arange(8.0).double()).sum().backward()
        found.append((losses.detach(), output.grad))
    assert found[0][1].abs().max() > 0.1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)
