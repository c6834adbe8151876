"""Lays out the measures of weights for readers, a row each, with the range over untrained models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._weights.position_similarity import COSINE, PEARSON
from interp_tasks.experiments._weights.tensors import BEST, LEADING, NORM, SPECTRUM
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
    ranges = ranges[[*keys, "value_ci_low", "value_ci_high"]].rename(
        columns={"value_ci_low": "beside low", "value_ci_high": "beside high"}
    )
    rows = frame[~of_others].merge(ranges, on=keys, how="left")
    labels = [subject_and_metric(row) for row in rows.to_dict("records")]
    return rows.assign(of=[of for of, _ in labels], what=[what for _, what in labels])


def subject_and_metric(row: Mapping[Any, Any]) -> tuple[str, str]:
    """Returns what a row is about, the same for rows of one kind, and its metric in few words."""
    of, metric, part = str(row["variant"]), str(row["metric"]), str(row["intervention"])
    kind, _, number = of.partition(" ")
    table, _, rest = part.partition(", ")
    if metric in (PEARSON, COSINE):
        return f"{of}, over dimensions", f"{metric.partition(' ')[0]}, {part.removesuffix(' dimensions')}"
    if metric == NORM:
        above = "above both" if " and " in rest else rest.removesuffix(" digits")
        return f"{table}, norms by frequency", f"{number}: {above}"
    if metric == BEST and kind == "vector":
        return f"{table}, share of each vector at its best frequency", f"{number}: at {rest}"
    if part == LEADING:
        return f"{of}, {LEADING}", metric.replace("the best", "best")
    if part == SPECTRUM:
        return f"{of}, frequencies", metric.removeprefix("frequencies ").removesuffix(" of the components")
    return of, metric


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    columns = [
        Column("of", "of"),
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
