"""Measures whether attention follows something that moves between two inputs from one group of positions to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.replacements import derangement
from circuits.model.heads import Head
from circuits.model.surface import Surface
from circuits.patterns._read import chunks, look_at, read_draws, read_layers, read_pairs, selected_queries
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tensors import as_dense_tensor
from circuits.validate import read_seed


@dataclass(frozen=True)
class Following:
    """The share of queries at which a head's attention follows what moves.

    Attributes:
        frame: one row per head: `share` of the queries that attend most to the right group both before and after the
            move, pooled over pairs; `unpaired`, that share judged by the groups of another pair, which is above 0 for a
            head that always prefers some groups; `effect` = share − unpaired; 95% intervals, bootstrap over pairs; `n`
            pairs.
    """

    frame: pd.DataFrame

    def plot(self) -> Any:
        """Returns a plotly figure of the share of queries that follow, in pairs and unpaired, by layer and head."""
        from circuits.figures.patterns import compared_figure

        return compared_figure(self.frame, "share", "How often attention follows")

    def heads(self, at_least: float = 0.5) -> tuple[Head, ...]:
        """Returns the heads that follow at this share of queries or more, by the lower end of the interval."""
        sure = self.frame[self.frame["ci_low"] >= at_least]
        return tuple(Head(int(row.layer), int(row.head)) for row in sure.itertuples())


def follow(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    other: Shaped[Tensor, "batch pos *input"] | Any,
    groups: Any,
    before: Any,
    after: Any,
    *,
    queries: Any = None,
    positions: Any = None,
    layers: Any = None,
    seed: int = 0,
    draws: int = 1000,
    chunk: int | str = "auto",
) -> Following:
    """Measures how often attention follows something that moves from one group of positions to another.

    Args:
        tokens: inputs before the move.
        other: inputs after the move, paired with `tokens` row by row.
        groups: integers [pos], the group of each key, such as the column of an entry.
        before: integers [batch], the group that holds the moving thing in `tokens`. A query attends to the group with
            the largest sum of its attention, not the largest mean.
        after: integers [batch], the group that holds it in `other`; it differs from `before` in every pair, so that a
            head whose attention does not move scores 0.
        queries: these only: positions, or a boolean mask [batch pos].
        positions: another name for `queries`.
        layers: only these.
        seed: draws the bootstrap and the pairs of `unpaired`.
        draws: the number of bootstrap resamples.
        chunk: tokens per forward pass.

    Inside `intervene` the edits are in force.
    """
    caller = "patterns.follow"
    surface = Surface.of(model)
    prompts, other_prompts = read_pairs(surface, tokens, other, caller)
    of_key = _whole(groups, prompts.shape[1], "groups", caller)
    group_before, group_after = (
        _whole(values, len(prompts), name, caller) for values, name in ((before, "before"), (after, "after"))
    )
    if bool((group_before == group_after).any()):
        raise CircuitsError(
            f"{caller}: in {int((group_before == group_after).sum())} pairs nothing moves: before equals after"
        )
    chosen = read_layers(layers, surface, caller)
    seed, draws = read_seed(seed, caller), read_draws(draws, caller)
    selected = selected_queries(surface, queries, positions, prompts, caller)
    order = derangement(len(prompts), seed)
    member = torch.nn.functional.one_hot(of_key).double().to(surface.device)  # [key group]
    sums = np.zeros((2, len(chosen), surface.n_heads, len(prompts)))
    for rows in chunks(surface, prompts, chosen, chunk, caller):
        query_weights = selected[rows, None].double().to(surface.device)
        attended: dict[int, Tensor] = {}
        look_at(surface, prompts, rows, chosen, partial(_keep, attended, member))
        for follow_counts, pairs in zip(sums, (torch.arange(len(prompts)), order), strict=True):
            places = group_before[pairs][rows].to(surface.device), group_after[pairs][rows].to(surface.device)
            compare = partial(
                _compare, follow_counts[..., rows], chosen, attended, member, places, query_weights
            )
            look_at(surface, other_prompts, rows, chosen, compare)
    counts = selected.sum(1).double().numpy()
    heads = [Head(layer, head) for layer in chosen for head in range(surface.n_heads)]
    return Following(_frame(heads, sums.reshape(2 * len(heads), -1), counts, seed, draws))


def _whole(given: Any, length: int, name: str, caller: str) -> Tensor:
    numbers = torch.as_tensor(as_dense_tensor(given, f"{caller}: {name}")).cpu()
    if (
        numbers.shape != (length,)
        or numbers.is_floating_point()
        or numbers.dtype == torch.bool
        or bool((numbers < 0).any())
    ):
        raise CircuitsError(
            f"{caller}: {name} are {length} whole numbers from 0; got {list(numbers.shape)} of "
            f"{str(numbers.dtype).removeprefix('torch.')}"
        )
    return numbers.long()


def _most(pattern: Tensor, member: Tensor) -> Tensor:
    """Returns the group with most attention, [batch head query]."""
    return (pattern @ member).argmax(-1)


def _keep(attended: dict[int, Tensor], member: Tensor, layer: int, pattern: Tensor, seen: Tensor) -> None:
    attended[layer] = _most(pattern, member)


def _compare(
    follow_counts: np.ndarray,
    layers: tuple[int, ...],
    attended: dict[int, Tensor],
    member: Tensor,
    places: tuple[Tensor, Tensor],
    query_weights: Tensor,
    layer: int,
    pattern: Tensor,
    seen: Tensor,
) -> None:
    """Writes one layer's number of queries that follow into [layer head example]."""
    group_before, group_after = (group[:, None, None] for group in places)
    follows = (attended[layer] == group_before) & (_most(pattern, member) == group_after)
    follow_counts[layers.index(layer)] = (follows * query_weights).sum(-1).T.cpu().numpy()


def _frame(heads: list[Head], series: np.ndarray, counts: np.ndarray, seed: int, draws: int) -> pd.DataFrame:
    entries = np.broadcast_to(counts, series.shape)
    value, resampled = ratio(series.sum(1), entries.sum(1)), bootstrap(series, entries, seed, draws)
    paired, unpaired = slice(None, len(heads)), slice(len(heads), None)
    low, high = interval(resampled[:, paired], LEVEL)
    effect_low, effect_high = interval(resampled[:, paired] - resampled[:, unpaired], LEVEL)
    return pd.DataFrame(
        {
            "layer": [head.layer for head in heads],
            "head": [head.head for head in heads],
            "share": value[paired],
            "ci_low": low,
            "ci_high": high,
            "unpaired": value[unpaired],
            "effect": value[paired] - value[unpaired],
            "effect_ci_low": effect_low,
            "effect_ci_high": effect_high,
            "n": len(counts),
        }
    )
