"""Figures with a slider over the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects

#: What of a trace changes with the slider, and pixels of the slider above the panels.
MOVED, SLIDER = ("x", "y", "z", "text", "customdata"), 80


def stepped(figures: Mapping[str, plotly.graph_objects.Figure]) -> plotly.graph_objects.Figure:
    """Returns the last of some figures with a slider that shows the numbers and titles of the others.

    Args:
        figures: by what the slider says, such as "step 4,000"; equal but for their numbers and titles of panels.
    """
    from circuits.figures.layout import untitled

    drawn = [untitled(figure) for figure in figures.values()]
    whole = drawn[-1]
    steps: list[dict[str, Any]] = []
    for label, figure in zip(figures, drawn, strict=True):
        moved = {
            key: [_rounded(trace[key]) if key in trace else None for trace in figure.data]
            for key in MOVED
            if any(key in trace and trace[key] is not None for trace in figure.data)
        }
        titles = {f"annotations[{at}].text": note.text for at, note in enumerate(figure.layout.annotations)}
        steps.append({"method": "update", "label": label, "args": [moved, titles]})
    if len(steps) > 1:
        # The last label is centred on the end of the slider.
        pad = min(90, int(3.4 * len(steps[-1]["label"])))
        slider = {"steps": steps, "active": len(steps) - 1, "y": 1, "yanchor": "bottom", "ticklen": 4}
        whole.update_layout(
            sliders=[
                slider
                | {
                    "pad": {"b": 35 + 17 * bool(whole.layout.annotations), "r": pad},
                    "currentvalue": {"prefix": ""},
                }
            ],
            height=whole.layout.height + SLIDER,
            margin={"t": whole.layout.margin.t + SLIDER},
        )
    return whole


def _rounded(values: Any) -> Any:
    """Returns numbers with four significant digits, which a figure can show; None for what is missing."""
    import numpy as np

    array = np.asarray(values) if values is not None else None
    if array is None or array.dtype.kind != "f":
        return None if array is None else array.tolist()
    if array.ndim > 1:
        return [_rounded(row) for row in array]
    return [None if value != value else float(f"{value:.4g}") for value in array]
