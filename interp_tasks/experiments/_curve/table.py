"""Lays out the rows of ``curve`` for readers: levels and drop of a run; of stored steps the accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, number

if TYPE_CHECKING:
    import pandas

STEPS = ("onset", "crossing", "end", "length")


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Drops the rows that the figure shows better: errors at stored steps."""
    stored = frame["variant"] == "stored step"
    rows = frame[~stored | frame["metric"].str.startswith("accuracy")]
    of_step = rows["variant"] == "stored step"
    variant = rows["variant"].mask(of_step, "step " + rows["step"].astype(str))
    return rows.assign(variant=variant).reset_index(drop=True)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    return [
        Column("of", "variant"),
        Column("what", "metric"),
        Column("value [95% CI]", "value", _value),
        Column("by theory", "baseline", lambda row: _theory(row, number(row["baseline"]))),
        Column("value / theory", "effect", lambda row: _theory(row, _ratio(row))),
    ]


def _value(row: Mapping[str, Any]) -> str:
    if row["metric"] == "drop":
        return "yes" if row["value"] else "no"
    if row["metric"] in STEPS and row["value"] == row["value"]:
        return f"{row['value']:.0f}"
    return value_text(row)


def _theory(row: Mapping[str, Any], text: str) -> str:
    known = row["variant"] in ("plateau", "final") and row["effect"] == row["effect"]
    return text if known else ""


def _ratio(row: Mapping[str, Any]) -> str:
    return number(row["value"] / row["baseline"]) if row["baseline"] else "–"
