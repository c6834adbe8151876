"""Lays out the rows of ``drops`` for readers: a line per curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.run_logs import family, shared_folder
from interp_tasks.pages import Column, number, with_interval

if TYPE_CHECKING:
    import pandas

STEPS = ("onset", "crossing", "end")
LEVELS = ("sharpness", "plateau", "final")
UNTIL = "plateau until"
LEFT = "plateau left"
CORRELATION = "rank correlation of "
AGAINST = "against "


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and metric, and below them the rows about several runs."""
    import pandas

    rows: list[dict[str, Any]] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        values = dict(zip(part["metric"], part["value"], strict=True))
        first: dict[Any, Any] = part.to_dict("records")[0]
        again = part["metric"].iloc[0].startswith(CORRELATION)
        shown = {
            name: values.get(f"{CORRELATION}{name}" if again else name) for name in (*STEPS, *LEVELS, UNTIL)
        }
        # Of several seeds smallest and largest; of a correlation its interval.
        intervals = {
            metric: (low, high)
            for metric, low, high in zip(
                part["metric"], part["value_ci_low"], part["value_ci_high"], strict=True
            )
        }
        ranges = {
            f"{name} range": intervals.get(f"{CORRELATION}{name}", (None, None))
            if again
            else (values.get(f"{name}, smallest"), values.get(f"{name}, largest"))
            for name in (*shown, "drop")
        }
        members = frame[(frame["run"].map(family) == first["run"]) & (frame["variant"] == first["variant"])]
        several = any(f"{name}, smallest" in values for name in shown)
        kind = "rank correlation" if again else "median" if several else ""
        drop = values.get(f"{CORRELATION}drop" if again else "drop")
        rows.append(
            {
                **first,
                **shown,
                **ranges,
                "drop": said(drop, kind, *ranges["drop range"]),
                "kind": kind,
                "left": values.get(LEFT),
                "bounds": lower_bounds(members),
            }
        )
    shown_frame = pandas.DataFrame(rows)
    # One block for all runs: they are compared.
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    seeds = frame["seed"].dropna()
    every = (
        " to ".join(str(seed) for seed in dict.fromkeys([seeds.min(), seeds.max()])) if len(seeds) else "–"
    )
    names = [name for name in frame["run"].unique() if not str(name).startswith(AGAINST)]
    runs = sum("*" not in name for name in names)
    # What all names begin with is said once, above the table.
    folder = shared_folder(names)
    title = f"{runs} run{'s' if runs != 1 else ''}{' of ' + folder if folder else ''}"
    short = shown_frame["run"].str.removeprefix(f"{folder}/") if folder else shown_frame["run"]
    return shown_frame.assign(ref=title, step=steps, seed=every, run=short)


def lower_bounds(members: pandas.DataFrame) -> tuple[bool, bool, bool]:
    """Returns whether the median, least and largest last step of plateaus are bounds: of runs that never left, later
    steps would change them.
    """
    by_run = members.pivot_table(index="run", columns="metric", values="value")
    if not {UNTIL, LEFT} <= set(by_run.columns):
        return False, False, False
    steps, later = by_run[UNTIL], by_run[UNTIL].where(by_run[LEFT] == 1, math.inf)
    return (
        bool(steps.median() != later.median()),
        bool(steps.min() != later.min()),
        bool(steps.max() != later.max()),
    )


def said(drop: float | None, kind: str, low: float | None, high: float | None) -> str:
    if drop is None or drop != drop:
        return ""
    if kind == "median":
        return f"{drop:.0%} of runs"
    return with_interval(number(drop), low, high) if kind else ("yes" if drop else "no")


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    columns = [Column("run", "run")]
    if rows["variant"].nunique() > 1:
        columns.append(Column("metric", "variant"))
    columns.append(Column("drop", "drop"))
    # Of a task whose plateau is not known by theory there is none.
    until = [UNTIL] if rows[UNTIL].notna().any() else []
    return [*columns, *(Column(name, name, _cell(name)) for name in (*STEPS, *LEVELS, *until))]


def whole(step: float) -> str:
    """Formats a step that may lie between two; just before the first step is 0, not "-0"."""
    return "0" if abs(step) <= 0.5 else f"{step:.0f}"


def _cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        value = row[name]
        if value is None or value != value:
            return "–"
        low, high = row[f"{name} range"]
        if name == UNTIL and row["left"] == 0:
            return "never left"
        if name not in (*STEPS, UNTIL) or row["kind"] == "rank correlation":
            return with_interval(number(value), low, high)
        bounds = row["bounds"] if name == UNTIL else (False, False, False)
        middle, *ends = (
            f"{'≥' * bound}{whole(step)}"
            for bound, step in zip(bounds, (value, low, high), strict=True)
            if step is not None
        )
        return middle + (f" [{', '.join(ends)}]" if row["kind"] == "median" else "")

    return text
