"""How people see the rows of ``attention``: a line per head, its class, its template, its movements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments.attending import MOVED
from interp_tasks.reporting import Column, number, with_interval

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per checkpoint and head, with a column (value, low, high) for each movement."""
    moving = frame["metric"].str.startswith(MOVED)
    templates = frame[~moving]
    corrected = templates["effect"] / (1 - templates["baseline"])
    # Its own template where the class is one, else the one that comes closest to it.
    order = templates.assign(corrected=corrected, own=templates["metric"] == templates["intervention"])
    order = order.sort_values(["own", "corrected"], ascending=False, kind="stable")
    rows = (
        order.groupby(["ref", "variant"], sort=False).head(1).sort_index().drop(columns=["corrected", "own"])
    )
    for change in dict.fromkeys(frame.loc[moving, "metric"]):
        of = frame[frame["metric"] == change].set_index(["ref", "variant"])
        keys = list(zip(rows["ref"], rows["variant"], strict=True))
        rows[change] = [
            tuple(of.loc[key, ["value", "ci_low", "ci_high"]].tolist()) if key in of.index else None
            for key in keys
        ]
    return rows.reset_index(drop=True)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    columns = [
        Column("head", "variant"),
        Column("class", "intervention"),
        Column("template", "metric"),
        Column("chance", "baseline"),
        Column("score [95% CI]", "value", _interval("value", "ci_low", "ci_high")),
    ]
    moves = [name for name in rows.columns if str(name).startswith(MOVED)]
    return [*columns, *(Column(str(name), str(name), _moved(str(name))) for name in moves)]


def _interval(value: str, low: str, high: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: with_interval(number(row[value]), row[low], row[high])


def _moved(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        found = row[name]
        return with_interval(number(found[0]), found[1], found[2]) if isinstance(found, tuple) else ""

    return text
