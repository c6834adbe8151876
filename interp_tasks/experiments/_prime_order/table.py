"""Lays out the rows of ``prime-order`` for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, p_value

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    return [
        Column("run", "ref"),
        Column("", "variant"),
        Column("metric", "metric"),
        Column("value", "value", value_text),
        Column("p", "p_value", lambda row: p_value(row["p_value"])),
    ]
