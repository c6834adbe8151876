"""Lays out a task's data in a table for readers: a row per answer, what guessing gets side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column, number

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the metrics become columns."""
    import pandas

    metrics = dict.fromkeys(frame["metric"], math.nan)
    rows: dict[str, dict[Any, Any]] = {}
    for row in frame.to_dict("records"):
        rows.setdefault(row["variant"], {**row, **metrics})[row["metric"]] = row["value"]
    return pandas.DataFrame(list(rows.values()))


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    from interp_tasks.measurement.table import COLUMNS

    metrics = [str(name) for name in frame.columns if name not in COLUMNS]
    return [Column("", "variant"), *(Column(name, name, filled(name, number)) for name in metrics)]
