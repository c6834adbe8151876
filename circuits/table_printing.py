"""Prints the table of a result in the width of a screen, and reads which of its metrics are meant."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.statistics import LEVEL, percentile_bounds

#: The most rows that `print` shows of a result.
MOST_SHOWN = 40
#: The width of a terminal of which it is not known.
WIDTH = 80


def ci_names(name: str) -> tuple[str, str, str]:
    """Returns the columns of a number and of the bounds of its interval."""
    return name, f"{name}_ci_low", f"{name}_ci_high"


def interval_columns(name: str, value: Any, drawn: np.ndarray) -> dict[str, Any]:
    """Returns the columns of a number, or of one for each series, and of its interval.

    Args:
        drawn: the same in resamples of the examples, [draw] or [draw *series].
    """
    bounds = percentile_bounds(drawn.reshape(len(drawn), -1), LEVEL)
    ends = (bound.reshape(drawn.shape[1:])[()] for bound in bounds)  # of one series a number
    return dict(zip(ci_names(name), (value, *ends), strict=True))


def short_table_text(frame: pd.DataFrame, columns: Sequence[str], name: str = "frame") -> str:
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
    text = wrap_table_to_width(inline_intervals(shown), shutil.get_terminal_size((WIDTH, 24)).columns)
    return f"{text}\n{rows}; .{name} has all {len(frame.columns)} columns"


def inline_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with the bounds of each number, `NAME_ci_low` and `NAME_ci_high`, in its column."""
    columns: dict[str, pd.Series] = {}
    for name in map(str, frame.columns):
        if f"{name}_ci_low" in frame:
            texts = [interval_text(*row) for row in frame[[*ci_names(name)]].itertuples(index=False)]
            columns[f"{name} [{LEVEL:.0%} CI]"] = pd.Series(texts, frame.index, dtype=object)
        elif not name.endswith(("_ci_low", "_ci_high")):
            columns[name] = frame[name]
    return pd.DataFrame(columns)


def interval_text(value: float, low: float, high: float) -> str:
    if value != value:
        return "NaN"
    return f"{value:.4g}" if low != low else f"{value:.4g} [{low:.3g}, {high:.3g}]"


def wrap_table_to_width(frame: pd.DataFrame, width: int) -> str:
    """Returns a table as text, a line a row.

    One that is too wide stands in several tables below each other, which all begin with the columns that tell its rows
    apart.
    """

    def text(columns: list[str]) -> str:
        shown: str = frame[columns].to_string(index=False, max_rows=MOST_SHOWN, float_format="{:.4g}".format)
        return shown

    def fits(columns: list[str]) -> bool:
        return max(map(len, text(columns).split("\n"))) <= width

    columns = list(frame.columns)
    if not columns or fits(columns):
        return text(columns)
    labels = next((at for at in range(1, len(columns)) if not frame.duplicated(columns[:at]).any()), 1)
    parts = [columns[:labels]]
    for column in columns[labels:]:
        if len(parts[-1]) > labels and not fits([*parts[-1], column]):
            parts.append(columns[:labels])
        parts[-1].append(column)
    return "\n\n".join(map(text, parts))


def metrics_asked_for(frame: pd.DataFrame, metric: str | Sequence[str] | None) -> list[str]:
    """Returns the metrics of a table that are asked for; None: all.

    Raises `CircuitsError` for one that the table does not have.
    """
    known = list(dict.fromkeys(frame["metric"]))
    chosen = known if metric is None else [metric] if isinstance(metric, str) else list(metric)
    for name in chosen:
        if name not in known:
            raise CircuitsError(f"plot: no metric {name!r}; it has {', '.join(map(str, known))}")
    return chosen
