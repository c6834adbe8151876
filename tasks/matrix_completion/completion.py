"""Methods of filling in hidden entries, and their outputs on a batch, to compare models with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.base import Batch
from tasks.matrix_completion.nuclear_norm import least_nuclear_norm, solve_by_cvxpy
from tasks.matrix_completion.rank_one import unrecoverable

# Each keeps the observed entries and never reads a hidden one. All are equivariant: exchanging rows or columns
# exchanges those of the result.
Values = Float[Tensor, "batch rows columns"]
Mask = Bool[Tensor, "batch rows columns"]
#: Added to the diagonal of least squares, so that undetermined factors become 0.
RIDGE = 1e-9


def zeros(values: Values, hidden: Mask) -> Values:
    """Fills in 0, the mean of the prior."""
    return values.masked_fill(hidden, 0)


def anchor_ratio(values: Values, hidden: Mask) -> Values:
    """Fills in the mean over anchors (k, l) of x_il · x_kj / x_kl, all three observed and x_kl ≠ 0; without an anchor
    0.

    Exact where the rank is 1.
    """
    seen = values.masked_fill(hidden, 0)
    usable = (seen != 0).to(values.dtype)
    known = (~hidden).to(values.dtype)
    inverse = torch.where(seen != 0, 1 / seen, 0)
    # A hidden (i, j) is no anchor of its own row or column: its zero in `known` rules k = i and l = j out.
    total, anchors = seen @ inverse.mT @ seen, known @ usable.mT @ known
    return torch.where(hidden, total / anchors.clamp(min=1), values)


def has_anchor(values: Values, hidden: Mask) -> Mask:
    """Tells which entries :func:`anchor_ratio` has an anchor for."""
    usable = ((values != 0) & ~hidden).to(values.dtype)
    known = (~hidden).to(values.dtype)
    return known @ usable.mT @ known > 0


def row_regression(values: Values, hidden: Mask) -> Values:
    """Fills in the mean over rows k, observed at column j, of the prediction w_ik · x_kj.

    w_ik is the least-squares slope, without intercept, of row i on row k over the columns where both are observed.
    Exact where the rank is 1; one predictor at a time is not enough for more.
    """
    seen = values.masked_fill(hidden, 0)
    known = (~hidden).to(values.dtype)
    power = known @ seen.square().mT
    slope = torch.where(power > 0, (seen @ seen.mT) / power, 0)
    predictors = (power > 0).to(values.dtype) @ known
    return torch.where(hidden, slope @ seen / predictors.clamp(min=1), values)


def column_regression(values: Values, hidden: Mask) -> Values:
    """Applies :func:`row_regression` to the transposed matrix."""
    return row_regression(values.mT, hidden.mT).mT


def alternating_least_squares(
    values: Values, hidden: Mask, rank: int, steps: int, ridge: float = RIDGE
) -> Values:
    """Fills in U Vᵀ, with factors of the given rank fitted alternately to the observed entries, the other held fixed.

    A step fits U and then V. It starts from the first singular vectors of the matrix with hidden entries 0. Factors
    that least squares leaves undetermined are 0. A larger ``ridge`` (a penalty on ‖U‖² + ‖V‖²) keeps factors
    that are fitted to entries near 0 from growing large.
    """
    seen, left, right = _spectral_start(values, hidden, rank)
    for _ in range(steps):
        left = _fitted(seen, hidden, right, ridge)
        right = _fitted(seen.mT, hidden.mT, left, ridge)
    return torch.where(hidden, left @ right.mT, values)


def gradient_descent(values: Values, hidden: Mask, rank: int, steps: int) -> Values:
    """Fills in U Vᵀ, with factors of the given rank after gradient descent on ½ Σ over observed entries of (U Vᵀ − X)².

    It starts from the first singular vectors of the matrix with hidden entries 0; the step size is 0.5 / its largest
    singular value.
    """
    seen, left, right = _spectral_start(values, hidden, rank)
    size = 0.5 / torch.linalg.matrix_norm(seen, 2).clamp(min=1e-12)[:, None, None]
    for _ in range(steps):
        error = (left @ right.mT - seen).masked_fill(hidden, 0)
        left, right = left - size * error @ right, right - size * error.mT @ left
    return torch.where(hidden, left @ right.mT, values)


def _spectral_start(values: Values, hidden: Mask, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the matrix with hidden entries 0, and factors of its best approximation of that rank."""
    seen = values.masked_fill(hidden, 0)
    left, singular, right = torch.linalg.svd(seen, full_matrices=False)
    root = singular[:, None, :rank].sqrt()
    return seen, left[:, :, :rank] * root, right.mT[:, :, :rank] * root


def _fitted(seen: Tensor, hidden: Tensor, other: Tensor, ridge: float) -> Tensor:
    """Returns the factor of the rows that fits the observed entries best, [batch rows rank]."""
    known = (~hidden).to(seen.dtype)
    # [batch rows rank rank]: a normal equation for each row, over the columns it is observed in.
    gram = torch.einsum("bij,bjr,bjs->birs", known, other, other)
    gram = gram + ridge * torch.eye(other.shape[2], dtype=seen.dtype, device=seen.device)
    return torch.linalg.solve(gram, (seen @ other)[..., None])[..., 0]


#: The regularised problems of the paper (appendix B), and the two λ that only its code lists.
PENALTIES = (0.0005, 0.001, 0.0015, 0.00175, 0.002, 0.005, 0.01)
NUCLEAR_NORM = "nuclear norm"

#: What solves for the least nuclear norm.
Solver = Literal["batched", "cvxpy"]
#: A function from a batch to an output in the shape of a model's: [batch pos 1].
Method = Callable[[Batch], Tensor]
Filling = Callable[[Tensor, Tensor], Tensor]


def on_batches(fill: Filling, rows: int, columns: int) -> Method:
    """Turns a method of filling in matrices into one on batches; it computes in float64."""

    def output(batch: Batch) -> Tensor:
        values, hidden = as_matrices(batch, rows, columns)
        return fill(values, hidden).flatten(1)[..., None]

    return output


def as_matrices(batch: Batch, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns (values in float64, hidden), both [batch rows columns]; hidden values are NaN, as no method may read
    them.
    """
    hidden = batch.extras["hidden"].unflatten(1, (rows, columns))
    values = batch.targets.double().unflatten(1, (rows, columns))
    return values.masked_fill(hidden, float("nan")), hidden


def convex_baselines(rows: int, columns: int, solver: Solver = "batched") -> dict[str, Method]:
    """Returns completions of least nuclear norm, with equality and with each published penalty.

    Args:
        solver: all matrices at once with a certificate, or one at a time by CVXPY.
    """
    fill = partial(_nuclear_norm, solver=solver)
    solvers: dict[str, Filling] = {NUCLEAR_NORM: fill}
    for penalty in PENALTIES:
        solvers[f"{NUCLEAR_NORM}, lambda {penalty:g}"] = partial(fill, penalty=penalty)
    return {name: on_batches(fill, rows, columns) for name, fill in solvers.items()}


def candidate_methods(rows: int, columns: int, rank: int) -> dict[str, Method]:
    """Returns methods of filling in hidden entries, from zero to those that are exact at the true rank."""
    als, descent = alternating_least_squares, gradient_descent
    fillings: dict[str, Filling] = {
        "zero": zeros,
        "nuclear norm": _nuclear_norm,
        "rank-1 ratio": anchor_ratio,
        "row regression": row_regression,
        "column regression": column_regression,
        **{f"ALS, {counted(steps)}": partial(als, rank=rank, steps=steps) for steps in (1, 2, 5, 100)},
        "ALS, 100 steps, ridge 0.01": partial(als, rank=rank, steps=100, ridge=0.01),
        **{
            f"gradient descent, {counted(steps)}": partial(descent, rank=rank, steps=steps)
            for steps in (1, 10, 100)
        },
    }
    return {name: on_batches(fill, rows, columns) for name, fill in fillings.items()}


def counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def kinds_of_hidden_entries(batch: Batch, rows: int, columns: int, rank: int) -> dict[str, Tensor]:
    """Returns boolean ``[batch pos]`` by name. At rank 1: the entries that the observed ones determine, and the others.

    Among the determined ones, ``one anchor`` are those that three observed entries give (x_il · x_kj / x_kl), and
    ``longer path`` those that need more.
    """
    hidden = batch.extras["hidden"]
    if rank > 1:
        return {"hidden": hidden}
    values, matrices = as_matrices(batch, rows, columns)
    lost = unrecoverable(matrices).flatten(1)
    recoverable = hidden & ~lost
    near = has_anchor(values.nan_to_num(), matrices).flatten(1)
    return {
        "recoverable": recoverable,
        "one anchor": recoverable & near,
        "longer path": recoverable & ~near,
        "unrecoverable": lost,
    }


def nuclear_norms(output: Tensor, rows: int, columns: int) -> Tensor:
    """Returns ‖output‖_* of each example, as a matrix."""
    matrices = output.squeeze(-1).unflatten(1, (rows, columns))
    return torch.linalg.svdvals(matrices.float() if matrices.dtype.itemsize < 4 else matrices).sum(1)


def _nuclear_norm(
    values: Tensor, hidden: Tensor, penalty: float | None = None, solver: Solver = "batched"
) -> Tensor:
    solve = least_nuclear_norm if solver == "batched" else solve_by_cvxpy
    return solve(values, hidden, penalty).matrices
