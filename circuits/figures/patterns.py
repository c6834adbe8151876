"""Draws template scores, classes of heads and changes of attention, by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.head_maps import Panel, maps


def scores_figure(frame: pd.DataFrame, templates: Sequence[str], column: str) -> Any:
    """Draws a heatmap over layers and heads for each template."""
    columns = [name for name in ("score", "effect", "corrected", "bits", "chance") if name in frame]
    if column not in columns:
        raise CircuitsError(f"plot: no column {column!r}; choose from {', '.join(columns)}")
    signed = column in ("effect", "corrected")
    panels = [
        Panel(template, _grid(frame[frame["template"] == template], column), column, signed)
        for template in templates
    ]
    description = {
        "score": "Share of attention on the template's keys",
        "effect": "Share of attention on the template's keys, less chance",
        "corrected": "Score corrected for chance: 0 uniform attention, 1 all of it on the template's keys",
        "bits": "How much the template says about the attention of each head, in bits",
        "chance": "Share that uniform attention would put on the template's keys",
    }[column]
    return maps(
        panels, "Attention heads against templates", f"{description}; each panel has colours of its own."
    )


def classes_figure(frame: pd.DataFrame, rule: str) -> Any:
    """Draws each head's class as text and its corrected score as colour; `rule` states how heads were classified."""
    scored = frame if "corrected" in frame else frame.assign(corrected=float("nan"))
    text = _grid(frame, "class")
    panel = Panel("", _grid(scored, "corrected"), "corrected score", signed=True, text=text)
    return maps([panel], "What each head attends to", rule)


def compared_figure(frame: pd.DataFrame, column: str, title: str) -> Any:
    """Draws a measure between paired inputs, and beside it the same measure between unpaired inputs."""
    panels = [
        Panel(name, _grid(frame, shown), column, signed=False)
        for name, shown in (("in pairs", column), ("unpaired", "unpaired"))
    ]
    subtitle = "Left: between the two inputs of a pair. Right, what to compare with: between inputs of different pairs."
    return maps(panels, title, subtitle)


def _grid(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame.pivot(index="layer", columns="head", values=column)
