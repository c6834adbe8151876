"""Least nuclear norm: the batched solver against CVXPY, its own certificate, and closed forms."""

import pytest
import torch

from tasks import TaskError
from tasks.matrix_completion.nuclear_norm import least_nuclear_norm, nuclear_norm_objective, solve_by_cvxpy

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cvxpy.*")
SHAPES = [(4, 4, 1), (3, 6, 2), (7, 5, 2), (1, 4, 1)]


def problems(rows, columns, rank, batch=8, seed=0):
    """Matrices of low rank; the first masks hide nothing, everything, one row, one column."""
    stream = torch.Generator().manual_seed(seed)
    left, right = (
        2 * torch.rand(batch, side, rank, generator=stream, dtype=torch.float64) - 1
        for side in (rows, columns)
    )
    hidden = torch.rand(batch, rows, columns, generator=stream) < 0.35
    hidden[0], hidden[1] = False, True
    hidden[2, 0], hidden[3, :, 0] = True, True
    return (left @ right.mT * 100).round() / 100, hidden


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("penalty", [None, 0.002, 0.1])
def test_objective_is_that_of_cvxpy(shape, penalty):
    values, hidden = problems(*shape)
    found = least_nuclear_norm(values, hidden, penalty)
    oracle = solve_by_cvxpy(values, hidden, penalty)
    torch.testing.assert_close(found.objective, oracle.objective, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.objective, oracle.bound, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("penalty", [None, 0.01])
def test_no_other_completion_is_better(penalty):
    values, hidden = problems(5, 4, 2, batch=100)
    found = least_nuclear_norm(values, hidden, penalty)
    assert ((found.objective - found.bound) <= 1.01e-5 * found.objective.clamp(min=0.1)).all()
    assert (found.objective >= found.bound - 1e-9).all()
    stream = torch.Generator().manual_seed(1)
    for size in (1.0, 0.1, 0.01):
        move = size * torch.randn(values.shape, generator=stream, dtype=torch.float64)
        other = found.matrices + (move.masked_fill(~hidden, 0) if penalty is None else move)
        assert (nuclear_norm_objective(other, values, hidden, penalty) >= found.bound).all()


def test_observed_entries_are_kept_and_hidden_ones_not_read():
    values, hidden = problems(4, 5, 2, batch=80)
    found = least_nuclear_norm(values, hidden).matrices
    assert torch.equal(found[~hidden], values[~hidden])
    other = least_nuclear_norm(values.masked_fill(hidden, float("nan")), hidden).matrices
    assert torch.equal(found, other)
    # Where nothing hints at them, hidden entries are 0.
    assert found[1].abs().max() == 0
    assert found[2, 0].abs().max() < 1e-3
    assert found[3, :, 0].abs().max() < 1e-3


def test_with_everything_observed_the_penalty_soft_thresholds():
    """min ‖U − X‖²/N + λ‖U‖_* has the singular values (s − Nλ/2)₊ (Cai, Candès, Shen 2010, theorem 2.1)."""
    values, _ = problems(4, 4, 4, batch=20)
    hidden = torch.zeros_like(values, dtype=torch.bool)
    found = least_nuclear_norm(values, hidden, 0.05, tolerance=1e-6).matrices
    left, singular, right = torch.linalg.svd(values)
    expected = left @ torch.diag_embed((singular - 16 * 0.05 / 2).clamp(min=0)) @ right
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_what_cannot_be_solved_is_refused():
    values, hidden = problems(3, 3, 1)
    for solve in (least_nuclear_norm, solve_by_cvxpy):
        with pytest.raises(TaskError, match="penalty -1 must be above 0"):
            solve(values, hidden, -1.0)
        with pytest.raises(TaskError, match="finite"):
            solve(values * float("inf"), hidden)
    with pytest.raises(TaskError, match="ask for a larger"):
        least_nuclear_norm(values, hidden, tolerance=0.0)
