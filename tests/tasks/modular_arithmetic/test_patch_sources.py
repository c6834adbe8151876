"""Inputs that a modular task names as sources of patches."""

import pytest
import torch

import tasks


@pytest.mark.parametrize(
    "task",
    [
        tasks.get("modular-addition", p=7),
        tasks.get("miiii", p=7, primes=(2, 3, 5)),
        tasks.get("miiii", p=7, primes=(2, 3, 5), variant="shuffled"),
        tasks.get("miiii", p=7, primes=(2, 3), digits="high-first"),
    ],
)
def test_sources_differ_in_one_way_and_carry_the_tables_own_answers(task):
    batch = task.input_grid()
    a, b = batch.extras["operands"].T
    found = task.patch_sources(batch)
    assert list(found) == ["shifted", "same_sum", "swapped"]
    expected = {"shifted": ((a + 1) % 7, b), "same_sum": ((a + 1) % 7, (b - 1) % 7), "swapped": (b, a)}
    for name, (first, second) in expected.items():
        source = found[name]
        assert torch.equal(source.extras["operands"], torch.stack([first, second], 1))
        rows = first * 7 + second
        assert torch.equal(source.tokens, batch.tokens[rows])
        assert torch.equal(source.targets, batch.targets[rows])


def test_a_source_that_leaves_the_table_is_not_declared():
    task = tasks.get("modular-multiplication", p=7)
    zero = task.input_grid()[[0]]
    assert zero.extras["operands"].tolist() == [[0, 1]]
    assert list(task.patch_sources(zero)) == ["shifted"]
