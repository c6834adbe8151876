"""Shortens the table of a result to what fits a screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from circuits.statistics import LEVEL

#: The most rows that `print` shows of a result.
MOST_SHOWN = 40
#: The width of a terminal of which it is not known.
WIDTH = 80
#: Blanks between columns, and where room is short.
GAP, TIGHT = 2, 1


def short_table(frame: pd.DataFrame, columns: Sequence[str], name: str = "frame") -> str:
    """Returns some columns of a result's table as text, but those that are empty, and how many there are in all.

    Numbers have their interval beside them: what `effect` and the two bounds `effect_ci_low` and `effect_ci_high` hold
    stands in one column, `effect [95% CI]`. A metric that all rows are of is named below.
    """
    shown = frame[[column for column in columns if column in frame]].dropna(axis=1, how="all")
    rows = f"{len(frame)} row{'' if len(frame) == 1 else 's'}"
    if "metric" in shown and shown["metric"].nunique() == 1:
        rows += f" of {shown.pop('metric').iloc[0]}"
    if len(shown) > MOST_SHOWN:
        # One more than are shown, so that the gap between them is; texts of the others are not made.
        shown = pd.concat([shown[: MOST_SHOWN // 2 + 1], shown[-(MOST_SHOWN // 2) :]])
    text = in_width(with_intervals(shown), shutil.get_terminal_size((WIDTH, 24)).columns)
    return f"{text}\n{rows}; .{name} has all {len(frame.columns)} columns"


def with_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with the bounds of each number, `NAME_ci_low` and `NAME_ci_high`, in its column."""
    columns: dict[str, pd.Series] = {}
    for name in map(str, frame.columns):
        bounds = [f"{name}_ci_low", f"{name}_ci_high"]
        if bounds[0] in frame:
            texts = [interval_text(*row) for row in frame[[name, *bounds]].itertuples(index=False)]
            columns[f"{name} [{LEVEL:.0%} CI]"] = pd.Series(texts, frame.index, dtype=object)
        elif not name.endswith(("_ci_low", "_ci_high")):
            columns[name] = frame[name]
    return pd.DataFrame(columns)


def interval_text(value: float, low: float, high: float) -> str:
    if value != value:
        return "NaN"
    return f"{value:.4g}" if low != low else f"{value:.4g} [{low:.3g}, {high:.3g}]"


def in_width(frame: pd.DataFrame, width: int) -> str:
    """Returns a table as text, a line a row, in no wider lines than this where its texts have room.

    Where it is too wide, the names of columns take several lines; else the columns stand in several tables below each
    other, in each of which the first ones tell the rows apart.
    """
    text = as_text(frame)
    if frame.columns.empty or max(map(len, text.split("\n"))) <= width:
        return text
    columns = [Printed.of(frame, at) for at in range(len(frame.columns))]
    for gap in (GAP, TIGHT):
        if total(columns, gap) <= width:
            return joined(columns, gap, width)
    rows = list(zip(*(column.cells for column in columns), strict=True))
    labels = next(
        at for at in range(1, len(columns) + 1) if len({row[:at] for row in rows}) == len(set(rows))
    )
    parts = list(divided(columns[:labels], columns[labels:], width))
    gaps = (GAP if total(part, GAP) <= width else TIGHT for part in parts)
    return "\n\n".join(joined(part, gap, width) for part, gap in zip(parts, gaps, strict=True))


def as_text(frame: pd.DataFrame) -> str:
    text: str = frame.to_string(index=False, max_rows=MOST_SHOWN, float_format="{:.4g}".format)
    return text


@dataclass(frozen=True)
class Printed:
    """A column as text: the parts of its name, which may stand below each other, and its cells."""

    name: tuple[str, ...]
    cells: tuple[str, ...]

    @classmethod
    def of(cls, frame: pd.DataFrame, at: int) -> Printed:
        name, *cells = (line.strip() for line in as_text(frame.iloc[:, [at]]).split("\n"))
        return cls(tuple(re.findall("[_ ]*[^_ ]+[_ ]*|[_ ]+", name)), tuple(cells))

    @property
    def least(self) -> int:
        return max(map(len, (*self.name, *self.cells)))

    def lines(self, width: int) -> list[str]:
        """Returns the name in as few lines as the width allows."""
        lines = [""]
        for part in self.name:
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        return lines


def total(columns: Sequence[Printed], gap: int) -> int:
    return sum(column.least for column in columns) + gap * (len(columns) - 1)


def divided(labels: Sequence[Printed], others: Sequence[Printed], width: int) -> Iterator[list[Printed]]:
    """Yields the columns of each of several tables, as many of the others as there is room for beside the labels."""
    part = list(labels)
    for column in others:
        if len(part) > len(labels) and total([*part, column], TIGHT) > width:
            yield part
            part = list(labels)
        part.append(column)
    yield part


def joined(columns: Sequence[Printed], gap: int, width: int) -> str:
    """Returns the lines of a table; the room that is left goes to names, so that they take fewer lines."""
    room = width - total(columns, gap)
    names, widths = [], []
    for column in columns:
        more = max(0, len("".join(column.name)) - column.least)
        more = more if more <= room else 0
        room -= more
        widths.append(column.least + more)
        names.append(column.lines(column.least + more))
    height = max(map(len, names))
    rows = [
        *zip(*([""] * (height - len(lines)) + lines for lines in names), strict=True),
        *zip(*(column.cells for column in columns), strict=True),
    ]
    return "\n".join(
        (" " * gap).join(text.rjust(wide) for text, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
