"""The tidy table for people: one block per checkpoint, at most 120 columns wide, readable at 80."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from interp_tasks.reporting import Column

WIDEST = 120
#: Blanks between columns.
GAP = 2
#: Where room is short, names of several words are broken into lines of about this length.
WORDS = 14
NARROWEST = 3


def console(at_least: int = 0) -> Console:
    """Stdout; colour only on terminals, and a fixed width where there is none. A number is never cropped: what
    needs more room than there is makes the line longer than the terminal.
    """
    from rich.console import Console

    width = shutil.get_terminal_size((WIDEST, 24)).columns
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = WIDEST
    width = max(min(width, WIDEST), at_least)
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)


def print_result(
    frame: pandas.DataFrame, columns: Sequence[Column], notes: Sequence[str], done: Sequence[str] = ()
) -> None:
    """Blocks headed by the checkpoint they are about and by what was ``done``; columns line up across blocks."""
    from rich.table import Table
    from rich.text import Text

    rows = frame.to_dict("records")
    for narrow in range(NARROWEST + 1):
        text, widths = laid_out(rows, columns, narrow)
        if room_for(widths) <= console().width:
            break
    out, wide = console(), console(at_least=room_for(widths))
    for ref in dict.fromkeys(frame["ref"]):
        mine = [index for index, row in enumerate(rows) if row["ref"] == ref]
        out.print(Text(heading([*title(rows[mine[0]]), *done], out.width), style="bold"))
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
        for column, width in zip(columns, widths, strict=True):
            header = broken(column.header, narrow)
            numeric = column.key in ("baseline", "value", "effect", "p_adjusted")
            table.add_column(
                header, min_width=width, justify="right" if numeric and column.text is None else "left"
            )
        for index in mine:
            repeated = index != mine[0] and text[index][0] == text[index - 1][0] and not narrow
            table.add_row("" if repeated else text[index][0], *text[index][1:])
        wide.print(table)
        out.print()
    for line in notes:
        out.print(Text(line, style="dim"), soft_wrap=False)


def print_sentences(sentences: Sequence[str]) -> None:
    """A list of findings, wrapped, with a blank line around it."""
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
    """The text of every cell, and the width that each column needs."""
    text = [[broken(column.shown(row), narrow) for column in columns] for row in rows]
    headers = [broken(column.header, narrow) for column in columns]
    widths = [
        max(map(longest, [header, *cells]))
        for header, cells in zip(headers, zip(*text, strict=True), strict=True)
    ]
    return text, widths


def room_for(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * len(widths)


def broken(text: str, narrow: int) -> str:
    """A cell or header in as little width as ``narrow`` asks for; no word of it is cut.

    1: intervals below their numbers; 2: names of several words in lines too; 3: an interval takes two lines.
    """
    lines = text.replace(" [", "\n[").split("\n") if narrow else [text]
    if narrow > 1:
        lines = [
            part
            for line in lines
            for part in ([line] if "[" in line else wrap(line, WORDS, break_long_words=False))
        ]
    if narrow > 2:
        lines = [line.replace(", ", ",\n") if "[" in line else line for line in lines]
    return "\n".join(lines)


def longest(text: str) -> int:
    return max(map(len, text.split("\n")))


def heading(parts: Sequence[str], width: int) -> str:
    """Parts divided by dots, in as many lines as they need; a part that fits into a line is not broken."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def title(row: Any) -> list[str]:
    """``runs/x@4000``, ``step 4000``, ``256 test examples, seed 0``; no step where no checkpoint was read."""
    import pandas

    split = row["split"] if isinstance(row["split"], str) else "given"
    step = [] if pandas.isna(row["step"]) else [f"step {row['step']}"]
    counted = "all" if pandas.isna(row["n"]) else row["n"]
    about = "weights alone" if split == "weights" else f"{counted} {split} examples"
    number = row["seed"]
    seed = (
        [] if pandas.isna(number) else [f"seed {number:g}" if isinstance(number, float) else f"seed {number}"]
    )
    return [str(row["ref"]), *step, ", ".join([about, *seed])]
