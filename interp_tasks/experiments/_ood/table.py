"""Lays out the rows of ``ood`` for readers; the notes name positions that were never trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_tasks.experiments._ood.measure import UNTRAINED
from interp_tasks.measurement.baselines.comparison import TRUTH
from interp_tasks.measurement.table import effect_text, value_text
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the rows against the method; the count of untrained positions only where nothing else is asked for."""
    rows = frame[frame["intervention"] != TRUTH]
    measured = rows[rows["metric"] != UNTRAINED]
    return rows if measured.empty else measured


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; a shape may be named twice, by its rows and by its columns."""
    return [
        Column("varied", "site"),
        Column("variant", "variant"),
        Column("metric", "metric"),
        Column("baseline", "baseline"),
        Column("value [95% CI]", "value", value_text),
        Column("effect [95% CI]", "effect", effect_text),
    ]
