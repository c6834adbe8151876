"""The tidy table for people: one block per checkpoint, at most 120 columns wide, readable at 80."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from interp_tasks.texts import LAYOUT, printable

if TYPE_CHECKING:
    import pandas
    from rich.console import Console
    from rich.table import Table

    from interp_tasks.pages import Column

WIDEST = 120
#: Blanks between columns.
GAP = 2
#: Where room is short, names of several words are broken into lines of about this length.
WORDS = 14
NARROWEST = 5
#: Where even that is too wide: blanks between columns, length of lines, and from what length on names are broken.
TIGHT, SHORT, LONG = 1, 9, 24
#: Rows of a checkpoint up to which several checkpoints share a block, and how long their names in it are.
FEW, LONGEST_SHORT = 4, 12
#: How narrow the columns are of a table that is printed in several parts.
PARTED = 2


def console(at_least: int = 0) -> Console:
    """Stdout; colour only on terminals, and a fixed width where there is none. A number is never cropped: what
    needs more room than there is makes the line longer than the terminal.
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

    Columns for which there is no room stand in a further table below, beside those that say what a row is about.
    """
    out = console()
    refs = [str(ref) for ref in dict.fromkeys(frame["ref"])]
    heads: dict[str, list[list[str]]] = {}
    if together and len(refs) > 1 and frame["ref"].value_counts().max() <= FEW:
        from interp_tasks.pages import Column

        short = short_names(refs)
        for ref in refs:
            name, *rest = title(frame[frame["ref"] == ref].to_dict("records"))
            named = f"{short[ref]}: {name}" if short[ref] != name else name
            heads.setdefault("", []).append([named, *rest])
        heads[""].append(list(done))
        frame = frame.assign(checkpoint=frame["ref"].map(short), ref="")
        columns = [Column("ckpt", "checkpoint"), *columns]
    rows = frame.to_dict("records")
    narrow, parts = arranged(rows, columns, out.width)
    layouts = [(part, *laid_out(rows, part, narrow)) for part in parts]
    wide = console(at_least=max(room_for(widths, gap_of(narrow)) for _, _, widths in layouts))
    for ref in dict.fromkeys(frame["ref"]):
        ref_rows = [index for index, row in enumerate(rows) if row["ref"] == ref]
        for parts_of_head in heads.get(ref) or [[*title([rows[index] for index in ref_rows]), *done]]:
            if parts_of_head:
                out.print(heading(parts_of_head, out.width), style="bold")
        for part, text, widths in layouts:
            printed = ref_rows
            if len(parts) > 1:
                skipped = len(shared(parts))
                printed = [
                    index for index in ref_rows if any(cell.strip("–") for cell in text[index][skipped:])
                ]
            if printed:
                wide.print(block(part, text, widths, printed, narrow))
                out.print()
    for line in notes:
        out.print(line, style="dim", soft_wrap=False)


def short_names(refs: Sequence[str]) -> dict[str, str]:
    """Shortens REFs to their differences: ``@pre``, ``@post`` of one run; ``seed-0``, ``seed-1``; else letters."""
    pieces = [re.findall(r"[@/:]?[^@/:]+", ref) for ref in refs]
    least = min(map(len, pieces))
    begin = next((at for at in range(least) if len({each[at] for each in pieces}) > 1), least - 1)
    end = next((at for at in range(1, least) if len({each[-at] for each in pieces}) > 1), least - 1)
    short = ["".join(each[begin : len(each) - end + 1]).lstrip("/:") for each in pieces]
    if len({*short}) < len(refs) or max(map(len, short)) > LONGEST_SHORT:
        short = [chr(ord("A") + at) if len(refs) <= 26 else str(at + 1) for at in range(len(refs))]
    return dict(zip(refs, short, strict=True))


def block(
    columns: Sequence[Column],
    text: Sequence[Sequence[str]],
    widths: Sequence[int],
    rows: Sequence[int],
    narrow: int,
) -> Table:
    """Returns some rows as a table."""
    from rich.table import Table

    table = Table(
        box=None, padding=(0, gap_of(narrow), 0, 0), pad_edge=False, header_style="dim", show_edge=False
    )
    for column, width in zip(columns, widths, strict=True):
        numeric = column.key in ("baseline", "value", "effect", "p_adjusted")
        table.add_column(
            broken(printable(column.header, keep="\n"), narrow),
            min_width=width,
            justify="right" if numeric and column.text is None else "left",
        )
    for index in rows:
        repeated = index != rows[0] and text[index][0] == text[index - 1][0] and not narrow
        table.add_row("" if repeated else text[index][0], *text[index][1:])
    return table


def arranged(
    rows: Sequence[Any], columns: Sequence[Column], width: int
) -> tuple[int, list[Sequence[Column]]]:
    """Returns how narrow columns have to be, and all of them, or, where no narrowness is enough, some at a time."""
    for narrow in range(NARROWEST + 1):
        if room_for(laid_out(rows, columns, narrow)[1], gap_of(narrow)) <= width:
            return narrow, [columns]
    text, widths = laid_out(rows, columns, PARTED)
    # As many as tell the rows of a block apart.
    blocks = [row["ref"] for row in rows]
    about = next(
        (
            count
            for count in range(1, len(columns))
            if len({(ref, *cells[:count]) for ref, cells in zip(blocks, text, strict=True)}) == len(rows)
        ),
        1,
    )
    parts: list[list[int]] = [[]]
    for column in range(about, len(columns)):
        if parts[-1] and room_for([*widths[:about], *(widths[one] for one in [*parts[-1], column])]) > width:
            parts.append([])
        parts[-1].append(column)
    return PARTED, [[*columns[:about], *(columns[column] for column in part)] for part in parts]


def shared(parts: Sequence[Sequence[Column]]) -> list[Column]:
    """Returns the columns that every part begins with."""
    return [first for first, *others in zip(*parts, strict=False) if all(other is first for other in others)]


def gap_of(narrow: int) -> int:
    return TIGHT if narrow >= NARROWEST - 1 else GAP


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


def laid_out(
    rows: Sequence[Any], columns: Sequence[Column], narrow: int
) -> tuple[list[list[str]], list[int]]:
    """Returns the text of every cell, and the width that each column needs."""
    text = [[broken(printable(column.shown(row)), narrow) for column in columns] for row in rows]
    headers = [broken(printable(column.header, keep="\n"), narrow) for column in columns]
    widths = [
        max(map(longest, [header, *cells]))
        for header, cells in zip(headers, zip(*text, strict=True), strict=True)
    ]
    return text, widths


def room_for(widths: Sequence[int], gap: int = GAP) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def broken(text: str, narrow: int) -> str:
    """Returns a cell or header in as little width as ``narrow`` asks for; nothing of it is left out.

    1: intervals below their numbers; 2: names of several words in lines too; 3: an interval takes two lines; 4:
    shorter lines of names; 5: long names, such as those of runs, are broken at their marks.
    """
    lines = text.replace(" [", "\n[").split("\n") if narrow else [text]
    room = SHORT if narrow >= NARROWEST - 1 else WORDS
    if narrow > 1:
        lines = [
            part
            for line in lines
            for part in ([line] if "[" in line else wrap(line, room, break_long_words=False))
        ]
    if narrow == NARROWEST:
        lines = [part for line in lines for part in ([line] if "[" in line else at_marks(line))]
    if narrow > 2:
        lines = [line.replace(", ", ",\n") if "[" in line else line for line in lines]
    return "\n".join(lines)


def at_marks(name: str) -> list[str]:
    """Returns a name in lines that end at a mark of it, none longer than ``LONG`` that need not be."""
    lines = [""]
    for part in re.findall(r"[^-,/_]*[-,/_]|[^-,/_]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > LONG:
            lines.append("")
        lines[-1] += part
    return lines


def longest(text: str) -> int:
    return max(map(len, text.split("\n")))


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
