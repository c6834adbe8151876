"""Lays out spectra in a table for readers: a row per tensor and frequency, its measures side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas

SHARE, KEYS, NEURONS = "share of variance", "key frequencies", "neurons"
#: How ``intervention`` begins, before the name of the tensor.
SPECTRUM, KEY, OTHER, REST = "spectrum of ", "key frequency of ", "frequency of ", "frequencies of "


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of a frequency's metrics; ``key`` marks key frequencies and counts them in the row of all."""
    import pandas

    rows: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for row in frame.to_dict("records"):
        kind = next(one for one in (SPECTRUM, KEY, OTHER, REST) if row["intervention"].startswith(one))
        tensor = row["intervention"].removeprefix(kind)
        about = {
            **row,
            "tensor": tensor,
            "key": "key" if kind == KEY else "",
            SHARE: math.nan,
            NEURONS: math.nan,
        }
        row_of_variant = rows.setdefault((row["ref"], tensor, row["variant"]), about)
        row_of_variant["variant"] = row["variant"].removeprefix("frequency ")
        if row["metric"] == KEYS:
            row_of_variant["key"] = f"{row['value']:.0f} key"
        else:
            row_of_variant[row["metric"]] = row["value"]
    return pandas.DataFrame(list(rows.values()))


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    return [
        Column("tensor", "tensor"),
        Column("frequency", "variant"),
        Column("", "key"),
        Column(SHARE, SHARE, filled(SHARE, ".4f")),
        Column(NEURONS, NEURONS, filled(NEURONS, ".0f")),
    ]
