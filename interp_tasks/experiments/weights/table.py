"""Lays out the measures of weights for readers, a row each, with the range over untrained models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments.weights.position_similarity import COSINE, PEARSON
from interp_tasks.experiments.weights.tensors import BEST, NORM
from interp_tasks.measurement.table import filled, value_text
from interp_tasks.measurement.untrained import BESIDE
from interp_tasks.pages import Column, number, p_value, with_interval

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns, ``beside low`` and ``beside high``, of the rows of untrained models."""
    of_others = frame["intervention"].str.startswith(BESIDE)
    ranges = frame[of_others].assign(
        intervention=frame.loc[of_others, "intervention"].str.removeprefix(BESIDE)
    )
    keys = ["ref", "variant", "intervention", "metric"]
    ranges = ranges[[*keys, "ci_low", "ci_high"]].rename(
        columns={"ci_low": "beside low", "ci_high": "beside high"}
    )
    rows = frame[~of_others].merge(ranges, on=keys, how="left")
    return rows.assign(what=[what(row) for row in rows.to_dict("records")])


def what(row: Mapping[Any, Any]) -> str:
    """Returns the metric, with the part of the tensor where the metric does not imply it."""
    metric, part = row["metric"], row["intervention"]
    if metric in (PEARSON, COSINE):
        return f"{metric}, {part}"
    if metric == NORM or (metric == BEST and str(row["variant"]).startswith("vector")):
        return f"{metric}; {part}" if metric == NORM else f"share at its best; {part}"
    return f"{metric} ({part})" if metric == BEST else str(metric)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    columns = [
        Column("of", "variant"),
        Column("metric", "what"),
        Column("value [95% CI]", "value", value_text),
    ]
    if frame["baseline"].notna().any():
        columns.append(Column("untrained [95% range]", "baseline", beside_text))
    if frame["p_adjusted"].notna().any():
        columns.append(Column("p adj.", "p_adjusted", filled("p_adjusted", p_value)))
    return columns


def beside_text(row: Mapping[str, Any]) -> str:
    return with_interval(number(row["baseline"]), row["beside low"], row["beside high"])
