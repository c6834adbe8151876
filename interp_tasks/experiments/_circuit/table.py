"""Lays out the rows of ``circuit`` for readers: a line per size, or of several checkpoints a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._circuit.rows import CIRCUIT, FAITHFULNESS, GAP, LARGEST_RANDOM, SIZE, TOP
from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column, number, with_interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas

#: What stands beside the smallest circuit that is faithful enough.
MARK = "the circuit"


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per size of a ranking's circuits; of several checkpoints, or of a circuit that was given, one for
    each.
    """
    import pandas

    refs = list(dict.fromkeys(frame["ref"]))
    rows = [row for ref in refs for row in of_checkpoint(frame[frame["ref"] == ref], alone=len(refs) == 1)]
    shown = pandas.DataFrame(rows)
    if len(refs) == 1:
        return shown
    steps = [str(step) for step in dict.fromkeys(shown["step"])]
    return shown.assign(
        checkpoint=shown["ref"],
        ref=f"{len(refs)} checkpoints",
        step=f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0],
    )


def of_checkpoint(frame: pandas.DataFrame, *, alone: bool) -> list[dict[str, Any]]:
    """Returns one checkpoint's rows for people: its circuit, and where it is alone other sizes of its ranking."""
    own = frame[frame["variant"] == CIRCUIT].set_index("metric")
    total = own.loc[SIZE, "baseline"]
    first: dict[Any, Any] = frame.iloc[0].to_dict()
    row = {
        **first,
        **numbers(own),
        "size": own.loc[SIZE, "value"],
        "total": total,
        "beside": beside(own, alone=alone),
        "gap": own.loc[GAP].to_dict(),
        "mark": MARK,
    }
    row["share"] = row["size"] / total
    sizes = frame[frame["variant"].str.startswith(TOP)]
    if not alone or sizes.empty:
        return [row]
    rows = [row]
    for variant, part in sizes.groupby("variant", sort=False):
        size = int(str(variant).removeprefix(TOP))
        if size != row["size"] and 0 < size < total:
            of_size = part.set_index("metric")
            about = {"size": size, "share": size / total, "beside": beside(of_size, alone=alone), "mark": ""}
            rows.append({**first, **numbers(of_size), **about})
    return sorted(rows, key=lambda one: one["size"])


def beside(rows: pandas.DataFrame, *, alone: bool) -> float:
    """Returns the faithfulness of random circuits of the same size: their mean, or of several checkpoints the best."""
    column, metric = ("baseline", FAITHFULNESS) if alone else ("value", LARGEST_RANDOM)
    return float(rows[column].get(metric, float("nan")))


def numbers(rows: pandas.DataFrame) -> dict[str, Any]:
    """Returns faithfulness and the metric of a circuit that is kept, from its rows by metric."""
    (metric,) = (name for name in rows.index if name not in (SIZE, GAP) and not name.startswith(FAITHFULNESS))
    of_metric = rows.loc[metric]
    faithfulness = (
        rows.loc[FAITHFULNESS] if FAITHFULNESS in rows.index else of_metric.map(lambda _: float("nan"))
    )
    return {
        "metric": metric,
        "clean": of_metric["baseline"],
        "value": of_metric["value"],
        "value_ci_low": of_metric["value_ci_low"],
        "value_ci_high": of_metric["value_ci_high"],
        "faithfulness": faithfulness["value"],
        "faithfulness_ci_low": faithfulness["value_ci_low"],
        "faithfulness_ci_high": faithfulness["value_ci_high"],
    }


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of one circuit and its sizes, or of the circuits of several checkpoints."""
    metric = str(rows["metric"].iloc[0]) if rows["metric"].nunique() == 1 else "metric"
    size = Column("size", "size", lambda row: "–" if row["size"] != row["size"] else f"{row['size']:.0f}")
    shared = [
        size,
        Column("share", "share", filled("share", ".1%")),
        Column("faithfulness [95% CI]", "faithfulness", faithfulness_text),
    ]
    if "checkpoint" in rows or rows["size"].isna().any():
        several = [Column("checkpoint", "checkpoint")] if "checkpoint" in rows else []
        several += [Column("metric", "metric")] if metric == "metric" else []
        gap = Column("gap [95% CI]", "clean", gap_text)
        best = Column("best of random", "beside", filled("beside", share))
        return [
            *several,
            Column(f"{metric}, clean", "clean"),
            *shared,
            *([best] if rows["beside"].notna().any() else []),
            *([gap] if rows["size"].isna().any() else []),
        ]
    return [
        *shared,
        Column("random", "beside", filled("beside", share)),
        Column(
            f"{metric} [95% CI]",
            "value",
            lambda row: with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"]),
        ),
        Column("", "mark"),
    ]


def faithfulness_text(row: Mapping[str, Any]) -> str:
    """Returns faithfulness with its interval; says where there is nothing to be faithful to."""
    values = [row[name] for name in ("faithfulness", "faithfulness_ci_low", "faithfulness_ci_high")]
    if values[0] != values[0]:
        return "no gap"
    value, low, high = map(share, values)
    return value if low == share(float("nan")) else f"{value} [{low}, {high}]"


def share(value: float) -> str:
    """Returns a faithfulness to three decimals: of a circuit that does nothing only rounding is left."""
    return "–" if value != value else f"{round(value, 3) + 0.0:.3f}"


def gap_text(row: Mapping[str, Any]) -> str:
    gap = row["gap"]
    return with_interval(number(gap["value"]), gap["value_ci_low"], gap["value_ci_high"])
