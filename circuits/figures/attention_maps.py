"""Attention maps as a grid: layers down, heads across, queries down and keys across in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.style import finished

# Pixels of one map, and around it.
MAP, GAP, MARGIN = 132, 34, 70
# Up to this many positions all are labelled.
LABELLED = 9


def attention_maps(
    mean: Tensor, layers: Sequence[int], labels: Sequence[str] | None, titles: Mapping[Any, str], title: str
) -> Any:
    """A heatmap per head, layers down, heads across, in one colour scale that begins at 0.

    Args:
        mean: [layer head query key].
        layers: the numbers of the layers.
        labels: what the positions are called (default: numbers).
        titles: (layer, head) -> its title (default: L0H1).
    """
    if labels is not None and len(labels) != mean.shape[-1]:
        raise CircuitsError(f"plot: {len(labels)} labels for {mean.shape[-1]} positions")
    positions = [str(label) for label in labels or range(mean.shape[-1])]
    about = "Of a query (row) to the keys (columns) that it sees; rows add up to 1."
    return finished(_grid(mean, layers, positions, titles), title, about)


def _label(layer: int, head: int) -> str:
    return f"L{layer}H{head}"


def _grid(mean: Tensor, numbers: Sequence[int], labels: list[str], titles: Mapping[Any, str]) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    layers, heads = mean.shape[:2]
    every = [(layer, head) for layer in numbers for head in range(heads)]
    width, height = (count * MAP + (count - 1) * GAP for count in (heads, layers))
    figure = make_subplots(
        rows=layers,
        cols=heads,
        subplot_titles=[titles.get(head, _label(*head)) for head in every],
        horizontal_spacing=GAP / width,
        vertical_spacing=GAP / height,
    )
    for index, head in enumerate(every):
        row, column = divmod(index, heads)
        at = {"row": row + 1, "col": column + 1}
        trace = graph_objects.Heatmap(
            x=labels,
            y=labels,
            z=mean[row, column].numpy(),
            coloraxis="coloraxis",
            hovertemplate=f"{_label(*head)}<br>query %{{y}}, key %{{x}}<br>attention %{{z:.3f}}<extra></extra>",
        )
        figure.add_trace(trace, **at)
        every_label = {"dtick": 1} if len(labels) <= LABELLED else {}
        small = {"tickangle": 0, "tickfont": {"size": 10}}
        common = {"type": "category", "showgrid": False, **small, **every_label, **at}
        # Tick labels on the outside only: they are the same in all maps.
        figure.update_xaxes(showticklabels=row == layers - 1, **common)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 0, **common)
        if row == layers - 1:
            figure.update_xaxes(title_text="key", **at)
        if column == 0:
            figure.update_yaxes(title_text="query", **at)
    figure.update_annotations(font_size=12)
    return figure.update_layout(
        coloraxis={
            "colorscale": "Cividis",
            # From no attention at all, so that maps of different models can be compared by eye.
            "cmin": 0,
            "cmax": float(torch.nan_to_num(mean).max()),
            "colorbar": {"title": "attention", "thickness": 12},
        },
        width=max(width + 2 * MARGIN + 40, 420),
        height=height + 2 * MARGIN - 20,
        margin={"l": MARGIN, "r": MARGIN + 40, "t": 50, "b": MARGIN},
    )
