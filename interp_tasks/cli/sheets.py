"""Holds the texts of a table, and takes out of them what repeats.

What all rows of a block have in common is always taken out (`folded`). Where a table is too wide, `layouts` has names
without what they have in common (`shortened`), and lines above groups of rows (`grouped`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from interp_tasks.texts import printable

if TYPE_CHECKING:
    from interp_tasks.pages import Column

#: Blanks before the rows of a group.
INDENT = 2
#: Keys of columns that hold names of runs and checkpoints.
REFERENCES = ("checkpoint", "run", "ref", "name")
#: Keys of columns that a single row does without, as its head says the same.
IN_HEAD_OF_ONE = ("variant", "metric", "p_adjusted")
#: Keys of columns of numbers that stand at the right edge.
NUMBERS = ("baseline", "value", "effect", "p_adjusted")
#: Texts of cells in which there is nothing.
NOTHING = ("", "–")


@dataclass(frozen=True)
class Sheet:
    """Texts of a table, before they are laid out.

    Attributes:
        headers, keys: of each column; a header has lines of its own.
        cells: row by row.
        blocks: the rows of each block.
        right: whether a column's texts stand at its right edge.
        groups: what stands above each row and those after it that belong to it; nothing: nothing.
        shared: what all rows of each block have in common; its head says it.
    """

    headers: tuple[str, ...]
    keys: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    right: tuple[bool, ...]
    groups: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[Any, Any]], columns: Sequence[Column], blocks: Sequence[tuple[int, ...]]
    ) -> Sheet:
        """Returns rows as printable texts; a header loses its "[95% CI]" where no row has an interval."""
        cells = tuple(tuple(printable(column.shown(row)) for column in columns) for row in rows)
        headers = [printable(column.header, keep="\n") for column in columns]
        with_intervals = [any("[" in row[at] for row in cells) for at in range(len(columns))]
        return cls(
            tuple(
                header if interval else header.partition(" [")[0]
                for header, interval in zip(headers, with_intervals, strict=True)
            ),
            tuple(column.key for column in columns),
            cells,
            tuple(blocks),
            tuple(column.text is None and column.key in NUMBERS for column in columns),
            ("",) * len(rows),
            ((),) * len(blocks),
        )

    def column(self, at: int) -> list[str]:
        return [row[at] for row in self.cells]

    def only(self, kept: Sequence[int]) -> Sheet:
        """Returns the sheet with some of its columns."""
        return replace(
            self,
            headers=tuple(self.headers[at] for at in kept),
            keys=tuple(self.keys[at] for at in kept),
            cells=tuple(tuple(row[at] for at in kept) for row in self.cells),
            right=tuple(self.right[at] for at in kept),
        )

    def with_column(self, at: int, texts: Sequence[str]) -> Sheet:
        """Returns the sheet with other texts in one column."""
        cells = tuple((*row[:at], text, *row[at + 1 :]) for row, text in zip(self.cells, texts, strict=True))
        return replace(self, cells=cells)

    def in_words(self, at: int) -> bool:
        """Returns whether a column holds words, which may be broken into lines."""
        return any(re.search(r"[^\W\d_]{2}", text) and "[" not in text for text in self.column(at))


def sheet_of(names: Sequence[str], texts: Sequence[Sequence[str]], right: Sequence[bool]) -> Sheet:
    """Returns rows of texts as a sheet of one block, its columns by their names."""
    return Sheet(
        tuple(map(printable, names)),
        tuple(names),
        tuple(tuple(map(printable, row)) for row in texts),
        (tuple(range(len(texts))),),
        tuple(right),
        ("",) * len(texts),
        ((),),
    )


def folded(sheet: Sheet) -> Sheet:
    """Removes columns that are the same in all rows of a block, and writes that in its head; drops empty ones.

    Intervals stay, and of a single row all but what its head says as well.
    """
    several = max(map(len, sheet.blocks), default=0) > 1
    kept: list[int] = []
    shared: list[list[str]] = [list(parts) for parts in sheet.shared]
    for at, (header, key) in enumerate(zip(sheet.headers, sheet.keys, strict=True)):
        found = [{sheet.cells[row][at] for row in block} for block in sheet.blocks]
        texts = set().union(*found)
        own = key in IN_HEAD_OF_ONE and (header == key or key == "p_adjusted")
        if any(len(each) > 1 for each in found) or any("[" in text for text in texts) or not (several or own):
            kept.append(at)
        elif not texts <= {*NOTHING}:
            for parts, each in zip(shared, found, strict=True):
                parts.append(phrase(header, key, *each))
    if not kept:
        return sheet
    return replace(sheet.only(kept), shared=tuple(map(tuple, shared)))


def phrase(header: str, key: str, text: str) -> str:
    """Returns ``baseline 0.02``; of a variant or a metric, and of what is called as its column, its name alone."""
    name = " ".join(re.sub(r"\[.*?\]", "", header).split())
    return (
        text
        if name == text or (key in ("variant", "metric") and name in ("", key))
        else f"{name} {text}".strip()
    )


def shortened(sheet: Sheet) -> Sheet:
    """Removes from names of runs and checkpoints what they have in common, and writes that in the heads."""
    from circuits.figures.names import LONGEST_SHORT, beginning_in_common, in_common

    for at, key in enumerate(sheet.keys):
        names = list(dict.fromkeys(sheet.column(at)))
        if key not in REFERENCES or len(names) < 2 or max(map(len, names)) <= LONGEST_SHORT:
            continue
        before, after = in_common(names) or (beginning_in_common(names), "")
        if not before + after:
            continue
        texts = [text[len(before) : len(text) - len(after)] for text in sheet.column(at)]
        shared = phrase(sheet.headers[at], "", f"{before}…{after}")
        sheet = replace(
            sheet.with_column(at, texts), shared=tuple((*parts, shared) for parts in sheet.shared)
        )
    return sheet


def grouped(sheet: Sheet) -> Sheet:
    """Makes lines above groups of rows of the first column, or of the words that its texts begin with."""
    if any(sheet.groups) or len(sheet.keys) < 2 or not sheet.in_words(0):
        return sheet
    first = sheet.column(0)
    runs = [list(run) for block in sheet.blocks for _, run in groupby(block, key=lambda row: first[row])]
    if len(sheet.keys) > 2 and sheet.in_words(1) and len(runs) < len(first):
        # A row by itself needs no line above it.
        alone = {run[0] for run in runs if len(run) == 1}
        labels = [
            f"{before}: {text}"
            if row in alone and before
            else " " * (INDENT if row not in alone else 0) + text
            for row, (before, text) in enumerate(zip(first, sheet.column(1), strict=True))
        ]
        groups = tuple("" if row in alone else text for row, text in enumerate(first))
        return replace(sheet.with_column(1, labels), groups=groups).only(range(1, len(sheet.keys)))
    above, names = list(sheet.groups), list(first)
    for block in sheet.blocks:
        for _, run in groupby(block, key=lambda row: first[row].partition(" ")[0]):
            rows = list(run)
            words = words_in_common([first[row] for row in rows])
            if words and 1 < len(rows) == len({first[row] for row in rows}):
                for row in rows:
                    above[row] = " ".join(words).rstrip(",")
                    names[row] = " " * INDENT + " ".join(first[row].split(" ")[len(words) :])
    return replace(sheet.with_column(0, names), groups=tuple(above))


def words_in_common(texts: Sequence[str]) -> list[str]:
    """Returns the words that all texts begin with and that none of them ends with."""
    places = zip(*(text.split(" ")[:-1] for text in texts), strict=False)
    return [words[0] for words in takewhile(lambda words: len({*words}) == 1, places)]
