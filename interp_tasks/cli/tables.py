"""Prints tables for people, with rich: one block per checkpoint, at most 120 columns wide; and writes results."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from interp_tasks.cli.streams_and_exit_codes import print_note, write_data
from interp_tasks.measurement.result import EXPERIMENTS, find_view, readable_table
from interp_tasks.pages import number
from interp_tasks.text_formatting import LAYOUT, escape_control_characters, pluralise

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from interp_tasks.experiments import Result
    from interp_tasks.measurement.options_and_examples import Progress
    from interp_tasks.pages import Column

WIDEST = 120
#: Blanks between columns.
GAP = 2
#: Longer words, names of runs as a rule, may be broken.
LONG_WORD = 24
#: Several checkpoints share a block where none has more rows than this.
MAX_ROWS_SHARED = 4
#: Keys of columns that a single row does without, as its head says the same.
IN_HEAD_OF_ONE = ("variant", "metric", "p_adjusted")
#: Keys of columns that together name a row.
NAMES = ("checkpoint", "variant", "intervention", "metric")
#: Texts of cells in which there is nothing.
NOTHING = ("", "–")
#: A table has no more rows than this of each checkpoint and metric.
MOST_ROWS = 40
#: Behind a number.
INTERVAL = re.compile(r" \[\S+, \S+\]$")
#: A cell of a column of numbers: its digits before the point and from it on, and what stands behind the number.
NUMBER = re.compile(r"([<+-]?[\d,]+|–|)((?:\.\d+)?(?:e[+-]\d+)?%?)( \[.*|, [a-z].*|)")


@dataclass(frozen=True)
class TextColumn:
    """A column of texts, one for each row of the table."""

    header: str
    key: str
    cells: tuple[str, ...]
    right: bool
    longest_word: int


def stdout_console(at_least: int = 0) -> Console:
    """Returns stdout, with colour only on terminals and a fixed width where there is none."""
    from rich.console import Console

    width = shutil.get_terminal_size((WIDEST, 24)).columns
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = WIDEST
    width = max(min(width, WIDEST), at_least)
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_wrapped(text: str = "", style: str = "") -> None:
    """Prints a text for people, wrapped; nothing in it is obeyed by a terminal."""
    stdout_console().print(escape_control_characters(text, keep=LAYOUT), style=style)


def print_result_blocks(
    frame: pandas.DataFrame,
    columns: Sequence[Column],
    notes: Sequence[str],
    done: Sequence[str] = (),
    *,
    together: bool = False,
) -> None:
    """Prints blocks headed by their checkpoint and by what was ``done``.

    With ``together`` several checkpoints of few rows are one block, under short names, which its head explains.
    """
    rows: list[Any] = frame.to_dict("records")
    blocks: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        blocks.setdefault(str(row["ref"]), []).append(index)
    titles = {ref: block_title_parts([rows[index] for index in block]) for ref, block in blocks.items()}
    heads = [[[*parts, *done]] for parts in titles.values()]
    cells = [
        text_column(column.header, column.key, [column.shown(row) for row in rows]) for column in columns
    ]
    if together and len(blocks) > 1 and max(map(len, blocks.values())) <= MAX_ROWS_SHARED:
        # Not above, as --help loads this file and no `circuits.figures`.
        from circuits.figures.panel_grid import short_names

        short = short_names(list(blocks))
        legend = [
            [f"{short[ref]}: {name}" if short[ref] != name else name, *rest]
            for ref, (name, *rest) in titles.items()
        ]
        heads, blocks = [[*legend, list(done)]], {"": list(range(len(rows)))}
        cells.insert(0, text_column("ckpt", "checkpoint", [short[str(row["ref"])] for row in rows]))
    without = print_blocks(cells, list(blocks.values()), heads)
    left_out = f"No room for intervals of {', '.join(without)}: a wider terminal, or --format csv."
    print_wrapped()
    for line in [*notes, *([left_out] if without else [])]:
        print_wrapped(line, "dim")


def text_column(header: str, key: str, texts: Sequence[str]) -> TextColumn:
    """Returns a column of texts, numbers with their points below each other; its header loses its "[95% CI]" where no
    row has an interval.
    """
    cells, header = tuple(map(escape_control_characters, texts)), escape_control_characters(header, keep="\n")
    if not any("[" in text for text in cells):
        header = header.partition(" [")[0]
    words = [word for text in (header, *cells) for word in text.split()]
    longest_word = max((min(cell_len(word), LONG_WORD) for word in words), default=1)
    found = [match.groups() for match in map(NUMBER.fullmatch, cells) if match is not None]
    if key in NAMES or len(found) < len(cells) or not any(map(any, found)):
        return TextColumn(header, key, cells, False, longest_word)
    before, after = (max(len(parts[at]) for parts in found) for at in (0, 1))
    cells = tuple(
        whole.rjust(before) + (rest if more.startswith(",") else rest.ljust(after)) + more
        for whole, rest, more in found
    )
    is_right = not any(more for _, _, more in found)
    return TextColumn(header, key, cells, is_right, max(longest_word, before + after))


def print_blocks(
    columns: Sequence[TextColumn], blocks: Sequence[Sequence[int]], heads: Sequence[Sequence[Sequence[str]]]
) -> list[str]:
    """Prints a table, the rows of each block below its head; returns the columns whose intervals had no room.

    Args:
        blocks: the numbers of the rows in each.
        heads: of each block, lines of parts; what all its rows have in common is added to the last.
    """
    from rich.table import Table
    from rich.text import Text

    kept, shared = split_shared_columns(columns, blocks)
    out = stdout_console()
    kept, without = omit_intervals_to_fit(kept, out.width)
    parts = split_columns_to_width(kept, out.width)
    wide = stdout_console(at_least=max(sum(width + GAP for _, width in part) for part in parts))
    for at, (block, (*first, last)) in enumerate(zip(blocks, heads, strict=True)):
        known = {*last, *(part.partition(" ")[2] for part in last)}
        more = [part for part in shared[at] if known.isdisjoint((part, part.partition(" ")[2] or part))]
        if at:
            out.print()
        for above in filter(None, [*first, [*last, *more]]):
            out.print(wrap_heading(above, out.width), style="bold")
        for place, part in enumerate(parts):
            says = [one for one, _ in part if one.key not in NAMES and one is not kept[0]]
            told = [row for row in block if any(one.cells[row].strip() not in NOTHING for one in says)]
            # Below the first part, a row that would say nothing is left out.
            rows = told if place else list(block)
            if not rows:
                continue
            if place:
                out.print()
            table = Table(
                box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim", show_edge=False
            )
            for column, width in part:
                header = Text(column.header, justify="right" if column.right else "left")
                table.add_column(header, width=width, overflow="fold")
            for row in rows:
                # By hand, as rich would take blanks behind a number away.
                cells = (one.cells[row].rjust(width if one.right else 0) for one, width in part)
                table.add_row(*cells)
            wide.print(table)
    return without


def omit_intervals_to_fit(columns: Sequence[TextColumn], room: int) -> tuple[list[TextColumn], list[str]]:
    """Returns the columns with as many intervals as leave each row on one line, and the names of those without.

    Intervals of effects stay; of the others those of the last column go first.
    """
    kept = list(columns)
    without: list[str] = []
    for at in reversed(range(len(kept))):
        one, widths = kept[at], (max(one.longest_word, *map(cell_len, one.cells)) + GAP for one in kept)
        if one.key != "effect" and any(map(INTERVAL.search, one.cells)) and sum(widths) > room:
            header = one.header.replace("[95% CI]", "").rstrip()
            cells = [INTERVAL.sub("", cell).strip() for cell in one.cells]
            kept[at] = text_column(header, one.key, cells)
            without.insert(0, " ".join(header.split()))
    return kept, without


def split_shared_columns(
    columns: Sequence[TextColumn], blocks: Sequence[Sequence[int]]
) -> tuple[list[TextColumn], list[list[str]]]:
    """Returns the columns that tell rows of a block apart, and for each block's head what all its rows have in common.

    Intervals stay, and of a single row all but what its head says as well.
    """
    several = max(map(len, blocks), default=0) > 1
    kept: list[TextColumn] = []
    shared: list[list[str]] = [[] for _ in blocks]
    for column in columns:
        found = [{column.cells[row].strip() for row in block} for block in blocks]
        texts = {text for each in found for text in each}
        in_head = column.key in IN_HEAD_OF_ONE and (column.header == column.key or column.key == "p_adjusted")
        if (
            any(len(each) > 1 for each in found)
            or any("[" in text for text in texts)
            or not (several or in_head)
        ):
            kept.append(column)
        elif not texts <= {*NOTHING}:
            name = " ".join(re.sub(r"\[.*?\]", "", column.header).split())
            # A variant or a metric is named alone: not ``variant all``, but ``baseline 0.02``.
            name = "" if name == column.key and name in ("variant", "metric") else name
            for parts, each in zip(shared, found, strict=True):
                parts += [text if name == text else f"{name} {text}".strip() for text in each]
    return (kept, shared) if kept else (list(columns), [[] for _ in blocks])


def split_columns_to_width(columns: Sequence[TextColumn], room: int) -> list[list[tuple[TextColumn, int]]]:
    """Returns as many columns at a time as there is room for, with their widths, which are those of every block.

    Columns below the first part begin with those that name a row. A column is at least as wide as its longest word
    and, as far as there is room, as its longest text; texts that have no room stand in several lines.
    """
    names = [column for column in columns if column.key in NAMES] or [*columns[:1]]
    parts: list[list[TextColumn]] = [[]]
    for column in columns:
        if len(parts[-1]) > len(names) and sum(one.longest_word + GAP for one in (*parts[-1], column)) > room:
            parts.append(names.copy())
        parts[-1].append(column)
    room = max(room, *(sum(one.longest_word + GAP for one in part) for part in parts))
    laid_out = []
    for part in parts:
        widths = [column.longest_word for column in part]
        left_over = room - sum(widths) - GAP * len(part)
        # Cells before headers, which are folded more readily than what stands in each row.
        for has_headers in (False, True):
            texts = [(*column.cells, *([column.header] * has_headers)) for column in part]
            wanted = [
                max((cell_len(line) for one in each for line in one.split("\n")), default=0) for each in texts
            ]
            # Those that lack least first, so that none is given more than it needs.
            order = sorted(range(len(part)), key=lambda at: wanted[at] - widths[at])
            for left, at in zip(range(len(part), 0, -1), order, strict=True):
                more = max(0, min(wanted[at] - widths[at], left_over // left))
                widths[at] += more
                left_over -= more
        laid_out.append(list(zip(part, widths, strict=True)))
    return laid_out


def wrap_heading(parts: Sequence[str], width: int) -> str:
    """Returns parts divided by dots, in as many lines as needed; only a part longer than a line is broken."""
    lines: list[str] = []
    for part in map(escape_control_characters, parts):
        if lines and len(longer := f"{lines[-1]} · {part}") <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def block_title_parts(rows: Sequence[Any]) -> list[str]:
    """Returns the parts of a heading: ``runs/x@4000``, ``step 4000``, ``256 test examples, seed 0``.

    Of rows that differ the first; of its split as many examples as any row has (an embedding has fewer than a grid).
    """
    import pandas

    row = rows[0]
    split = row["split"] if isinstance(row["split"], str) else "given"
    step = [] if pandas.isna(row["step"]) else [f"step {row['step']}"]
    same = [one["n"] for one in rows if one["split"] == row["split"] and not pandas.isna(one["n"])]
    counted = "all" if pandas.isna(row["n"]) else max(same, default=row["n"])
    about = "weights alone" if split == "weights" else pluralise(counted, f"{split} example")
    one_seed = len({one["seed"] for one in rows}) == 1 and not pandas.isna(row["seed"])
    seed = [f"seed {row['seed']}".removesuffix(".0")] if one_seed else []
    return [str(row["ref"]), *step, ", ".join([about, *seed])]


def print_rows(
    rows: Sequence[Mapping[str, Any]], format: str, shown: Sequence[str], heading: Sequence[str] = ()
) -> None:
    """Prints dicts with the same keys: for people the columns ``shown``, for programs all of them.

    Args:
        heading: parts of the line above what people see; what all rows have in common comes after them.
    """
    if format == "json":
        write_data(json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n")
    elif format == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([row.keys() for row in rows[:1]])
        for row in rows:
            cells = row.values()
            writer.writerow(
                json.dumps(cell) if isinstance(cell, (dict, list, tuple)) else cell for cell in cells
            )
        write_data(text.getvalue())
    else:
        columns = [text_column(name, name, [cell_text(row[name]) for row in rows]) for name in shown]
        print_blocks(columns, [range(len(rows))], [[list(heading)]])


def cell_text(value: Any) -> str:
    """Returns the text of a cell: lists joined, mappings as ``key value`` pairs, empty for ``None``."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {cell_text(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell_text, value))
    return "" if value is None else number(value) if isinstance(value, float) else str(value)


def training_progress(progress: Progress | None, name: str) -> Callable[..., None] | None:
    """Returns what ``train`` calls as progress(step, steps, line), for the name of a run."""
    if progress is None:
        return None
    return lambda step, steps, line: progress(step, steps, f"{cell_text(line.get('validation', {}))}  {name}")


FORMATS = ("table", "json", "csv")
#: Experiments whose variant ``all`` is of all heads.
OF_HEADS = ("ablation", "patch")


def print_in_format(result: Result, format: str, metric: str | None = None, top: int | None = None) -> None:
    """Print a result; a table of one metric, the task's own if none is said, and JSON and CSV of all if none is.

    Args:
        top: how many rows a table has for each checkpoint and metric, those of the largest effects, ranked.
    """
    compares = find_view(result.frame, "view_columns") is None
    chosen = result.of_metric(metric) if metric is not None or (compares and format == "table") else result
    if format != "table":
        write_data(chosen.to_json() if format == "json" else chosen.to_csv())
        return
    frame, notes = chosen.frame, list(chosen.notes)
    rows, columns = readable_table(frame)
    order = rows["effect"].abs().sort_values(ascending=False, kind="stable").index if compares else rows.index
    largest = rows.loc[order].groupby(["ref", *["metric"] * compares], sort=False).head(top or MOST_ROWS)
    if top is not None:
        in_order = {ref: number for number, ref in enumerate(rows["ref"].unique())}
        rows = largest.sort_values("ref", key=lambda refs: refs.map(in_order), kind="stable")
    elif len(largest) < len(rows):
        which = ", of the largest effects" if compares else ""
        notes.append(f"{len(largest)} of {len(rows)} rows{which}: --format csv has all.")
        rows = largest.sort_index()
    if compares:
        if result.experiment in OF_HEADS and rows["variant"].nunique() == 1:
            # Heads that stand by themselves: "all heads", "heads 0.1"; a choice with a name as it is.
            (only,) = rows["variant"].unique()
            name = "all heads" if only == "all" else f"heads {only}" if only[:1].isdigit() else only
            rows = rows.assign(variant=name)
        every = dict.fromkeys(readable_table(result.frame)[0]["metric"])
        left = [name for name in every if name not in set(frame["metric"])]
        notes += [f"--metric all: {', '.join(map(str, left))} too."] * bool(left)
        without = [ref for ref in dict.fromkeys(result.frame["ref"]) if ref not in set(frame["ref"])]
        notes += [f"No {metric}: {', '.join(map(str, without))}."] * bool(without)
    print_result_blocks(
        rows, columns, notes, setting_phrases(result.experiment, result.config), together=compares
    )


def write_and_show(write: Callable[[], list[Path]], show: Callable[[], None], quiet: bool) -> None:
    """Writes the files first, so that a closed pipe cannot lose them, then stdout, even where a file fails."""
    try:
        written = write()
    except Exception:
        # Of two failures the first is told; rich makes an exit of a closed pipe.
        with contextlib.suppress(OSError, SystemExit):
            show()
            sys.stdout.flush()
        raise
    show()
    if written:
        sys.stdout.flush()
        print_note(f"wrote {', '.join(map(str, written))}", quiet)


#: Settings whose option has another name.
OPTIONS = {"sites": "site", "templates": "template"}


def setting_phrases(experiment: str, config: Mapping[str, Any]) -> list[str]:
    """Returns settings for a header, ``["mode uniform", "positions hidden"]``; of joined results those they share.

    Args:
        config: of a :class:`Result`.
    """
    says = EXPERIMENTS[experiment].says if experiment in EXPERIMENTS else {}
    each = []
    for part in config.get("parts", [config]):
        said = {name: part[name] for name, unsaid in says.items() if part.get(name) not in (None, unsaid)}
        options = {OPTIONS.get(name, name.replace("_", "-")): value for name, value in said.items()}
        each.append([name if one is True else f"{name} {cell_text(one)}" for name, one in options.items()])
        # Where it was named in place of the checkpoint's own.
        if part.get("task") is not None:
            settings = ", ".join(f"{name} {value}" for name, value in part.get("task_config", {}).items())
            each[-1].insert(0, f"task {part['task']}" + (f" ({settings})" if settings else ""))
    return [one for one in each[0] if all(one in others for others in each)]
