"""Mean attention maps, one per head, from a pass that keeps sums only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.surface import Surface
from circuits.patterns._read import chunks, look_at, read_layers, selected_queries
from circuits.validate import read_run_tokens


@dataclass(frozen=True)
class Maps:
    """Mean attention of every head.

    Attributes:
        mean: [layer head query key], float64, on the CPU; a query that no example selects is NaN.
        diffuseness: [layer head], the entropy of attention over that of uniform attention to the visible keys, each
            summed over examples and queries: 0 for attention to one key, 1 for uniform. NaN where no query sees two
            keys.
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

    def plot(
        self,
        labels: Sequence[str] | None = None,
        titles: Mapping[Any, str] | None = None,
        *,
        title: str | None = None,
    ) -> Any:
        """A plotly figure: a heatmap per head, layers down, heads across, in one colour scale.

        Args:
            labels: what the positions are called (default: numbers).
            titles: Head -> its title (default: L0H1).
        """
        from circuits.figures.attention_maps import attention_maps

        about = title or f"Mean attention over {self.n:,} examples"
        return attention_maps(self.mean, self.layers, labels, titles or {}, about)


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

    Args:
        layers: only these.
        queries: positions, or a boolean mask [batch pos]; a query's row is the mean over the examples that select it.
        chunk: tokens per forward. Inside `intervene` the edits are in force.
    """
    caller = "patterns.attention"
    surface, tokens = Surface.of(model), read_run_tokens(tokens, caller)
    chosen = read_layers(layers, surface, caller)
    selected = selected_queries(surface, queries, positions, tokens, caller)
    length = tokens.shape[1]
    total = torch.zeros(len(chosen), surface.n_heads, length, length, dtype=torch.float64)
    spread, most = torch.zeros(2, len(chosen), surface.n_heads, dtype=torch.float64)
    for rows in chunks(surface, tokens, chosen, chunk, caller):
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
