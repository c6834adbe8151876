"""How people see the table of ``probe``: a row per probe, with both controls beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_tasks.experiments.columns import value_text
from interp_tasks.reporting import Column, signed

if TYPE_CHECKING:
    import pandas

#: How ``intervention`` ends, which says of a row what its baseline is.
AGAINST_SHUFFLED, AGAINST_UNTRAINED = "against shuffled targets", "against the untrained model"
#: Metrics that are left out: r2 and abs_cosine say the same on a scale that all targets share.
NOT_SHOWN = ("mse", "cosine")


def probe_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Rows against shuffled targets, the other row's control in a column ``untrained``."""
    frame = frame[~frame["metric"].str.split(" ").str[0].isin(NOT_SHOWN)]
    other = frame["intervention"].str.endswith(AGAINST_UNTRAINED)
    keys = ["ref", "variant", "metric"]
    beside = frame.loc[other, [*keys, "baseline"]].rename(columns={"baseline": "untrained"})
    return frame[~other].merge(beside, how="left", on=keys)


def probe_columns(frame: pandas.DataFrame) -> list[Column]:
    """How people see ``probe_rows``."""
    untrained = [Column("untrained", "untrained")] if frame["untrained"].notna().any() else []
    return [
        Column("variant", "variant"),
        Column("metric", "metric"),
        Column("baseline", "baseline"),
        *untrained,
        Column("value [95% CI]", "value", value_text),
        Column("effect", "effect", lambda row: signed(row["effect"])),
    ]
