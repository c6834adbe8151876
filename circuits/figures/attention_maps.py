"""Attention maps as a grid: layers down, heads across, queries down and keys across in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.style import finished, read_numbers
from circuits.model.heads import Head

if TYPE_CHECKING:
    from circuits.patterns._mean_maps import Maps

# Pixels of one map, and around it.
MAP, GAP, MARGIN = 132, 34, 70
# Up to this many positions all are labelled.
LABELLED = 9


def attention(
    maps: Maps | Tensor,
    labels: Sequence[str] | None = None,
    titles: Mapping[Any, str] | None = None,
    *,
    title: str | None = None,
) -> Any:
    """A plotly figure: a heatmap per head, layers down, heads across, in one colour scale that begins at 0.

        plots.attention(patterns.attention(model, tokens))
        plots.attention(cache(model, tokens, ["pattern.0"]).popitem()[1].mean(0))

    Args:
        maps: what `patterns.attention` found, or attention [layer head query key], [head query key] or [query key].
        labels: what the positions are called (default: numbers).
        titles: Head -> its title (default: L0H1).
    """
    if not (isinstance(maps, Tensor) or hasattr(maps, "layers")):
        maps = torch.as_tensor(
            read_numbers(maps, "plots.attention", "attention [layer head query key] is needed")
        )
    if isinstance(maps, Tensor):
        if not 2 <= maps.ndim <= 4 or not maps.is_floating_point() or not maps.numel():
            raise CircuitsError(
                f"plots.attention: attention [layer head query key], [head query key] or [query key] is needed; got "
                f"{list(maps.shape)} of {str(maps.dtype).removeprefix('torch.')}"
            )
        mean = maps.detach().cpu().double()[(None,) * (4 - maps.ndim)]
        layers, about = tuple(range(len(mean))), "Attention"
    else:
        mean, layers = maps.mean, maps.layers
        about = f"Mean attention over {maps.n:,} examples"
    if labels is not None and len(labels) != mean.shape[-1]:
        raise CircuitsError(f"plot: {len(labels)} labels for {mean.shape[-1]} positions")
    named = [str(label) for label in labels or range(mean.shape[-1])]
    found = _drawn(mean, layers, named, titles or {})
    return finished(
        found, title or about, "Of a query (row) to the keys (columns) that it sees; rows add up to 1."
    )


def _drawn(mean: Tensor, of: Sequence[int], labels: list[str], titles: Mapping[Any, str]) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    layers, heads = mean.shape[:2]
    every = [Head(layer, head) for layer in of for head in range(heads)]
    width, height = (count * MAP + (count - 1) * GAP for count in (heads, layers))
    found = make_subplots(
        rows=layers,
        cols=heads,
        subplot_titles=[titles.get(head, head.label) for head in every],
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
            hovertemplate=f"{head.label}<br>query %{{y}}, key %{{x}}<br>attention %{{z:.3f}}<extra></extra>",
        )
        found.add_trace(trace, **at)
        every_label = {"dtick": 1} if len(labels) <= LABELLED else {}
        small = {"tickangle": 0, "tickfont": {"size": 10}}
        common = {"type": "category", "showgrid": False, **small, **every_label, **at}
        # Tick labels on the outside only: they are the same in all maps.
        found.update_xaxes(showticklabels=row == layers - 1, **common)
        found.update_yaxes(autorange="reversed", showticklabels=column == 0, **common)
        if row == layers - 1:
            found.update_xaxes(title_text="key", **at)
        if column == 0:
            found.update_yaxes(title_text="query", **at)
    found.update_annotations(font_size=12)
    return found.update_layout(
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
