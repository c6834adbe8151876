"""Lays out the rows of ``influence`` for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns; the kind of pair distinguishes rows."""
    return [
        Column("variant", "variant"),
        Column("pairs", "intervention"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
        Column("share of pairs", "baseline"),
    ]
