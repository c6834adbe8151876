"""Methods of filling in hidden entries, to compare models with."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Each keeps the observed entries and never reads a hidden one. All are equivariant: exchanging rows or columns
# exchanges those of the result.
Values = Float[Tensor, "batch rows columns"]
Mask = Bool[Tensor, "batch rows columns"]
#: Added to the diagonal of least squares, so that undetermined factors become 0.
RIDGE = 1e-9


def fill_by_rank1_ratio(values: Values, hidden: Mask) -> Values:
    """Fills in the mean over anchors (k, l) of x_il · x_kj / x_kl, all three observed and x_kl ≠ 0; 0 without any.

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
    """Tells which entries :func:`fill_by_rank1_ratio` has an anchor for."""
    usable = ((values != 0) & ~hidden).to(values.dtype)
    known = (~hidden).to(values.dtype)
    return known @ usable.mT @ known > 0


def unrecoverable_entries(hidden: Bool[Tensor, "batch rows columns"]) -> Bool[Tensor, "batch rows columns"]:
    """Tells which hidden entries of a generic rank-1 matrix no method can infer.

    Observed entries are the edges of a graph between rows and columns; X_ij = u_i v_j follows from the
    observed entries if and only if row i and column j are connected. For symmetric u and v the best
    guess of any other entry is 0, so its expected squared error is Var X.
    """
    edges = (~hidden).float()
    rows, columns = hidden.shape[1:]
    connected = edges
    # A path from a row to a column alternates sides, so it has at most 2·min(rows, columns) − 1 edges.
    for _ in range(min(rows, columns) - 1):
        connected = ((connected + connected @ edges.mT @ edges) > 0).float()
    return hidden & (connected == 0)


def alternating_least_squares(
    values: Values, hidden: Mask, rank: int, steps: int, ridge: float = RIDGE
) -> Values:
    """Fills in U Vᵀ, with factors of the given rank fitted alternately to the observed entries, the other held fixed.

    A step fits U and then V. It starts from the first singular vectors of the matrix with hidden entries 0. Factors
    that least squares leaves undetermined are 0. A larger ``ridge`` (a penalty on ‖U‖² + ‖V‖²) keeps factors
    that are fitted to entries near 0 from growing large.
    """
    seen, left, right = _zero_fill_and_spectral_factors(values, hidden, rank)
    for _ in range(steps):
        left = _fit_row_factor(seen, hidden, right, ridge)
        right = _fit_row_factor(seen.mT, hidden.mT, left, ridge)
    return torch.where(hidden, left @ right.mT, values)


def gradient_descent(values: Values, hidden: Mask, rank: int, steps: int) -> Values:
    """Fills in U Vᵀ, with factors of the given rank after gradient descent on ½ Σ over observed entries of (U Vᵀ − X)².

    It starts from the first singular vectors of the matrix with hidden entries 0; the step size is 0.5 / its largest
    singular value.
    """
    seen, left, right = _zero_fill_and_spectral_factors(values, hidden, rank)
    size = 0.5 / torch.linalg.matrix_norm(seen, 2).clamp(min=1e-12)[:, None, None]
    for _ in range(steps):
        error = (left @ right.mT - seen).masked_fill(hidden, 0)
        left, right = left - size * error @ right, right - size * error.mT @ left
    return torch.where(hidden, left @ right.mT, values)


def _zero_fill_and_spectral_factors(values: Values, hidden: Mask, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the matrix with hidden entries 0, and factors of its best approximation of that rank."""
    seen = values.masked_fill(hidden, 0)
    left, singular, right = torch.linalg.svd(seen, full_matrices=False)
    root = singular[:, None, :rank].sqrt()
    return seen, left[:, :, :rank] * root, right.mT[:, :, :rank] * root


def _fit_row_factor(seen: Tensor, hidden: Tensor, column_factor: Tensor, ridge: float) -> Tensor:
    """Returns the factor of the rows that fits the observed entries best, [batch rows rank]."""
    known = (~hidden).to(seen.dtype)
    # [batch rows rank rank]: a normal equation for each row, over the columns it is observed in.
    gram = torch.einsum("bij,bjr,bjs->birs", known, column_factor, column_factor)
    gram = gram + ridge * torch.eye(column_factor.shape[2], dtype=seen.dtype, device=seen.device)
    return torch.linalg.solve(gram, (seen @ column_factor)[..., None])[..., 0]
