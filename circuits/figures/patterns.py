"""Figures of what heads attend to: scores, classes, and how attention moves, by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.head_maps import Panel, maps


def scores_figure(frame: pd.DataFrame, templates: Sequence[str], column: str) -> Any:
    """A heatmap over layers and heads for each template."""
    known = [name for name in ("score", "effect", "corrected", "bits", "chance") if name in frame]
    if column not in known:
        raise CircuitsError(f"plot: no column {column!r}; choose from {', '.join(known)}")
    signed = column in ("effect", "corrected")
    panels = [
        Panel(template, _grid(frame[frame["template"] == template], column), column, signed)
        for template in templates
    ]
    about = {
        "score": "Share of attention on the template's keys",
        "effect": "Share of attention on the template's keys, less chance",
        "corrected": "Score corrected for chance: 0 uniform attention, 1 all of it on the template's keys",
        "bits": "How much the template says about the attention of each head, in bits",
        "chance": "Share that uniform attention would put on the template's keys",
    }[column]
    return maps(panels, "Attention heads against templates", f"{about}; each panel has colours of its own.")


def classes_figure(frame: pd.DataFrame, rule: str) -> Any:
    """The class of each head as text, its corrected score as colour; `rule` says how classes were told apart."""
    scored = frame if "corrected" in frame else frame.assign(corrected=float("nan"))
    text = _grid(frame, "class")
    panel = Panel("", _grid(scored, "corrected"), "corrected score", signed=True, text=text)
    return maps([panel], "What each head attends to", rule)


def compared_figure(frame: pd.DataFrame, column: str, title: str) -> Any:
    """What was measured in pairs beside the same unpaired."""
    panels = [
        Panel(name, _grid(frame, of), column, signed=False)
        for name, of in (("in pairs", column), ("unpaired", "unpaired"))
    ]
    said = "Left: between the two inputs of a pair. Right, what to compare with: between inputs of different pairs."
    return maps(panels, title, said)


def _grid(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame.pivot(index="layer", columns="head", values=column)
