"""What observed entries tell of hidden ones in a matrix of rank 1: which they determine, along which paths."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def unrecoverable(hidden: Bool[Tensor, "batch rows columns"]) -> Bool[Tensor, "batch rows columns"]:
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


def pairs_of_entries(
    values: Float[Tensor, "batch n m"], hidden: Bool[Tensor, "batch n m"]
) -> tuple[dict[str, Tensor], Float[Tensor, "batch source target"]]:
    """Returns kinds of pairs (observed source, hidden target), and the derivative of the target's rank-1 ratio.

    ``same row``, ``same column``, ``neither``. For targets that the observed entries determine at rank 1, the source is
    ``on a shortest path`` from the target's row to its column (in the graph whose edges are observed entries; at length
    3 these are the anchors x_il, x_kj, x_kl) or ``off``; the others are ``to unrecoverable``.
    """
    n, m = values.shape[1:]
    rows = torch.arange(n * m, device=values.device) // m
    columns = torch.arange(n * m, device=values.device) % m
    same_row, same_column = rows[:, None] == rows, columns[:, None] == columns
    pairs = (~hidden).flatten(1)[:, :, None] & hidden.flatten(1)[:, None]
    on = on_shortest_path(~hidden) & pairs
    lost = unrecoverable(hidden).flatten(1)[:, None]
    kinds = {
        "same row": pairs & same_row,
        "same column": pairs & same_column,
        "neither": pairs & ~same_row & ~same_column,
        "on a shortest path": on,
        "off the shortest paths": pairs & ~on & ~lost,
        "to unrecoverable": pairs & lost,
    }
    return kinds, ratio_derivative(values, hidden)


def steps_between(observed: Bool[Tensor, "batch n m"]) -> Int[Tensor, "batch nodes nodes"]:
    """Returns distances between rows (nodes 0 to n − 1) and columns (from n on) along observed entries; n + m:
    no path.
    """
    batch, n, m = observed.shape
    edges = torch.zeros(batch, n + m, n + m, device=observed.device)
    edges[:, :n, n:] = observed
    edges[:, n:, :n] = observed.mT
    reached = torch.eye(n + m, device=observed.device).expand(batch, -1, -1)
    steps = torch.where(reached > 0, 0, n + m)
    for step in range(1, n + m):
        reached = ((reached + reached @ edges) > 0).float()
        steps = torch.where((reached > 0) & (steps == n + m), step, steps)
    return steps


def on_shortest_path(observed: Bool[Tensor, "batch n m"]) -> Bool[Tensor, "batch source target"]:
    """Tells whether an entry lies on a shortest path of observed entries from the target's row to its column."""
    n, m = observed.shape[1:]
    steps = steps_between(observed)
    across = steps[:, :n, n:].flatten(1)[:, None]
    of_rows, of_columns = steps[:, :n, :n], steps[:, n:, n:]
    to_column, to_row = steps[:, :n, n:], steps[:, n:, :n]
    # From row i along entry (r, c) to column j, in either direction; axes [batch r c i j].
    forth = of_rows[:, :, None, :, None] + 1 + of_columns[:, None, :, None]
    back = to_row[:, None, :, :, None] + 1 + to_column[:, :, None, None]
    shortest = torch.minimum(forth, back).flatten(3).flatten(1, 2) == across
    return shortest & (across < n + m) & observed.flatten(1)[:, :, None]


def ratio_derivative(
    values: Float[Tensor, "batch n m"], hidden: Bool[Tensor, "batch n m"]
) -> Float[Tensor, "batch source target"]:
    """Returns ∂x̂_ij / ∂x of the rank-1 ratio x̂_ij = Σ x_il x_kj x_kl / Σ x_kl² over all k, l with all three observed.

    That is the mean of the ratios x_il x_kj / x_kl with weights x_kl². NaN for targets that have none.
    """
    observed = (~hidden).double()
    known = values.double() * observed
    weights = observed @ (known**2).mT @ observed
    estimate = known @ known.mT @ known / weights
    # Axes [batch, source r c, target i j]; at hidden targets no anchor has k = i or l = j.
    n, m = values.shape[1:]
    in_row, in_column = torch.eye(n).to(known), torch.eye(m).to(known)
    per = weights[:, None, None]
    of_row = torch.einsum("ri,bcj->brcij", in_row, known.mT @ known) / per
    of_column = torch.einsum("cj,bri->brcij", in_column, known @ known.mT) / per
    corner = torch.einsum("bic,brj->brcij", observed, observed)
    product = torch.einsum("bic,brj->brcij", known, known)
    of_corner = (product - 2 * estimate[:, None, None] * corner * known[..., None, None]) / per
    derivative = (of_row + of_column + of_corner) * observed[..., None, None]
    derivative = torch.where((weights > 0)[:, None, None] & hidden[:, None, None], derivative, torch.nan)
    return derivative.flatten(3).flatten(1, 2).to(values.dtype)
