"""The table of ``probe``: for programs a row per probe and control, for people both controls in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from interp_tasks.measurement.probes import ProbeSettings
from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, signed

if TYPE_CHECKING:
    import pandas

#: How ``intervention`` ends, which says of a row what its baseline is.
AGAINST_SHUFFLED, AGAINST_UNTRAINED = "against shuffled targets", "against the untrained model"
#: Metrics that are left out: r2 and abs_cosine say the same on a scale that all targets share.
NOT_SHOWN = ("mse", "cosine")


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns rows against shuffled targets, the other row's control in a column ``untrained``."""
    frame = frame[~frame["metric"].str.split(" ").str[0].isin(NOT_SHOWN)]
    other = frame["intervention"].str.endswith(AGAINST_UNTRAINED)
    keys = ["ref", "variant", "metric"]
    untrained_rows = frame.loc[other, [*keys, "baseline"]].rename(columns={"baseline": "untrained"})
    return frame[~other].merge(untrained_rows, how="left", on=keys)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns in which readers see ``view_rows``."""
    untrained = [Column("untrained", "untrained")] if frame["untrained"].notna().any() else []
    return [
        Column("variant", "variant"),
        Column("metric", "metric"),
        Column("baseline", "baseline"),
        *untrained,
        Column("value [95% CI]", "value", value_text),
        Column("effect", "effect", lambda row: signed(row["effect"])),
    ]


def tidy_rows(table: pandas.DataFrame, settings: ProbeSettings) -> pandas.DataFrame:
    """Returns rows of the tidy table: one per control, beside each other."""
    import pandas

    # Target by target, however many places there are.
    order = {target: number for number, target in enumerate(dict.fromkeys(table["target"]))}
    table = table.sort_values("target", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    site = table["site"] + table["layer"].map(lambda layer: "" if pandas.isna(layer) else f".{layer}")
    for column, mark in (("head", "."), ("position", "@")):
        site += table[column].map(lambda number, mark=mark: "" if pandas.isna(number) else f"{mark}{number}")
    split = table["split"].map(lambda split: "" if split == "all" else f" ({split})")
    common = table[
        ["site", "layer", "head", "position", "value", "value_ci_low", "value_ci_high", "n"]
    ].assign(variant=table["target"] + " " + site, metric=table["metric"] + split, engine="streamed")
    controls = [("shuffled", "selectivity", AGAINST_SHUFFLED)]
    if settings.untrained:
        controls.append(("untrained", "over_untrained", AGAINST_UNTRAINED))
    parts = [
        common.assign(
            intervention=f"{settings.method}, {against}",
            baseline=table[control],
            effect=table[difference],
            effect_ci_low=table[f"{difference}_ci_low"],
            effect_ci_high=table[f"{difference}_ci_high"],
        )
        for control, difference, against in controls
    ]
    return pandas.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def notes(settings: ProbeSettings, tables: Mapping[str, pandas.DataFrame]) -> list[str]:
    """Returns the notes below the table."""
    first = next(iter(tables.values()))
    fitted, scored = int(first["fit_n"].iloc[0]), int(first["n"].iloc[0])
    intercept = "with" if settings.intercept else "without"
    texts = [
        f"Probes: {settings.method} {intercept} intercept, fitted on {fitted} examples, scored on {scored} others.",
        "baseline: the same probe on targets exchanged between examples. effect: value − baseline, the selectivity.",
    ]
    if settings.untrained:
        texts.append("untrained: the same probe on a model of this architecture before any training.")
    return [
        *texts,
        "Intervals: 95%, bootstrap over held-out examples, differences paired; how else fits could have come out "
        "is not in them.",
        *also_measured(tables),
    ]


def also_measured(tables: Mapping[str, pandas.DataFrame]) -> list[str]:
    """Returns a note on the measured metrics that the printed table leaves out; none for classes."""
    measured = {metric for table in tables.values() for metric in table["metric"]}
    left_out = [metric for metric in NOT_SHOWN if metric in measured]
    if not left_out:
        return []
    return [f"Also measured: {' and '.join(left_out)}; see --format json or csv, --out, --plot."]
