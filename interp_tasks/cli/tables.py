"""Prints tidy tables for people: one block per checkpoint, at most 120 columns wide, a line a row at 80.

A table is a :class:`Sheet` of texts. What all rows of a block have in common is taken out of it and written in
the block's head. Where it is too wide then, it is made narrower by what costs a reader least, in this order: headers
in several lines, names without what they have in common, the first column as lines above groups of rows, fewer blanks;
then columns in a further table below. Only where a text is too long for that, it stands in several lines.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from interp_tasks.texts import LAYOUT, printable

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from interp_tasks.pages import Column

WIDEST = 120
#: Blanks between columns, and where room is short.
GAP, TIGHT = 2, 1
#: Several checkpoints share a block where none has more rows than this.
MAX_ROWS_SHARED = 4
#: Longer names may be broken into lines, at their hyphens, slashes and the like.
LONG_NAME = 24
#: Widths tried for the first columns, where the others stand in several tables below each other.
LABEL_WIDTHS = (WIDEST, 24, 18, 12)
#: Blanks before the rows of a group.
INDENT = 2
#: Keys of columns that hold names of runs and checkpoints.
REFERENCES = ("checkpoint", "run", "ref", "name")
#: Keys of columns that a single row does without, as its head says the same.
IN_HEAD_OF_ONE = ("variant", "metric", "p_adjusted")
#: Keys of columns of numbers that stand at the right edge.
NUMBERS = ("baseline", "value", "effect", "p_adjusted")
#: The parts of a text that no line break divides: words and brackets; or, with a number and its interval as one.
WORDS = re.compile(r"\[[^]]*\]|\S+")
WORDS_AND_INTERVALS = re.compile(r"[-+]?\d\S*(?: \[[^]]*\])|\[[^]]*\]|\S+")
#: Texts of cells in which there is nothing.
NOTHING = ("", "–")


def console(at_least: int = 0) -> Console:
    """Returns stdout, with colour only on terminals and a fixed width where there is none.

    A number is never cropped: what needs more room than there is makes the line longer than the terminal.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        """Every text that is printed, and every cell of a table, comes by here."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text, keep=LAYOUT), **options)

    width = shutil.get_terminal_size((WIDEST, 24)).columns
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = WIDEST
    width = max(min(width, WIDEST), at_least)
    return Plain(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def print_result(
    frame: pandas.DataFrame,
    columns: Sequence[Column],
    notes: Sequence[str],
    done: Sequence[str] = (),
    *,
    together: bool = False,
) -> None:
    """Prints blocks headed by their checkpoint and by what was ``done``; columns line up across blocks.

    With ``together`` several checkpoints of few rows are one block, under short names, which its head explains.
    """
    refs = [str(ref) for ref in dict.fromkeys(frame["ref"])]
    heads: list[list[list[str]]] = []
    if together and len(refs) > 1 and frame["ref"].value_counts().max() <= MAX_ROWS_SHARED:
        # Not above, as --help loads this file and no `circuits`.
        from circuits.figures.names import short_names
        from interp_tasks.pages import Column

        short = short_names(refs)
        legend = []
        for ref in refs:
            name, *rest = title(frame[frame["ref"] == ref].to_dict("records"))
            legend.append([f"{short[ref]}: {name}" if short[ref] != name else name, *rest])
        heads = [[*legend, list(done)]]
        frame = frame.assign(checkpoint=frame["ref"].map(short), ref="")
        columns = [Column("ckpt", "checkpoint"), *columns]
    rows = frame.to_dict("records")
    blocks = [
        tuple(index for index, row in enumerate(rows) if row["ref"] == ref)
        for ref in dict.fromkeys(frame["ref"])
    ]
    print_sheet(
        Sheet.of(rows, columns, blocks),
        heads or [[[*title([rows[index] for index in block]), *done]] for block in blocks],
    )
    out = console()
    out.print()
    for line in notes:
        out.print(line, style="dim", soft_wrap=False)


def print_sheet(sheet: Sheet, heads: Sequence[Sequence[Sequence[str]]]) -> None:
    """Prints a table, each block below its head.

    Args:
        heads: of each block, lines of parts; what all its rows have in common is added to the last.
    """
    out = console()
    layouts = arranged(folded(sheet), out.width)
    wide = console(at_least=max(layout.width for layout in layouts))
    between = False
    for at, lines in enumerate(heads):
        *first, last = lines or [[]]
        known = {*last, *(part.partition(" ")[2] for part in last)}
        shared = [
            part
            for part in layouts[0].sheet.shared[at]
            if part not in known and (part.partition(" ")[2] or part) not in known
        ]
        above = [heading(parts, out.width) for parts in [*first, [*last, *shared]] if parts]
        for layout in layouts:
            rows = layout.body(at, partly=len(layouts) > 1)
            if not rows:
                continue
            if between:
                out.print()
            for line in above:
                out.print(line, style="bold")
            for line in layout.header():
                wide.print(line, style="dim", soft_wrap=True)
            for line in rows:
                wide.print(line, soft_wrap=True)
            above, between = [], True


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
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def longest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def print_sentences(sentences: Sequence[str]) -> None:
    """Prints a list of findings, wrapped, with a blank line around it."""
    from rich.table import Table

    out = console()
    grid = Table.grid(padding=(0, 1))
    for sentence in sentences:
        grid.add_row("-", sentence)
    out.print()
    out.print(grid)
    out.print()


def heading(parts: Sequence[str], width: int) -> str:
    """Returns parts divided by dots, in as many lines as needed; only a part longer than a line is broken."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def title(rows: Sequence[Any]) -> list[str]:
    """Returns the parts of a heading: ``runs/x@4000``, ``step 4000``, ``256 test examples, seed 0``.

    Of rows that differ the first; of its split as many examples as any row has (an embedding has fewer than a grid).
    """
    import pandas

    row = rows[0]
    split = row["split"] if isinstance(row["split"], str) else "given"
    step = [] if pandas.isna(row["step"]) else [f"step {row['step']}"]
    same = [one["n"] for one in rows if one["split"] == row["split"] and not pandas.isna(one["n"])]
    counted = "all" if pandas.isna(row["n"]) else max(same, default=row["n"])
    about = "weights alone" if split == "weights" else f"{counted} {split} examples"
    number = row["seed"]
    seed = (
        [] if pandas.isna(number) else [f"seed {number:g}" if isinstance(number, float) else f"seed {number}"]
    )
    return [printable(str(row["ref"])), *step, ", ".join([about, *seed])]
