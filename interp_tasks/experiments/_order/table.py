"""Lays out the rows of ``order`` for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_tasks.measurement.table import effect_text, value_text
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the steps alone; values are in the files and the figure. Which is first stands first."""
    steps = frame[frame["metric"].str.startswith("step at ")]
    return steps.sort_values(["ref", "metric", "value"], kind="stable", ignore_index=True)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    return [
        Column("", "metric"),
        Column("quantity", "variant"),
        Column("step [95% CI]", "value", value_text),
        Column("before (−) or after the drop metric", "effect", effect_text),
    ]
