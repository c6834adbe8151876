"""Lays out the rows of ``algorithm`` for readers: a line per method and kind of entries, of the last read-out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column, number, with_interval

if TYPE_CHECKING:
    import pandas

#: The metrics of a row: of the distance of predictions, of the correlation of predictions and of errors.
DISTANCE, PREDICTIONS, ERRORS = "distance", "r_predictions", "r_errors"
#: Whose rows compare the read-out with what is right.
TRUTH = "truth"

HEADERS = {DISTANCE: "distance [95% CI]", PREDICTIONS: "r", ERRORS: "r of errors [95% CI]"}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, kind of entries and method, with a column (value, low, high) per metric."""
    last = frame["layer"] == frame.groupby("ref")["layer"].transform("max")
    output = frame[last & (frame["site"] == "resid_post")]
    keys = ["ref", "intervention", "variant"]
    rows = output.drop_duplicates(keys).reset_index(drop=True)
    for metric in HEADERS:
        of = output[output["metric"] == metric].set_index(keys)
        columns = zip(*(rows[key] for key in keys), strict=True)
        rows[metric] = [
            tuple(of.loc[key, ["value", "value_ci_low", "value_ci_high"]].tolist())
            if key in of.index
            else None
            for key in columns
        ]
    return rows


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    return [
        Column("entries", "intervention"),
        Column("method", "variant"),
        *(Column(header, metric, _text(metric)) for metric, header in HEADERS.items()),
    ]


def _text(metric: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        cell = row[metric]
        if not isinstance(cell, tuple):
            return ""
        value, low, high = cell
        if metric == DISTANCE:
            return with_interval(number(value), low, high)
        correlation = "–" if math.isnan(value) else f"{value:.3f}"
        return correlation if metric == PREDICTIONS else with_interval(correlation, low, high)

    return text
