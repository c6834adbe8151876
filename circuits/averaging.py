"""Mean attention maps, one per head, from a pass that keeps sums only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from circuits.arguments import read_run_tokens
from circuits.attending import chunks, look_at, read_layers, selected_queries
from circuits.errors import CircuitsError
from circuits.selection import Head
from circuits.surface import Surface

# Pixels of one map, and around it.
MAP, GAP, MARGIN = 132, 34, 70
# Up to this many positions all are labelled.
LABELLED = 9


@dataclass(frozen=True)
class Maps:
    """Mean attention of every head.

    mean: [layer head query key], float64, on the CPU; a query that no example selects is NaN.
    diffuseness: [layer head], the entropy of attention over that of uniform attention to the visible keys, each summed
        over examples and queries: 0 for attention to one key, 1 for uniform. NaN where no query sees two keys.
    layers: which layers these are.
    n: the number of examples.
    """

    mean: Float[Tensor, "layer head query key"]
    diffuseness: Float[Tensor, "layer head"]
    layers: tuple[int, ...]
    n: int

    def of(self, head: Any) -> Float[Tensor, "query key"]:
        """The map of one head (layer, head)."""
        layer, index = head
        if layer not in self.layers or not 0 <= index < self.mean.shape[1]:
            raise CircuitsError(
                f"no map of head {layer}.{index}: there are layers {', '.join(map(str, self.layers))} and heads "
                f"0-{self.mean.shape[1] - 1}"
            )
        return self.mean[self.layers.index(layer), index]

    def plot(self, labels: Sequence[str] | None = None, titles: Mapping[Any, str] | None = None) -> Any:
        """A plotly figure: a heatmap per head, layers down, heads across, in one colour scale.

        labels: what the positions are called (default: numbers). titles: Head -> its title (default: L0H1).
        """
        length = self.mean.shape[-1]
        if labels is not None and len(labels) != length:
            raise CircuitsError(f"plot: {len(labels)} labels for {length} positions")
        return _drawn(self, [str(label) for label in labels or range(length)], titles or {})


def attention(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    layers: Any = None,
    *,
    queries: Any = None,
    positions: Any = None,
    chunk: int | str = "auto",
) -> Maps:
    """The mean attention map of every head over the examples, in one pass whose memory does not grow with them.

    layers: only these. queries: positions, or a boolean mask [batch pos]; a query's row is the mean over the
    examples that select it. chunk: tokens per forward. Inside `intervene` the edits are in force.
    """
    verb = "patterns.attention"
    surface, tokens = Surface.of(model), read_run_tokens(tokens, verb)
    chosen = read_layers(layers, surface, verb)
    selected = selected_queries(queries, positions, tokens, verb)
    length = tokens.shape[1]
    total = torch.zeros(len(chosen), surface.n_heads, length, length, dtype=torch.float64)
    spread, most = torch.zeros(2, len(chosen), surface.n_heads, dtype=torch.float64)
    for rows in chunks(surface, tokens, chosen, chunk, verb):
        some = selected[rows, None].double().to(surface.device)  # [batch 1 query]
        look_at(surface, tokens, rows, chosen, partial(_add, (total, spread, most), chosen, some))
    return Maps(total / selected.sum(0).double()[:, None], spread / most, chosen, len(tokens))


def _add(
    to: tuple[Tensor, Tensor, Tensor],
    layers: tuple[int, ...],
    some: Tensor,
    layer: int,
    pattern: Tensor,
    seen: Tensor,
) -> None:
    """Of one layer: its attention to [layer head query key], its entropy and that of uniform attention to [layer
    head].
    """
    total, spread, most = (part[layers.index(layer)] for part in to)
    total += (pattern * some[..., None]).sum(0).cpu()
    spread += (torch.special.entr(pattern).sum(-1) * some).sum((0, 2)).cpu()
    most += (seen.sum(-1).clamp(min=1).double().log() * some).sum((0, 2)).cpu()


def _drawn(maps: Maps, labels: list[str], titles: Mapping[Any, str]) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    layers, heads = maps.mean.shape[:2]
    every = [Head(layer, head) for layer in maps.layers for head in range(heads)]
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
            z=maps.of(head).numpy(),
            coloraxis="coloraxis",
            hovertemplate=f"{head.label}<br>query %{{y}}, key %{{x}}<br>attention %{{z:.3f}}<extra></extra>",
        )
        found.add_trace(trace, **at)
        every_label = {"dtick": 1} if len(labels) <= LABELLED else {}
        # Tick labels on the outside only: they are the same in all maps.
        found.update_xaxes(type="category", showticklabels=row == layers - 1, **every_label, **at)
        found.update_yaxes(
            type="category", autorange="reversed", showticklabels=column == 0, **every_label, **at
        )
        if row == layers - 1:
            found.update_xaxes(title_text="key", **at)
        if column == 0:
            found.update_yaxes(title_text="query", **at)
    found.update_annotations(font_size=12)
    found.update_layout(
        coloraxis={
            "colorscale": "Cividis",
            # From no attention at all, so that maps of different models can be compared by eye.
            "cmin": 0,
            "cmax": float(maps.mean.nan_to_num().max()),
            "colorbar": {"title": "attention", "thickness": 12},
        },
        width=width + 2 * MARGIN + 40,
        height=height + 2 * MARGIN - 20,
        margin={"l": MARGIN, "r": MARGIN + 40, "t": 50, "b": MARGIN},
    )
    return found
