"""Reads attention patterns of some inputs, chunk by chunk; and their means over examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuits.arguments import check_renamed_args
from circuits.errors import CircuitsError
from circuits.figures.results import attention_figure
from circuits.interventions.replacements import visible_mask
from circuits.model.activation_recording import run_and_record
from circuits.model.batch_size import choose_batch_size
from circuits.model.generation_positions import parse_position_mask
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import check_no_unmasked_padding, parse_prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import KINDS
from circuits.model.types import Figure, PositionsLike, TokensLike

# Numbers for each entry of a pattern: with what is computed of it in double precision it then stays in the cache.
_PER_ENTRY = 32

#: By layer, its pattern and the mask of the keys that each query may see, both [batch head query key].
Patterns = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recorded:
    """Attention patterns of some inputs, which the other functions of this module take in the place of the tokens."""

    prompts: Prompts
    model: nn.Module = field(repr=False)
    patterns: Patterns = field(repr=False)


@check_renamed_args
def record(model: nn.Module, tokens: TokensLike, *, batch_size: int | None = None) -> Recorded:
    """Runs a model once and keeps its attention patterns, for several functions of this module.

    What comes out is what the tokens give, without another forward pass. A recorded pattern takes one number of the
    model's precision, and one byte, for each example, head, query and key.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes.
        batch_size: examples in a forward; by default by the model's size.

    Inside `intervene` the edits are in force, and stay so in what was recorded.
    """
    reading = PatternPass.parse("patterns.record", model, tokens, None)
    chunks = [reading.record_patterns_and_keys(rows) for rows, _ in reading.rows_and_query_masks(batch_size)]
    patterns: Patterns = []
    for parts in zip(*chunks, strict=True):
        pattern, seen = zip(*parts, strict=True)
        patterns.append((torch.cat(pattern), torch.cat(seen)))
    return Recorded(reading.prompts, reading.hooked.model, patterns)


@dataclass(frozen=True, repr=False)
class Maps:
    """Mean attention of every head.

    Attributes:
        mean: [layer head query key], float64, on the CPU; NaN for a query that no example selects.
        diffuseness: [layer head], the entropy of attention over that of uniform attention to the visible keys, each
            summed over examples and queries: 0 for attention to one key, 1 for uniform. NaN where no query sees two
            keys.
        n: the number of examples.
        labels: by position, its number and the word there, if that is the same in all prompts; None without words.
    """

    mean: Float[Tensor, "layer head query key"]
    diffuseness: Float[Tensor, "layer head"]
    n: int
    labels: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        layers, heads = self.mean.shape[:2]
        return f"Maps of {layers} × {heads} heads, over {self.n} examples: .mean, .diffuseness, .of, .plot"

    def of(self, head: tuple[int, int]) -> Float[Tensor, "query key"]:
        """Returns the map of one head (layer, head)."""
        layers, heads = self.mean.shape[:2]
        if isinstance(head, str) or tuple(head) not in np.ndindex(layers, heads):
            raise CircuitsError(
                f"no map of head {head!r}: give (layer, head), of layers 0-{layers - 1} and heads 0-{heads - 1}"
            )
        return self.mean[tuple(head)]

    def plot(
        self,
        labels: Sequence[str] | None = None,
        titles: Mapping[tuple[int, int], str] | None = None,
        *,
        title: str | None = None,
    ) -> Figure:
        """Returns a plotly figure with a heatmap per head, layers down, heads across, in one colour scale.

        Args:
            labels: names of the positions (default: `self.labels`, else their numbers).
            titles: Head -> its title (default: head 0.1).
        """
        title = title or f"Mean attention over {self.n:,} examples"
        return attention_figure(self.mean, labels or self.labels, titles or {}, title)


@check_renamed_args
def attention(
    model: nn.Module,
    tokens: TokensLike | Recorded,
    *,
    positions: PositionsLike = None,
    batch_size: int | None = None,
) -> Maps:
    """Computes every head's mean attention map in one pass; its memory does not grow with the number of examples.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes. Positions count in each prompt's own tokens.
        positions: those of queries, numbers or a boolean mask [batch pos]; a query's row is the mean over the examples
            that select it.
        batch_size: examples in a forward; by default by the model's size. Inside `intervene` the edits are in force.
    """
    reading = PatternPass.parse("patterns.attention", model, tokens, positions)
    prompts, shape = reading.prompts, (reading.hooked.n_layers, reading.hooked.n_heads)
    total = torch.zeros(*shape, prompts.shape[1], prompts.shape[1], dtype=torch.float64)
    entropy, uniform = torch.zeros(2, *shape, dtype=torch.float64)
    for rows, query_mask in reading.rows_and_query_masks(batch_size):
        weights = query_mask.double()
        for layer, pattern, seen in reading.patterns_and_visible_keys(rows):
            total[layer] += (pattern * weights[..., None]).sum(0).cpu()
            entropy[layer] += (torch.special.entr(pattern).sum(-1) * weights).sum((0, 2)).cpu()
            uniform[layer] += (seen.sum(-1).clamp(min=1).double().log() * weights).sum((0, 2)).cpu()
    longest, labels = int(prompts.lengths.max()), prompts.labels()
    mean = (total / reading.selected.sum(0).double()[:, None])[..., :longest, :longest]
    names = None if labels is None else tuple(labels)
    return Maps(mean, entropy / uniform, len(prompts), names)


@dataclass(frozen=True)
class PatternPass:
    """The inputs of a pass over a model's patterns: prompts, and the queries that count.

    Attributes:
        selected: bool [batch pos], the queries that count.
        recorded: the patterns of the prompts, where they need no run.
    """

    caller: str
    hooked: HookedModel
    prompts: Prompts
    selected: Tensor
    recorded: Recorded | None

    @classmethod
    def parse(cls, caller: str, model: Any, tokens: Any, positions: Any) -> PatternPass:
        """Reads the arguments that all passes share."""
        hooked = HookedModel(model)
        prompts, recorded = parse_prompts_and_recorded(hooked, tokens, caller)
        selected = parse_position_mask(positions, prompts, caller)
        check_no_unmasked_padding(hooked, prompts, selected, caller)
        counted = prompts.in_order(selected & prompts.real) & prompts.reached
        return cls(caller, hooked, prompts, counted, recorded)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads, layer by layer."""
        shape = self.hooked.n_layers, self.hooked.n_heads
        return tuple(Head(layer, head) for layer, head in np.ndindex(shape))

    def rows_and_query_masks(self, batch_size: int | None) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of each forward pass and their mask of queries that count, bool [batch 1 query]."""
        total, length = self.prompts.shape[:2]
        kept = _PER_ENTRY * self.hooked.n_layers * self.hooked.n_heads * length
        step = choose_batch_size(self.hooked, length, batch_size, self.caller, kept=kept)
        for start in range(0, total, step):
            rows = slice(start, min(start + step, total))
            yield rows, self.selected[rows, None].to(self.hooked.device)

    def patterns_and_visible_keys(self, rows: slice | Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields for each layer its number, and these rows' patterns, in double precision, and keys that queries may
        see.
        """
        if self.recorded is None:
            found = self.record_patterns_and_keys(rows)
        else:
            found = [(pattern[rows], seen[rows]) for pattern, seen in self.recorded.patterns]
        for layer, (pattern, seen) in enumerate(found):
            yield layer, pattern.double(), seen

    def record_patterns_and_keys(self, rows: slice | Tensor) -> Patterns:
        """Runs some rows, and returns their patterns by layer, each prompt's own tokens first."""
        layers, here = range(self.hooked.n_layers), self.prompts[rows]
        scores, patterns = (
            [KINDS[site].hook.format(layer) for layer in layers] for site in ("scores", "pattern")
        )
        raw = run_and_record(self.hooked, self.prompts, rows, (*scores, *patterns), self.caller)
        found: Patterns = []
        for of_scores, of_pattern in zip(scores, patterns, strict=True):
            pattern = raw.pop(of_pattern)
            seen = visible_mask(raw.pop(of_scores)).expand_as(pattern)
            if self.prompts.padded:
                axes = KINDS["pattern"].position_axes
                pattern, seen = here.in_order(pattern, axes), here.in_order(seen.to(torch.uint8), axes).bool()
            found.append((pattern, seen))
        return found


def parse_prompts_and_recorded(
    hooked: HookedModel, tokens: Any, caller: str
) -> tuple[Prompts, Recorded | None]:
    """Returns the prompts, and their patterns where these were recorded."""
    if isinstance(tokens, Recorded):
        if tokens.model is not hooked.model:
            raise CircuitsError(
                f"{caller}: these patterns were recorded of another model; give the tokens, or record them of this one"
            )
        return tokens.prompts, tokens
    return parse_prompts(hooked, tokens, caller), None
