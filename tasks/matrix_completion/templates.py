"""Which entries a head could attend to from an entry: boolean tensors [query key], or [batch query key] by the
mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from tasks.base import Batch

#: By name, keys ``[query key]``, or a function of a batch: ``[batch query key]``.
Templates = dict[str, Tensor | Callable[[Batch], Tensor]]


def attention_templates(n: int, m: int) -> Templates:
    """By name; `row` and `column` are without the query's own entry, so that a head on it is not taken for theirs.

    The maps that Gopalani, Lubana, Hu 2024 show (figures 4 and 5, appendix M) are of row, column and identity heads,
    and of heads that the mask directs: to observed entries only, to those of the row, to the longest column.
    """
    entries = torch.arange(n * m)
    itself = torch.eye(n * m, dtype=torch.bool)
    row = (entries[:, None] // m == entries // m) & ~itself
    column = (entries[:, None] % m == entries % m) & ~itself

    def observed(batch: Batch) -> Bool[Tensor, "batch query key"]:
        return seen_by_all(~batch.extras["hidden"])

    return {
        "identity": itself,
        "row": row,
        "column": column,
        "observed": observed,
        "hidden": lambda batch: seen_by_all(batch.extras["hidden"]),
        "row_observed": lambda batch: observed(batch) & row.to(batch.tokens.device),
        "column_observed": lambda batch: observed(batch) & column.to(batch.tokens.device),
        "longest_column": lambda batch: seen_by_all(longest_column(~batch.extras["hidden"], n, m)),
    }


def autoregressive_templates(n: int, m: int) -> Templates:
    """By name, for [k masked entries, SEP, full entries]; queries are those from SEP on, which predict the entries.

    ``separator``: SEP. ``matching``: in the masked half the entry that the query predicts; ``last``: the one that it
    holds. ``row``, ``column``: of the entry that it predicts, in the masked half without that entry. ``observed``,
    ``hidden``: of the masked half. ``answered``: the full entries so far, itself included.

    Appendix G shows layer-2 heads on SEP first, and later layer-1 heads near the identity to the matching input.
    """
    k = n * m
    positions = torch.arange(2 * k)
    query, key = positions[:, None] - k, positions
    predicting, masked = query >= 0, key < k
    matching = predicting & masked & (key == query)

    def of_mask(batch: Batch, wanted: bool) -> Bool[Tensor, "batch query key"]:
        keys = torch.zeros_like(batch.tokens, dtype=torch.bool)
        keys[:, :k] = batch.extras["hidden"] == wanted
        return seen_by_all(keys) & predicting.to(keys.device)

    return {
        "separator": predicting & (key == k),
        "matching": matching,
        "last": predicting & masked & (key == query - 1),
        "row": predicting & masked & (key // m == query // m) & ~matching,
        "column": predicting & masked & (key % m == query % m) & ~matching,
        "observed": lambda batch: of_mask(batch, False),
        "hidden": lambda batch: of_mask(batch, True),
        "answered": predicting & (key > k) & (key <= positions[:, None]),
    }


def seen_by_all(keys: Bool[Tensor, "batch key"]) -> Bool[Tensor, "batch query key"]:
    """The same keys for every query."""
    return keys[:, None, :].expand(-1, keys.shape[1], -1)


def longest_column(observed: Bool[Tensor, "batch pos"], n: int, m: int) -> Bool[Tensor, "batch pos"]:
    """The entries of the longest run of observed entries down a column; of all such runs where several are as long."""
    cells = observed.unflatten(1, (n, m))
    so_far = torch.zeros_like(cells, dtype=torch.long)
    for i in range(n):
        so_far[:, i] = cells[:, i] * (1 + (so_far[:, i - 1] if i else 0))
    inside = cells & (so_far == so_far.amax((1, 2), keepdim=True))
    # What ends as long as any run does is one of them, all of it.
    for i in reversed(range(n - 1)):
        inside[:, i] |= inside[:, i + 1] & cells[:, i]
    return inside.flatten(1)
