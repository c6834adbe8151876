"""The table of inputs, its splits, primes, and the float64 cross-entropy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tasks
from tasks.modular_arithmetic import is_prime, primes_below
from tasks.modular_arithmetic.modular_task_base import cross_entropy

NAMES = ["modular-addition", "modular-multiplication", "miiii"]
SPLITS = ("train", "validation", "test")


def rows(task, split, n=None, seed=0):
    return [tuple(row) for row in task.sample(n, seed, split).tokens.tolist()]


def test_primes_against_the_sieve_of_eratosthenes():
    composite = {multiple for divisor in range(2, 32) for multiple in range(2 * divisor, 1000, divisor)}
    expected = tuple(number for number in range(2, 1000) if number not in composite)
    assert primes_below(1000) == expected
    assert [number for number in range(-3, 12) if is_prime(number)] == [2, 3, 5, 7, 11]


@pytest.mark.parametrize(
    ("fraction", "sizes"), [(0.3, (3830, 1000, 7939)), (0.5, (6384, 1000, 5385)), (0.9, (11492, 638, 639))]
)
@pytest.mark.parametrize("name", ["modular-addition", "miiii"])
def test_split_sizes_at_113(name, fraction, sizes):
    """As printed: 30% / 1000 / rest; half in the code; half of the rest where 1000 is more than that."""
    task = tasks.get(name, train_fraction=fraction)
    assert tuple(len(task.sample(None, split=split)) for split in SPLITS) == sizes
    assert sum(sizes) == 113**2


@given(
    st.sampled_from(NAMES),
    st.sampled_from([3, 5, 7, 11, 13]),
    st.floats(0.2, 0.66),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_splits_are_disjoint_and_cover_the_table(name, p, fraction, validation_size, split_seed):
    task = tasks.get(
        name, p=p, train_fraction=fraction, validation_size=validation_size, split_seed=split_seed
    )
    first_b = 1 if name == "modular-multiplication" else 0
    table = {(a, b, p) for a in range(p) for b in range(first_b, p)}
    found = [rows(task, split) for split in SPLITS]
    assert sorted(row for part in found for row in part) == sorted(table)
    rest = len(table) - int(fraction * len(table))
    assert [len(part) for part in found] == [
        len(table) - rest,
        min(validation_size, rest // 2),
        rest - min(validation_size, rest // 2),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_without_replacement_and_at_most_the_whole_split(name):
    task = tasks.get(name, p=11)
    for split in SPLITS:
        whole = rows(task, split)
        some = rows(task, split, 7, seed=1)
        assert len(set(some)) == len(some) == 7
        assert set(some) <= set(whole)
        assert some == rows(task, split, 7, seed=1)
        assert set(some) != set(rows(task, split, 7, seed=2))
        for n in (len(whole), len(whole) + 1, 10**6, None):
            assert rows(task, split, n, seed=1) == whole
        assert len(rows(task, split, len(whole) - 1)) == len(whole) - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_is_every_input_in_the_order_of_its_tokens(name):
    task = tasks.get(name, p=7)
    grid = task.input_grid()
    first_b = 1 if name == "modular-multiplication" else 0
    assert grid.tokens.tolist() == [[a, b, 7] for a in range(7) for b in range(first_b, 7)]
    assert torch.equal(grid.extras["operands"], grid.tokens[:, :2])
    answers = {tuple(t): y for t, y in zip(grid.tokens.tolist(), grid.targets.tolist(), strict=True)}
    for split in SPLITS:
        batch = task.sample(None, split=split)
        assert [answers[tuple(t)] for t in batch.tokens.tolist()] == batch.targets.tolist()


@pytest.mark.parametrize("margin", [20.0, 25.0, 30.0])
def test_log_probabilities_below_1e_7_are_resolved(margin):
    """−log p = log(1 + 112 e^−margin) for one logit ahead of 112 equal ones.

    A float64 sum of 113 terms near 1 is right to 113 · 2⁻⁵³ = 1.3e-14; float32 knows steps of 1.2e-7 only.
    """
    logits = torch.zeros(1, 113)
    logits[0, 5] = margin
    logits.requires_grad_()
    answers = torch.tensor([5])
    expected = math.log1p(112 * math.exp(-margin))
    found = cross_entropy(logits, answers)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, abs=113 * 2**-53)
    assert found.item() == pytest.approx(expected, rel=0.01)
    found.sum().backward()
    wrong_class = logits.grad[0, 0].item()
    assert wrong_class == pytest.approx(math.exp(-margin) / (1 + 112 * math.exp(-margin)), rel=1e-5)
    in_float32 = -logits.detach().log_softmax(-1)[0, 5].item()
    assert in_float32 != pytest.approx(expected, rel=0.01)
    assert (in_float32 == 0) == (margin > 20)
