"""The names of the metrics of ``gradients``, and how people see its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas


#: Before and after the filter, as the trainer logs them; without a filter there is only the first.
STAGES = ("raw", "filtered")
#: The key of a line of the log.
LOGGED = "gradient_norm"
#: What is said of a tensor, in order.
LARGEST, AT, FINAL, HALF, RANK = (
    "largest norm",
    "step of the largest norm",
    "final norm / largest",
    "step below half",
    "rank of the step below half",
)
#: Variants of several tensors.
ATTENTION, OTHERS = "attention", "other tensors"


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and tensor, its numbers side by side by stage; the medians stand last."""
    import pandas

    rows: dict[tuple[str, str], dict[Any, Any]] = {}
    for one in frame.to_dict("records"):
        size = "all" if pandas.isna(one["n"]) else one["n"]
        table_row = rows.setdefault((one["ref"], one["variant"]), {**one, "n": size})
        metric = str(one["metric"]).removeprefix("median ")
        table_row[f"{one['intervention']}: {metric}"] = one["value"]
        if metric != one["metric"]:
            table_row["variant"] = "attention (others), medians"
            table_row[f"{one['intervention']}: {metric}, others"] = one["baseline"]
    return pandas.DataFrame(list(rows.values()))


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of each tensor, norms of its gradient at every stage of the update."""
    columns = [Column("tensor", "variant")]
    for stage in STAGES:
        for metric, title, digits in (
            (LARGEST, "largest", ".3g"),
            (AT, "at step", ".0f"),
            (FINAL, "final\n/ largest", ".2g"),
            (HALF, "below half\nfrom step", ".0f"),
            (RANK, "rank", ".3g"),
        ):
            key = f"{stage}: {metric}"
            if key in frame:
                columns.append(
                    Column(f"{stage}\n{title}" if metric == LARGEST else title, key, text(key, digits))
                )
    return columns


def text(key: str, digits: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a number, with that of the other tensors in brackets where there is one."""

    def shown(row: Mapping[str, Any]) -> str:
        value, other = (said(row.get(at, math.nan), digits) for at in (key, f"{key}, others"))
        if not value and not other:
            # Of a tensor that ends above half; a frozen one, or a median, has no other numbers either.
            return "–" if key.endswith(HALF) and not math.isnan(row[key.replace(HALF, RANK)]) else ""
        return f"{value or '–'} ({other})" if other else value

    return shown


def said(value: float, digits: str) -> str:
    return "" if math.isnan(value) else format(value, digits)
