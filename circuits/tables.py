"""Shortens the table of a result to what fits a screen."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

#: The most rows that `print` shows of a result.
MOST_SHOWN = 40


def short_table(frame: pd.DataFrame, columns: Sequence[str], name: str = "frame") -> str:
    """Returns some columns of a result's table as text, but those that are empty, and how many there are in all."""
    shown = frame[[column for column in columns if column in frame]].dropna(axis=1, how="all")
    text = shown.to_string(index=False, max_rows=MOST_SHOWN, float_format="{:.4g}".format)
    return f"{text}\n{len(frame)} row{'' if len(frame) == 1 else 's'}; .{name} has all {len(frame.columns)} columns"
