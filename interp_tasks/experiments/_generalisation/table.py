"""Lays out the rows of ``generalisation`` for readers: a line per run and answer, and one on their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._generalisation.reaches import (
    AT_LEAST,
    AT_MOST,
    FINAL,
    PAIRS,
    RATIO,
    SECONDS,
    SPREAD,
    THEN,
)
from interp_tasks.measurement.run_logs import shared_folder
from interp_tasks.pages import Column, number, signed, with_interval

if TYPE_CHECKING:
    import pandas


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and variant; where a level is not reached, the last step is shown."""
    import pandas

    level = next(metric for metric in frame["metric"] if metric.startswith("step at")).split()[2]
    rows: list[dict[str, Any]] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        cells = {(row["split"], row["metric"]): row for row in part.to_dict("records")}
        first: dict[Any, Any] = part.to_dict("records")[0]
        train, valid = (cells.get((split, f"step at {level}")) for split in ("train", "validation"))
        shown = {
            "train": step_text(train, cells, "train", level),
            "validation": step_text(valid, cells, "validation", level),
            "good": step_text(
                cells.get(("validation", f"step at {level} for good")), cells, "validation", level
            ),
            "delay": "" if valid is None else delay_text(valid),
            "seconds": text(cells.get(("validation", SECONDS.format(level=level)))),
            "then": text(cells.get(("validation", THEN.format(level=level)))),
            "final": text(cells.get(("validation", FINAL))),
            "ratio": ratio_text(cells),
        }
        shown["order"] = order_text(cells) if ("validation", PAIRS) in cells else ""
        rows.append({**first, **shown})
    table = pandas.DataFrame(rows)
    names = list(table["run"].unique())
    folder = shared_folder(names) if len(names) > 1 else ""
    run = table["run"].str.removeprefix(f"{folder}/") if folder else table["run"]
    count = sum("*" not in name for name in names)
    title = names[0] if len(names) == 1 else f"{count} runs{' of ' + folder if folder else ''}"
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    return table.assign(ref=title, run=run, step=steps, level=level)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see; those without an entry are left out."""
    level = rows["level"].iloc[0]
    columns = [Column("run", "run")] if rows["run"].nunique() > 1 else []
    columns += [
        Column("accuracy", "variant"),
        Column(f"train at {level}", "train"),
        Column(f"validation at {level}", "validation"),
        Column("for good", "good"),
        Column("delay", "delay"),
        Column(f"validation when train is at {level}", "then"),
        Column("final", "final"),
    ]
    if (rows["order"] != "").any():
        columns.append(Column("order", "order"))
    if (rows["seconds"] != "").any():
        columns.append(Column(f"seconds to {level}", "seconds"))
    if (rows["ratio"] != "").any():
        columns.append(Column("steps / the other's", "ratio"))
    return columns


def step_text(
    row: Mapping[Any, Any] | None, cells: Mapping[Any, Mapping[Any, Any]], split: str, level: str
) -> str:
    """Formats a step; for several seeds with its range, and how many reach the level."""
    if row is None:
        return ""
    value = row["value"]
    shown = f"not by {row['step']}" if math.isnan(value) else f"{value:.0f}"
    several = cells.get((split, f"{row['metric']}, smallest"))
    if several is None:
        return shown
    low, high = several["value"], cells[split, f"{row['metric']}, largest"]["value"]
    if math.isnan(low):
        return shown
    share, runs = cells[split, f"reached {level}"]["value"], int(row["n_runs"])
    ends = f"{low:.0f} to {'?' if math.isnan(high) else format(high, '.0f')}"
    return f"{shown} ({ends}; {share * runs:.0f} of {runs})"


def delay_text(row: Mapping[Any, Any]) -> str:
    effect = row["effect"]
    if effect is None or math.isnan(effect):
        return ""
    return signed(effect) if abs(effect) < 1000 else f"{effect:+.0f}"


def order_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    pairs, spread = cells["validation", PAIRS]["value"], cells["validation", SPREAD]["value"]
    shown = "no pair to order" if math.isnan(pairs) else f"{pairs:.0%} of pairs in order"
    return shown if math.isnan(spread) else f"{shown}, last / first {number(spread)}"


def text(row: Mapping[Any, Any] | None) -> str:
    return "" if row is None else number(row["value"])


def ratio_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    row = cells.get(("validation", RATIO))
    if row is None:
        return ""
    if not math.isnan(row["value"]):
        return with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"])
    least, most = (cells["validation", name]["value"] for name in (AT_LEAST, AT_MOST))
    if not math.isnan(most):
        return f"{number(least)} to {number(most)}" if least > 0 else f"below {number(most)}"
    return f"above {number(least)}" if least > 0 else "not known"
