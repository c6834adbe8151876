"""Lays out the rows of ``neurons`` for readers: a line per neuron, cluster or head; of many checkpoints a line each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._neurons.active_counts import DEVIATIONS, MIN_CHECKPOINTS
from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas

#: Metrics of a neuron, of a cluster, and of all of them.
FREQUENCY, FIRST, SECOND = "frequency", "variance explained, degree 1", "variance explained, degree 2"
ALONE, JOINTLY, ONE = "variance by {} alone", "variance by both jointly", "variance by one digit"
TO_ONE = "share of attention to one digit"
PAIRS = "pairs of frequencies for half of the variance"
MEAN, ACTIVE, ACTIVE_EACH = "mean", "active frequencies", "active frequencies per neuron"
COUNT, CLUSTERS, CLUSTERED, DEAD = "neurons", "clusters", "share of neurons in clusters", "constant neurons"
#: Variants that are about no single neuron.
ALL, IN_CLUSTERS, CLUSTER = "all neurons", "in clusters", "cluster "
SIZE = ", without size"

BEFORE, AFTER = ALONE.split("{}")


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, tensor and variant, with a column for each metric; or per checkpoint and tensor."""
    import pandas

    rows: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for one in frame.to_dict("records"):
        key = (one["ref"], one["intervention"], one["variant"])
        table_row = rows.setdefault(key, {**one, "relabelled": math.nan})
        table_row[one["metric"]] = one["value"]
        if one["metric"] == PAIRS:
            table_row["relabelled"] = one["baseline"]
    if frame["ref"].nunique() < MIN_CHECKPOINTS or (frame["variant"] != ALL).all():
        return pandas.DataFrame(list(rows.values()))
    return over_steps(rows)


def over_steps(rows: Mapping[tuple[str, str, str], Mapping[Any, Any]]) -> pandas.DataFrame:
    """Returns a row per checkpoint and tensor, with the published counts of the first single neuron."""
    import pandas

    lines: dict[tuple[str, str], dict[Any, Any]] = {}
    for (ref, tensor, variant), one in rows.items():
        line = lines.setdefault((ref, tensor), {"checkpoint": ref, "at": one["step"], "single": None, **one})
        if variant in (ALL, IN_CLUSTERS):
            line |= {f"{variant}: {name}": value for name, value in one.items()}
        elif not variant.startswith(CLUSTER) and line["single"] in (None, variant):
            line["single"] = variant
            line |= {f"single: {name}": value for name, value in one.items()}
    steps = [one["step"] for one in lines.values()]
    refs = len({one["checkpoint"] for one in lines.values()})
    title = {"ref": f"{refs} checkpoints", "step": f"{min(steps)} to {max(steps)}"}
    return pandas.DataFrame([{**one, **title} for one in lines.values()])


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of groups of neurons, or of clusters over checkpoints."""
    tensors = [Column("tensor", "intervention")] if frame["intervention"].nunique() > 1 else []
    if "checkpoint" in frame:
        name = str(frame["single"].iloc[0])
        columns = [
            Column("step", "at") if frame["run"].nunique() == 1 else Column("checkpoint", "checkpoint"),
            *tensors,
            Column("clusters", f"{IN_CLUSTERS}: {CLUSTERS}", filled(f"{IN_CLUSTERS}: {CLUSTERS}", ".0f")),
            Column(
                "in clusters", f"{IN_CLUSTERS}: {CLUSTERED}", filled(f"{IN_CLUSTERS}: {CLUSTERED}", ".1%")
            ),
            Column("degree 2", f"{ALL}: {SECOND}", filled(f"{ALL}: {SECOND}", ".1%")),
            Column("active", f"{ALL}: {ACTIVE}", filled(f"{ALL}: {ACTIVE}", ".0f")),
            Column("active\nper neuron", f"{ALL}: {ACTIVE_EACH}", filled(f"{ALL}: {ACTIVE_EACH}", ".1f")),
        ]
        for end in (*(f"{deviations} sd" for deviations in DEVIATIONS), f"{DEVIATIONS[0]} sd{SIZE}"):
            metric = f"{ACTIVE}, mean + {end}"
            for heading, key, digits in ((name, "single", ".0f"), (ALL, ALL, ".1f")):
                if f"{key}: {metric}" in frame:
                    title = f"+{end}\n{heading}"
                    columns.append(Column(title, f"{key}: {metric}", filled(f"{key}: {metric}", digits)))
        return columns
    alone = [str(name) for name in frame if str(name).startswith(BEFORE) and str(name).endswith(AFTER)]
    columns = [
        *tensors,
        Column("", "variant"),
        Column("neurons", COUNT, filled(COUNT, ".0f")),
        Column("mean", MEAN, filled(MEAN, ".3g")),
        Column("to one\ndigit", TO_ONE, filled(TO_ONE, ".1%")),
        Column("frequency", FREQUENCY, filled(FREQUENCY, ".0f")),
        Column("degree 1", FIRST, filled(FIRST, ".1%")),
        Column("degree 2", SECOND, filled(SECOND, ".1%")),
        *(
            Column(f"{name.removeprefix(BEFORE).removesuffix(AFTER)} alone", name, filled(name, ".1%"))
            for name in alone
        ),
        Column("jointly", JOINTLY, filled(JOINTLY, ".1%")),
        Column("pairs\n(relabelled)", PAIRS, pairs),
        Column("active", ACTIVE, filled(ACTIVE, ".0f")),
    ]
    return [column for column in columns if column.key in frame]


def pairs(row: Mapping[str, Any]) -> str:
    return "" if math.isnan(row[PAIRS]) else f"{row[PAIRS]:.0f} ({row['relabelled']:.0f})"
