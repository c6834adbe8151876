"""Recoverable entries against union-find, and the exact share against plain enumeration."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.matrix_completion import MatrixCompletion, expected_unrecoverable_share, unrecoverable


def lost_by_union_find(hidden: list[list[bool]]) -> list[list[bool]]:
    """Row i and column j are in one component of the observed entries, or entry (i, j) is lost."""
    rows, columns = len(hidden), len(hidden[0])
    parent = list(range(rows + columns))

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for i, j in itertools.product(range(rows), range(columns)):
        if not hidden[i][j]:
            parent[root(i)] = root(rows + j)
    return [[hidden[i][j] and root(i) != root(rows + j) for j in range(columns)] for i in range(rows)]


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**49 - 1), st.sampled_from([0.3, 0.6, 0.8, 0.9]))
def test_unrecoverable_entries_are_those_between_components(
    rows: int, columns: int, seed: int, p_mask: float
) -> None:
    draws = torch.rand(20, rows, columns, generator=torch.Generator().manual_seed(seed))
    hidden = draws < p_mask
    assert unrecoverable(hidden).tolist() == [lost_by_union_find(mask) for mask in hidden.tolist()]


@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_longest_path_there_is_recovers_its_end(size: int) -> None:
    """Observed: the diagonal and the one beside it: 2·size − 1 entries in a staircase join everything."""
    observed = (torch.eye(size) + torch.diag(torch.ones(size - 1), 1)).bool()
    assert observed.sum() == 2 * size - 1
    assert not unrecoverable(~observed[None]).any()
    broken = observed.clone()
    broken[size - 1, size - 1] = False
    assert unrecoverable(~broken[None])[0, size - 1].all()


def test_recovered_entries_follow_from_the_observed_ones() -> None:
    """A second, algebraic oracle: logarithms turn u_i v_j into a linear system."""
    random_stream = torch.Generator().manual_seed(0)
    for _ in range(50):
        left, right = (torch.rand(n, generator=random_stream).double() + 0.5 for n in (4, 5))
        hidden = torch.rand(4, 5, generator=random_stream) < 0.6
        # log X_ij = a_i + b_j, so (i, j) follows iff its equation lies in the span of the observed ones.
        design = torch.zeros(4, 5, 9, dtype=torch.float64)
        for i, j in itertools.product(range(4), range(5)):
            design[i, j, i] = design[i, j, 4 + j] = 1
        known = design[~hidden]
        values = (left[:, None] * right).log()
        solution = torch.linalg.lstsq(known, values[~hidden], driver="gelsd").solution
        inside = (design - design @ torch.linalg.pinv(known) @ known).abs().amax(-1) < 1e-9
        lost = unrecoverable(hidden[None])[0]
        assert torch.equal(lost, hidden & ~inside)
        torch.testing.assert_close((design @ solution)[~lost], values[~lost])


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 4), (1, 5), (3, 2)])
def test_the_expected_share_is_the_enumerated_fraction(rows: int, columns: int) -> None:
    """All masks, in exact rational arithmetic and plain Python."""
    p_mask = Fraction(3, 10)
    lost = hidden_entries = Fraction(0)
    for flat in itertools.product([False, True], repeat=rows * columns):
        mask = [list(flat[i * columns : (i + 1) * columns]) for i in range(rows)]
        count = sum(flat)
        probability = p_mask**count * (1 - p_mask) ** (rows * columns - count)
        lost += probability * sum(map(sum, lost_by_union_find(mask)))
        hidden_entries += probability * count
    assert hidden_entries == p_mask * rows * columns
    assert expected_unrecoverable_share(rows, columns, 0.3) == pytest.approx(
        float(lost / hidden_entries), rel=1e-12
    )


def test_the_published_size_has_the_known_floor() -> None:
    """4×4, 30% hidden: 6.62% of the hidden entries, a pooled floor of 0.00735 at rank 1."""
    share = expected_unrecoverable_share(4, 4, 0.3)
    assert round(share, 4) == 0.0662
    assert round(share / 9, 5) == 0.00735


def test_two_by_two_in_closed_form() -> None:
    """An entry is lost unless the other three are observed: 1 − (1 − p)³; hidden everything: all are lost."""
    assert expected_unrecoverable_share(2, 2, 0.2) == pytest.approx(1 - 0.8**3)
    assert expected_unrecoverable_share(2, 2, 1.0) == 1
    assert expected_unrecoverable_share(1, 1, 0.1) == 1


def test_samples_of_the_task_have_the_expected_share() -> None:
    """A ratio of means, with its delta-method standard error; 5 of them."""
    task = MatrixCompletion(n=4, rank=1)
    hidden = task.sample(20000, seed=3).extras["hidden"].view(-1, 4, 4)
    lost, count = unrecoverable(hidden).sum((1, 2)).double(), hidden.sum((1, 2)).double()
    expected = expected_unrecoverable_share(4, 4, 0.3)
    standard_error = (lost - expected * count).std() / (len(count) ** 0.5 * count.mean())
    assert abs(lost.sum() / count.sum() - expected) <= 5 * standard_error


@pytest.mark.parametrize(
    ("size", "p_mask", "says"), [(5, 0.3, "2\\^25 masks"), (3, 0.0, "p_mask"), (3, 1.1, "p_mask")]
)
def test_what_has_no_share_is_refused(size: int, p_mask: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expected_unrecoverable_share(size, size, p_mask)
