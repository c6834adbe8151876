"""Lays a table out in lines within a width; where it is too wide, makes it narrower by what costs a reader least.

In this order: headers in several lines, names without what they have in common, lines above groups of rows, fewer
blanks; then columns in a further table below. Only where a text is too long for that, it stands in several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rich.cells import cell_len

from interp_tasks.cli.sheets import NOTHING, Sheet, grouped, shortened

WIDEST = 120
#: Blanks between columns, and where room is short.
GAP, TIGHT = 2, 1
#: Longer names may be broken into lines, at their hyphens, slashes and the like.
LONG_NAME = 24
#: Widths tried for the first columns, where the others stand in several tables below each other.
LABEL_WIDTHS = (WIDEST, 24, 18, 12)
#: The parts of a text that no line break divides: words and brackets; or, with a number and its interval as one.
WORDS = re.compile(r"\[[^]]*\]|\S+")
WORDS_AND_INTERVALS = re.compile(r"[-+]?\d\S*(?: \[[^]]*\])|\[[^]]*\]|\S+")


@dataclass(frozen=True)
class Layout:
    """A sheet, or columns of one, in lines.

    Attributes:
        widths: of the columns.
        gap: blanks between them.
        labels: how many of the first columns tell rows apart; they are repeated in every part of a divided table.
        loose: 1 where intervals stand below their numbers; 2 where they and long names are broken too.
    """

    sheet: Sheet
    widths: tuple[int, ...]
    gap: int = GAP
    labels: int = 0
    loose: int = 0

    @property
    def width(self) -> int:
        return sum(self.widths) + self.gap * (len(self.widths) - 1)

    def header(self) -> list[str]:
        """Returns the lines of the headers, which end at the rows."""
        found = [
            tuple(text.split("\n")) if longest(text) <= width else in_lines(stacked(text), width)
            for text, width in zip(self.sheet.headers, self.widths, strict=True)
        ]
        most = max(map(len, found))
        lines = self.joined([("",) * (most - len(each)) + each for each in found])
        return [line for line in lines if line]

    def body(self, block: int, *, partly: bool) -> list[str]:
        """Returns the lines of a block's rows; ``partly``: of those that say something beside what they are about."""
        lines: list[str] = []
        above: tuple[str, ...] | None = None
        group = ""
        for row in self.sheet.blocks[block]:
            cells = self.sheet.cells[row]
            if partly and {*cells[self.labels :]} <= {*NOTHING}:
                continue
            if self.sheet.groups[row] != group:
                group, above = self.sheet.groups[row], None
                lines += [group] * bool(group)
            repeated = above is not None and above[0] == cells[0] and len(cells) > 1
            shown = ("", *cells[1:]) if repeated else cells
            lines += self.joined(
                [in_lines(text, width, self.loose) for text, width in zip(shown, self.widths, strict=True)]
            )
            above = cells
        return lines

    def joined(self, cells: Sequence[Sequence[str]]) -> list[str]:
        """Returns the lines of cells of several lines that stand beside each other."""
        lines = []
        for at in range(max(map(len, cells))):
            parts = [
                padded(each[at] if at < len(each) else "", width, right)
                for each, width, right in zip(cells, self.widths, self.sheet.right, strict=True)
            ]
            lines.append((" " * self.gap).join(parts).rstrip())
        return lines

    def is_broken(self) -> bool:
        """Returns whether some row takes more than one line."""
        return any(
            len(in_lines(text, width, self.loose)) > 1
            for row in self.sheet.cells
            for text, width in zip(row, self.widths, strict=True)
        )

    def length(self, *, partly: bool) -> int:
        bodies = [self.body(block, partly=partly) for block in range(len(self.sheet.blocks))]
        return sum(len(self.header()) + len(body) + 1 for body in bodies if body)


def arranged(sheet: Sheet, width: int) -> list[Layout]:
    """Returns the layouts that show a table within a width: one, or several below each other with some columns each."""
    natural = Layout(sheet, tuple(map(max, needed(sheet), map(longest, sheet.headers))))
    if natural.width <= width:
        return [natural]
    plain, in_groups = [[each, shortened(each)] for each in (sheet, grouped(sheet))]
    candidates: list[list[Layout]] = []
    for sheets in (plain, in_groups):
        lines = [Layout(each, needed(each), gap) for gap in (GAP, TIGHT) for each in sheets]
        fitting = [layout for layout in lines if layout.width <= width]
        if fitting and sheets is plain:
            return [relaxed(fitting[0], width)]
        candidates += [[layout] for layout in fitting[:1]]
    every = list(dict.fromkeys([*plain, *in_groups]))
    candidates += [
        parts
        for each in every
        for gap in (GAP, TIGHT)
        for cap in LABEL_WIDTHS
        if (parts := parted(each, width, cap, gap))
    ]
    # A row has one line wherever there is a way.
    candidates = [layouts for layouts in candidates if not any(layout.is_broken() for layout in layouts)] or [
        *candidates,
        *([layout] for each in every if (layout := squeezed(each, width, loose=0))),
    ]
    candidates = (
        candidates
        or [[layout] for loose in (1, 2) for each in every if (layout := squeezed(each, width, loose))]
        or [parted(each, width, LABEL_WIDTHS[-1], TIGHT, wider=True) for each in every]
    )
    best = min(
        candidates, key=lambda layouts: sum(layout.length(partly=len(layouts) > 1) for layout in layouts)
    )
    return [relaxed(layout, width) for layout in best]


def relaxed(layout: Layout, width: int) -> Layout:
    """Gives headers the room that is left, so that they take fewer lines."""
    widths = list(layout.widths)
    for at, header in enumerate(layout.sheet.headers):
        more = longest(header) - widths[at]
        if 0 < more <= width - replace(layout, widths=tuple(widths)).width:
            widths[at] += more
    return replace(layout, widths=tuple(widths))


def needed(sheet: Sheet) -> tuple[int, ...]:
    """Returns the width of each column with a line a row; a header takes as many lines as it needs for that."""
    return tuple(
        max(map(longest, ["\n".join(pieces(stacked(header))), *sheet.column(at)]))
        for at, header in enumerate(sheet.headers)
    )


def least(sheet: Sheet, loose: int) -> list[int]:
    """Returns the width of each column in which no word is broken."""
    return [
        max(
            max(len(text) - len(text.lstrip()) + cell_len(piece) for piece in pieces(text, loose))
            for text in [stacked(header), *sheet.column(at)]
        )
        for at, header in enumerate(sheet.headers)
    ]


def squeezed(sheet: Sheet, width: int, loose: int) -> Layout | None:
    """Breaks texts into lines, those first that add fewest for the room they give; ``None`` where no room is enough."""
    widths, smallest = list(needed(sheet)), least(sheet, loose)
    heights = [[1] * len(widths) for _ in sheet.cells]
    while sum(widths) + TIGHT * (len(widths) - 1) > width:
        best: tuple[float, int, int] | None = None
        for at, now in enumerate(widths):
            if now <= smallest[at]:
                continue
            found = [in_lines(row[at], now - 1, loose) for row in sheet.cells]
            then = max(smallest[at], *(max(map(cell_len, lines)) for lines in found))
            # A row is as high as its highest cell.
            more = sum(max(0, len(lines) - max(row)) for lines, row in zip(found, heights, strict=True))
            best = min(best or (math.inf, 0, 0), (more / (now - then) if then < now else math.inf, at, then))
        if best is None or best[0] == math.inf:
            return None
        _, at, widths[at] = best
        for row, cells in zip(heights, sheet.cells, strict=True):
            row[at] = len(in_lines(cells[at], widths[at], loose))
    return Layout(sheet, tuple(widths), TIGHT, loose=loose)


def parted(sheet: Sheet, width: int, cap: int, gap: int, *, wider: bool = False) -> list[Layout]:
    """Lays some columns at a time beside those that tell the rows of a block apart; nothing where that is too wide.

    Args:
        cap: how wide the first columns are at most, where their words allow it.
        gap: blanks between columns.
        wider: than ``width``, where it has to be.
    """
    widths, smallest = list(needed(sheet)), least(sheet, loose=0)
    number = {row: at for at, block in enumerate(sheet.blocks) for row in block}

    def told_apart(count: int) -> int:
        return len({(number[row], sheet.groups[row], *sheet.cells[row][:count]) for row in number})

    # Rows that are equal throughout need not be told apart.
    labels = next((n for n in range(1, len(widths)) if told_apart(n) == told_apart(len(widths))), 1)
    for at in range(labels):
        widths[at] = max(min(widths[at], cap), smallest[at])
    room = width - sum(widths[:labels]) - gap * labels
    most = max(widths[labels:], default=0)
    if most > room and not wider:
        return []
    room = max(room, most)
    filled = {room: list(fill(widths, labels, room, gap)) for room in range(most, room + 1)}
    # As few parts as there is room for, none wider than it has to be.
    parts = min(filled.values(), key=len)
    return [
        Layout(
            sheet.only([*range(labels), *part]),
            tuple(widths[at] for at in [*range(labels), *part]),
            gap,
            labels,
        )
        for part in parts
    ]


def fill(widths: Sequence[int], labels: int, room: int, gap: int) -> Iterator[list[int]]:
    """Yields the columns after the first ``labels``, as many at a time as there is room for."""
    part: list[int] = []
    for at in range(labels, len(widths)):
        if part and sum(widths[one] + gap for one in part) + widths[at] > room:
            yield part
            part = []
        part.append(at)
    yield part


def stacked(header: str) -> str:
    """Returns a header with what stands in brackets below the rest."""
    return re.sub(r" (?=\[[^]]*\]$|\([^)]*\)$)", "\n", header)


@cache
def pieces(text: str, loose: int = 0) -> tuple[str, ...]:
    """Returns the parts of a text that no line break divides: words, and a number with its interval.

    With ``loose`` 1 an interval by itself, with 2 its ends and parts of long names.
    """
    if loose > 1:
        words = [
            part for word in text.split() for part in (at_marks(word) if len(word) > LONG_NAME else [word])
        ]
    else:
        words = (WORDS if loose else WORDS_AND_INTERVALS).findall(text)
    return tuple(words) or ("",)


@cache
def in_lines(text: str, width: int, loose: int = 0) -> tuple[str, ...]:
    """Returns a text in lines, none wider than ``width`` where its words allow that."""
    if "\n" in text:
        return tuple(line for part in text.split("\n") for line in in_lines(part, width, loose))
    if cell_len(text) <= width:
        return (text,)
    indent = " " * (len(text) - len(text.lstrip()))
    lines = [indent]
    rest = text.strip()
    for piece in pieces(text, loose):
        between = " " if rest.startswith(" ") else ""
        rest = rest.lstrip()[len(piece) :]
        if lines[-1].strip() and cell_len(lines[-1] + between + piece) > width:
            lines.append(indent)
            between = ""
        lines[-1] += (between if lines[-1].strip() else "") + piece
    return tuple(lines)


def at_marks(name: str) -> list[str]:
    """Returns a name in parts that end at a mark of it, none longer than ``LONG_NAME`` that need not be."""
    lines = [""]
    for part in re.findall(r"[^-,/_@:]*[-,/_@:]|[^-,/_@:]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > LONG_NAME:
            lines.append("")
        lines[-1] += part
    return lines


def padded(text: str, width: int, right: bool) -> str:
    """Returns a line with blanks after it, or before it where it stands at the right edge."""
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def longest(text: str) -> int:
    """Returns the width of the longest line of a text."""
    return max(map(cell_len, text.split("\n")))
