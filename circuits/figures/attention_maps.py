"""Draws attention maps in a grid of layers (down) by heads (across); each map has queries down and keys across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.names import spelled
from circuits.figures.style import finished

# Sizes in pixels: one map, the gap between maps, the margin around all.
MAP, GAP, MARGIN = 132, 34, 70
# With at most this many positions, every one is labelled.
LABELLED = 9
# With at most this many positions, every cell shows its number.
NUMBERED = 4


def attention_maps(
    mean: Tensor, layers: Sequence[int], labels: Sequence[str] | None, titles: Mapping[Any, str], title: str
) -> Any:
    """Draws a heatmap per head, layers down and heads across, all in one colour scale that begins at 0.

    Args:
        mean: [layer head query key].
        layers: the numbers of the layers.
        labels: names of the positions (default: their numbers).
        titles: (layer, head) -> its title (default: head 0.1).
    """
    if labels is not None and len(labels) != mean.shape[-1]:
        raise CircuitsError(f"plot: {len(labels)} labels for {mean.shape[-1]} positions")
    positions = [spelled(str(label)) for label in labels or range(mean.shape[-1])]
    subtitle = "Of a query (row) to the keys (columns) that it sees; rows add up to 1."
    return finished(_grid(mean, layers, positions, titles), title, subtitle)


def _label(layer: int, head: int) -> str:
    return f"head {layer}.{head}"


def largest_choice(mean: Tensor) -> float:
    """Returns the largest attention of queries that see several keys: a query that sees one puts all on it.

    Args:
        mean: [... query key].
    """
    shares = torch.nan_to_num(mean)
    chosen = shares[(shares > 0).sum(-1) > 1]
    return float((chosen if chosen.numel() else shares).max())


def ticks(end: float, largest: float, parts: int = 2) -> dict[str, Any]:
    """Returns the ticks of a colour bar from 0 to `end`; its last says so where larger shares have its colour too."""
    values = [end * part / parts for part in range(parts + 1)]
    *names, last = (f"{value:.2g}" for value in values)
    return {"tickvals": values, "ticktext": [*names, last if f"{largest:.2g}" == last else f"≥ {last}"]}


def _grid(mean: Tensor, layer_numbers: Sequence[int], labels: list[str], titles: Mapping[Any, str]) -> Any:
    """Draws the mean map of every head, layers down and heads across, on one colour scale."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    layers, heads = mean.shape[:2]
    all_heads = [(layer, head) for layer in layer_numbers for head in range(heads)]
    width, height = (count * MAP + (count - 1) * GAP for count in (heads, layers))
    figure = make_subplots(
        rows=layers,
        cols=heads,
        subplot_titles=[titles.get(head, _label(*head)) for head in all_heads],
        horizontal_spacing=GAP / width,
        vertical_spacing=GAP / height,
    )
    for index, head in enumerate(all_heads):
        row, column = divmod(index, heads)
        cell = {"row": row + 1, "col": column + 1}
        trace = graph_objects.Heatmap(
            x=labels,
            y=labels,
            z=mean[row, column].numpy(),
            coloraxis="coloraxis",
            # Of few positions shares can be read, where their colours are alike as well.
            texttemplate="%{z:.2f}" if len(labels) <= NUMBERED else None,
            hovertemplate=f"{_label(*head)}<br>query %{{y}}, key %{{x}}<br>attention %{{z:.3f}}<extra></extra>",
        )
        figure.add_trace(trace, **cell)
        label_every_tick = {"dtick": 1} if len(labels) <= LABELLED else {}
        tick_style = {"tickangle": 0, "tickfont": {"size": 10}}
        axis_style = {"type": "category", "showgrid": False, **tick_style, **label_every_tick, **cell}
        # Only the outer maps have tick labels, because these are the same in all maps.
        figure.update_xaxes(showticklabels=row == layers - 1, **axis_style)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 0, **axis_style)
        if row == layers - 1:
            figure.update_xaxes(title_text="key", **cell)
        if column == 0:
            figure.update_yaxes(title_text="query", **cell)
    figure.update_annotations(font_size=12)
    return figure.update_layout(
        coloraxis={
            "colorscale": "Cividis",
            # The scale begins at 0, so that maps of different models can be compared by eye.
            "cmin": 0,
            "cmax": largest_choice(mean),
            "colorbar": {
                "title": "attention",
                "thickness": 12,
                **ticks(largest_choice(mean), float(torch.nan_to_num(mean).max())),
            },
        },
        width=max(width + 2 * MARGIN + 40, 420),
        height=height + 2 * MARGIN - 20,
        margin={"l": MARGIN, "r": MARGIN + 40, "t": 50, "b": MARGIN},
    )
