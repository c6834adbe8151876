"""Tells which hidden entries of a rank-1 matrix the observed ones determine."""

from __future__ import annotations

import torch
from jaxtyping import Bool
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


def expected_unrecoverable_share(rows: int, columns: int, p_mask: float) -> float:
    """Returns expected unrecoverable entries over expected hidden entries, by enumerating every mask (rank 1).

    Times r/9 it is the floor of ``mse_masked`` for uniform factors: 0.0662 and 0.00735 at 4×4, p_mask 0.3.

    Raises:
        ValueError: beyond 20 entries, where there are too many masks to enumerate; for p_mask outside (0, 1].
    """
    if not 0 < p_mask <= 1:
        raise ValueError(f"p_mask = {p_mask} must lie in (0, 1]: with nothing hidden there is no share")
    entries = rows * columns
    if entries > 20:
        raise ValueError(f"{rows}×{columns} has 2^{entries} masks; enumeration stops at 20 entries")
    lost = expected_hidden = 0.0
    bits = torch.arange(entries)
    for masks in torch.arange(2**entries).split(2**16):
        hidden = (masks[:, None] >> bits & 1).bool()
        count = hidden.sum(1).double()
        probability = p_mask**count * (1 - p_mask) ** (entries - count)
        gone = unrecoverable(hidden.view(-1, rows, columns)).flatten(1).sum(1)
        lost += float(probability @ gone.double())
        expected_hidden += float(probability @ count)
    return lost / expected_hidden
