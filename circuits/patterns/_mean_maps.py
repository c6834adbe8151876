"""Computes the mean attention map of each head, in a pass that keeps only sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.results import attention_figure
from circuits.patterns._read import PatternPass
from circuits.validate import answers_former_names


@dataclass(frozen=True, repr=False)
class Maps:
    """Mean attention of every head.

    Attributes:
        mean: [layer head query key], float64, on the CPU; NaN for a query that no example selects.
        diffuseness: [layer head], the entropy of attention over that of uniform attention to the visible keys, each
            summed over examples and queries: 0 for attention to one key, 1 for uniform. NaN where no query sees two
            keys.
        layers: the layers of the first axis.
        n: the number of examples.
        labels: by position, its number and the word there, if that is the same in all prompts; None without words.
    """

    mean: Float[Tensor, "layer head query key"]
    diffuseness: Float[Tensor, "layer head"]
    layers: tuple[int, ...]
    n: int
    labels: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        layers, heads, *sides = self.mean.shape
        return (
            f"Maps of {layers} layers × {heads} heads [{' × '.join(map(str, sides))}], means over {self.n} examples: "
            ".mean, .diffuseness, .of((layer, head)), .plot()"
        )

    def of(self, head: Any) -> Float[Tensor, "query key"]:
        """Returns the map of one head (layer, head)."""
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
        """Returns a plotly figure with a heatmap per head, layers down, heads across, in one colour scale.

        Args:
            labels: names of the positions (default: `self.labels`, else their numbers).
            titles: Head -> its title (default: head 0.1).
        """
        figure_title = title or f"Mean attention over {self.n:,} examples"
        return attention_figure(self.mean, self.layers, labels or self.labels, titles or {}, figure_title)


@answers_former_names
def attention(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    layers: Any = None,
    *,
    positions: Any = None,
    batch_size: int | None = None,
) -> Maps:
    """Computes every head's mean attention map in one pass; its memory does not grow with the number of examples.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes. Positions count in each prompt's own tokens.
        layers: only these.
        positions: those of queries, numbers or a boolean mask [batch pos]; a query's row is the mean over the examples
            that select it.
        batch_size: examples in a forward, by default as in `sweep`. Inside `intervene` the edits are in force.
    """
    reading = PatternPass.read("patterns.attention", model, tokens, layers, positions)
    prompts = reading.prompts
    shape, length = (len(reading.layers), reading.surface.n_heads), prompts.shape[1]
    total = torch.zeros(*shape, length, length, dtype=torch.float64)
    entropy, uniform_entropy = torch.zeros(2, *shape, dtype=torch.float64)
    for rows, query_mask in reading.chunks(batch_size):
        weights = query_mask.double()
        for at, pattern, seen in reading.patterns(rows):
            total[at] += (pattern * weights[..., None]).sum(0).cpu()
            entropy[at] += (torch.special.entr(pattern).sum(-1) * weights).sum((0, 2)).cpu()
            most = seen.sum(-1).clamp(min=1).double().log()
            uniform_entropy[at] += (most * weights).sum((0, 2)).cpu()
    longest = int(prompts.lengths.max())
    mean = (total / reading.selected.sum(0).double()[:, None])[..., :longest, :longest]
    labels = prompts.labels()
    names = None if labels is None else tuple(labels)
    return Maps(mean, entropy / uniform_entropy, reading.layers, len(prompts), names)
