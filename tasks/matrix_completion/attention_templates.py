"""What a head may attend to from an entry, by templates, and masks under which heads show what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.base import Batch
from tasks.errors import TaskError

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
        return broadcast_over_queries(~batch.extras["hidden"])

    def observed_in_row(batch: Batch) -> Bool[Tensor, "batch query key"]:
        return observed(batch) & row.to(batch.tokens.device)

    def only_from(queries: Bool[Tensor, "batch query"], keys: Tensor) -> Bool[Tensor, "batch query key"]:
        return queries[:, :, None] & keys.to(queries.device)

    def observed_count_in_row(batch: Batch) -> Int[Tensor, "batch pos"]:
        """Returns the number of observed entries in each entry's row."""
        return (~batch.extras["hidden"]).unflatten(1, (n, m)).sum(2).repeat_interleave(m, 1)

    def hidden_in_mostly_hidden_row(batch: Batch) -> Bool[Tensor, "batch query"]:
        hidden: Tensor = batch.extras["hidden"]
        return hidden & (observed_count_in_row(batch) <= 1)

    templates: Templates = {
        "identity": itself,
        "row": row,
        "column": column,
        "mask_ignore": observed,
        "hidden": lambda batch: broadcast_over_queries(batch.extras["hidden"]),
        "row_observed": observed_in_row,
        "column_observed": lambda batch: observed(batch) & column.to(batch.tokens.device),
        "longest_column": lambda batch: broadcast_over_queries(
            longest_column_run(~batch.extras["hidden"], n, m)
        ),
        "masked_row": lambda batch: only_from(
            batch.extras["hidden"] & (observed_count_in_row(batch) == 1), observed_in_row(batch)
        ),
        "row_observed_elsewhere": lambda batch: only_from(
            observed_count_in_row(batch) > 1, observed_in_row(batch)
        ),
        "observed_copy": lambda batch: only_from(~batch.extras["hidden"], itself),
        "identity_in_hidden_rows": lambda batch: only_from(hidden_in_mostly_hidden_row(batch), itself),
    }
    return templates | ({"input_processing": middle.expand(n * m, -1)} if n > 4 else {})


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

    def masked_half_entries(batch: Batch, wanted: bool) -> Bool[Tensor, "batch query key"]:
        keys = torch.zeros_like(batch.tokens, dtype=torch.bool)
        keys[:, :k] = batch.extras["hidden"] == wanted
        return broadcast_over_queries(keys) & predicting.to(keys.device)

    return {
        "separator": predicting & (key == k),
        "matching": matching,
        "last": predicting & in_masked_half & (key == query - 1),
        "row": predicting & in_masked_half & (key // m == query // m) & ~matching,
        "column": predicting & in_masked_half & (key % m == query % m) & ~matching,
        "observed": lambda batch: masked_half_entries(batch, False),
        "hidden": lambda batch: masked_half_entries(batch, True),
        "answered": predicting & (key > k) & (key <= positions[:, None]),
    }


def broadcast_over_queries(keys: Bool[Tensor, "batch key"]) -> Bool[Tensor, "batch query key"]:
    """Returns a template with the same keys for every query."""
    return keys[:, None, :].expand(-1, keys.shape[1], -1)


def longest_column_run(observed: Bool[Tensor, "batch pos"], n: int, m: int) -> Bool[Tensor, "batch pos"]:
    """Returns the entries of the longest run of observed entries down a column, or of all such runs."""
    cells = observed.unflatten(1, (n, m))
    so_far = torch.zeros_like(cells, dtype=torch.long)
    for i in range(n):
        so_far[:, i] = cells[:, i] * (1 + (so_far[:, i - 1] if i else 0))
    inside = cells & (so_far == so_far.amax((1, 2), keepdim=True))
    # Entries above the end of a longest run belong to it.
    for i in reversed(range(n - 1)):
        inside[:, i] |= inside[:, i + 1] & cells[:, i]
    return inside.flatten(1)


def mask_hiding_rows(n: int, m: int, kept: Mapping[int, int | None]) -> tuple[str, ...]:
    """Returns a ``mask`` that hides whole rows but for one entry each: row -> column kept, or ``None``.

    ``mask_hiding_rows(7, 7, {3: 1, 6: 5})`` is the example of the authors' code (rows 4 and 7 of 7, counted from 1).
    """
    for i, j in kept.items():
        if not 0 <= i < n or (j is not None and not 0 <= j < m):
            raise TaskError(f"entry ({i}, {j}) lies outside a {n}×{m} matrix")
    return tuple("".join("." if i not in kept or kept[i] == j else "#" for j in range(m)) for i in range(n))


def named_masks(n: int, m: int) -> dict[str, tuple[str, ...]]:
    """Returns rows of ``.`` (observed) and ``#`` (hidden), by name; none below 3×3.

    ``rows``: the middle row and the last one are hidden but for one entry each, in the second column and in the last
    but one. ``columns``: the same of columns. At 7×7 ``rows`` is the mask of the authors' code (rows 4 and 7, entries
    in columns 2 and 6, counted from 1), which figures 5, 23 and 24 of Gopalani, Lubana, Hu 2024 show.
    """
    if min(n, m) < 3:
        return {}
    columns = mask_hiding_rows(m, n, {(m - 1) // 2: 1, m - 1: n - 2})
    return {
        "rows": mask_hiding_rows(n, m, {(n - 1) // 2: 1, n - 1: m - 2}),
        "columns": tuple(map("".join, zip(*columns, strict=True))),
    }


def parse_mask(text: str, n: int, m: int) -> Bool[Tensor, " pos"]:
    """Reads a mask, True at hidden entries: a name, or rows divided by commas, as in ``..#,#..,...``."""
    named = named_masks(n, m)
    rows = named.get(text, tuple(text.split(",")))
    if len(rows) != n or {len(row) for row in rows} != {m} or set("".join(rows)) - set(".#"):
        names = f"{', '.join(named)}, or " if named else ""
        raise TaskError(
            f"mask {text!r}: write {names}{n} rows of {m} characters, each . or #, divided by commas"
        )
    return torch.tensor([character == "#" for row in rows for character in row])
