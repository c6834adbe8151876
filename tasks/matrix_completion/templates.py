"""Templates of the entries that a head may attend to from an entry: boolean tensors [query key], or [batch query key]
where they depend on the mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.attention import ClassRule
from tasks.base import Batch

#: Templates by name: keys ``[query key]``, or a function of a batch: ``[batch query key]``.
Templates = dict[str, Tensor | Callable[[Batch], Tensor]]


def attention_templates(n: int, m: int) -> Templates:
    """Returns the templates by name; `row` and `column` exclude the query's own entry, which is `identity`.

    The maps that Gopalani, Lubana, Hu 2024 show (figures 4 and 5, appendix M) are of row, column and identity heads,
    and of heads that the mask directs. A row is mostly hidden if it has at most one observed entry.

    - ``mask_ignore``: the observed entries, ``longest_column`` those of the longest runs down a column;
    - ``masked_row``: from hidden entries of a row with one observed entry, to that one;
    - ``observed_copy``: from observed entries, to themselves;
    - ``input_processing``: the middle row (the two in the middle of an even number), from 5 rows on.
    """
    entries = torch.arange(n * m)
    itself = torch.eye(n * m, dtype=torch.bool)
    row = (entries[:, None] // m == entries // m) & ~itself
    column = (entries[:, None] % m == entries % m) & ~itself
    middle = (entries // m == (n - 1) // 2) | (entries // m == n // 2)

    def observed(batch: Batch) -> Bool[Tensor, "batch query key"]:
        return seen_by_all(~batch.extras["hidden"])

    def in_row(batch: Batch) -> Bool[Tensor, "batch query key"]:
        return observed(batch) & row.to(batch.tokens.device)

    def only_from(queries: Bool[Tensor, "batch query"], keys: Tensor) -> Bool[Tensor, "batch query key"]:
        return queries[:, :, None] & keys.to(queries.device)

    def count(batch: Batch) -> Tensor:
        return observed_in_row(batch, n, m)

    templates: Templates = {
        "identity": itself,
        "row": row,
        "column": column,
        "mask_ignore": observed,
        "hidden": lambda batch: seen_by_all(batch.extras["hidden"]),
        "row_observed": in_row,
        "column_observed": lambda batch: observed(batch) & column.to(batch.tokens.device),
        "longest_column": lambda batch: seen_by_all(longest_column(~batch.extras["hidden"], n, m)),
        "masked_row": lambda batch: only_from(batch.extras["hidden"] & (count(batch) == 1), in_row(batch)),
        "row_observed_elsewhere": lambda batch: only_from(count(batch) > 1, in_row(batch)),
        "observed_copy": lambda batch: only_from(~batch.extras["hidden"], itself),
        "identity_in_hidden_rows": lambda batch: only_from(
            batch.extras["hidden"] & (count(batch) <= 1), itself
        ),
    }
    return templates | ({"input_processing": middle.expand(n * m, -1)} if n > 4 else {})


#: Masked-row heads must not do the same in rows with more observed entries; observed-copy heads must not attend to
#: themselves in hidden rows; input-processing heads must attend alike under every mask.
ATTENTION_RULES = {
    "masked_row": ClassRule(unless="row_observed_elsewhere"),
    "observed_copy": ClassRule(unless="identity_in_hidden_rows"),
    "input_processing": ClassRule(static="mask"),
}


def autoregressive_templates(n: int, m: int) -> Templates:
    """Returns the templates by name, for [k masked entries, SEP, full entries]; queries are those from SEP on, which
    predict the entries.

    ``separator``: SEP. ``matching``: in the masked half the entry that the query predicts; ``last``: the one that it
    holds. ``row``, ``column``: those of the entry that it predicts, in the masked half, without that entry.
    ``observed``, ``hidden``: entries of the masked half. ``answered``: the full entries so far, up to the query.

    Appendix G shows layer-2 heads on SEP first, and later layer-1 heads near the identity to the matching input.
    """
    k = n * m
    positions = torch.arange(2 * k)
    query, key = positions[:, None] - k, positions
    predicting, in_masked_half = query >= 0, key < k
    matching = predicting & in_masked_half & (key == query)

    def of_mask(batch: Batch, wanted: bool) -> Bool[Tensor, "batch query key"]:
        keys = torch.zeros_like(batch.tokens, dtype=torch.bool)
        keys[:, :k] = batch.extras["hidden"] == wanted
        return seen_by_all(keys) & predicting.to(keys.device)

    return {
        "separator": predicting & (key == k),
        "matching": matching,
        "last": predicting & in_masked_half & (key == query - 1),
        "row": predicting & in_masked_half & (key // m == query // m) & ~matching,
        "column": predicting & in_masked_half & (key % m == query % m) & ~matching,
        "observed": lambda batch: of_mask(batch, False),
        "hidden": lambda batch: of_mask(batch, True),
        "answered": predicting & (key > k) & (key <= positions[:, None]),
    }


def observed_in_row(batch: Batch, n: int, m: int) -> Int[Tensor, "batch pos"]:
    """Returns the number of observed entries in each entry's row."""
    return (~batch.extras["hidden"]).unflatten(1, (n, m)).sum(2).repeat_interleave(m, 1)


def seen_by_all(keys: Bool[Tensor, "batch key"]) -> Bool[Tensor, "batch query key"]:
    """Returns a template with the same keys for every query."""
    return keys[:, None, :].expand(-1, keys.shape[1], -1)


def longest_column(observed: Bool[Tensor, "batch pos"], n: int, m: int) -> Bool[Tensor, "batch pos"]:
    """Returns the entries of the longest run of observed entries down a column; of all such runs where several are as
    long.
    """
    cells = observed.unflatten(1, (n, m))
    so_far = torch.zeros_like(cells, dtype=torch.long)
    for i in range(n):
        so_far[:, i] = cells[:, i] * (1 + (so_far[:, i - 1] if i else 0))
    inside = cells & (so_far == so_far.amax((1, 2), keepdim=True))
    # Entries above the end of a longest run belong to it.
    for i in reversed(range(n - 1)):
        inside[:, i] |= inside[:, i + 1] & cells[:, i]
    return inside.flatten(1)
