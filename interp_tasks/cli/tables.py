"""Prints tidy tables for people: one block per checkpoint, at most 120 columns wide, a line a row at 80."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.cli.layouts import WIDEST, arranged
from interp_tasks.cli.sheets import Sheet, folded
from interp_tasks.texts import LAYOUT, printable

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from interp_tasks.pages import Column

#: Several checkpoints share a block where none has more rows than this.
MAX_ROWS_SHARED = 4


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
