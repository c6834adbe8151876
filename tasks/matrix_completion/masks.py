"""Structured masks: named ones, the same for a whole batch, and masks whose longest column changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.attention import Relocation
from tasks.base import Batch
from tasks.errors import TaskError
from tasks.matrix_completion.templates import longest_column


def named_masks(n: int, m: int) -> dict[str, tuple[str, ...]]:
    """Returns rows of ``.`` (observed) and ``#`` (hidden), by name; none below 3×3.

    ``rows``: the middle row and the last one are hidden but for one entry each, in the second column and in the last
    but one. ``columns``: the same of columns. At 7×7 ``rows`` is the mask of the authors' code (rows 4 and 7, entries
    in columns 2 and 6, counted from 1), which figures 5, 23 and 24 of Gopalani, Lubana, Hu 2024 show.
    """
    if min(n, m) < 3:
        return {}
    columns = tuple("".join(row) for row in zip(*_two_rows(m, n), strict=True))
    return {"rows": _two_rows(n, m), "columns": columns}


def _two_rows(n: int, m: int) -> tuple[str, ...]:
    kept = {(n - 1) // 2: 1, n - 1: m - 2}
    return tuple("".join("." if kept.get(i, j) == j else "#" for j in range(m)) for i in range(n))


def parse_mask(text: str, n: int, m: int) -> Bool[Tensor, " pos"]:
    """Reads a mask, True at hidden entries: a name, or rows divided by commas, as in ``..#,#..,...``.

    Raises:
        TaskError: in one line.
    """
    named = named_masks(n, m)
    rows = named.get(text, tuple(text.split(",")))
    if len(rows) != n or {len(row) for row in rows} != {m} or set("".join(rows)) - set(".#"):
        names = f"{', '.join(named)}, or " if named else ""
        raise TaskError(
            f"mask {text!r}: write {names}{n} rows of {m} characters, each . or #, divided by commas"
        )
    return torch.tensor([character == "#" for row in rows for character in row])


def move_longest_column(
    n: int, m: int, batch: Batch, make: Callable[[Tensor, Tensor], Batch], stream: torch.Generator
) -> Relocation | None:
    """Returns the examples in which one column has the longest run of observed entries, and the same with the masks of
    this column and of another one exchanged; ``None`` where fewer than two examples have one.

    Args:
        make: makes a batch from values and hidden, both ``[batch pos]``.
    """
    hidden = batch.extras["hidden"].cpu()
    longest = longest_column(~hidden, n, m).unflatten(1, (n, m)).any(1)
    unique = longest.sum(1) == 1
    if m < 2 or int(unique.sum()) < 2:
        return None
    source = longest[unique].long().argmax(1)
    target = (source + torch.randint(1, m, source.shape, generator=stream)) % m
    exchanged = exchange_columns(hidden[unique].unflatten(1, (n, m)), source, target).flatten(1)
    values = batch.targets[unique.to(batch.targets.device)]
    device = values.device
    return Relocation(
        before=make(values, hidden[unique].to(device)),
        after=make(values, exchanged.to(device)),
        groups=torch.arange(n * m) % m,
        source=source,
        target=target,
    )


def exchange_columns(
    cells: Bool[Tensor, "batch row column"], one: Int[Tensor, " batch"], other: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch row column"]:
    """Exchanges two columns of each example."""
    order = torch.arange(cells.shape[2]).repeat(len(cells), 1)
    examples = torch.arange(len(cells))
    order[examples, one], order[examples, other] = other, one
    return cells.gather(2, order[:, None].expand_as(cells))
