"""Whether a head's attention goes along when what it may attend to changes place."""

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
from circuits.patterns._read import chunks, look_at, read_draws, read_layers, selected_queries
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tensors import as_dense_tensor
from circuits.validate import read_run_tokens, read_seed


@dataclass(frozen=True)
class Following:
    """How often a head's attention follows what changes place.

    Attributes:
        frame: one row per head: `share` of the queries that attend most to the group in question before it moves and
            after, pooled over pairs; `unpaired`, the same judged by the places of another pair, which a head reaches
            that always prefers some groups; `effect` = share − unpaired; 95% intervals, bootstrap over pairs; `n`
            pairs.
    """

    frame: pd.DataFrame

    def plot(self) -> Any:
        """A plotly figure: the share of queries that follow, in pairs and unpaired, by layer and head."""
        from circuits.figures.patterns import compared_figure

        return compared_figure(self.frame, "share", "How often attention follows")

    def heads(self, at_least: float = 0.5) -> tuple[Head, ...]:
        """The heads that follow at this share of queries or more, by the lower end of the interval."""
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
    """Does attention go along when something moves from one group of positions to another?

    Args:
        tokens: pairs of inputs, row by row, before and after the move.
        other: see `tokens`.
        groups: integers [pos], the group of each key, such as the column of an entry.
        before: integers [batch], the group where the thing is in `tokens` and in `other`; they differ in every pair, so
            that a head which does not look at it scores 0. A query attends to the group that has the largest sum of its
            attention, not its mean.
        after: see `before`.

    queries: these only: positions, or a boolean mask [batch pos]. layers: only these. seed draws the bootstrap, of
    `draws` resamples, and the pairs of `unpaired`. chunk: tokens per forward. Inside `intervene` the edits are in
    force.
    """
    caller = "patterns.follow"
    surface, tokens, other = (
        Surface.of(model),
        read_run_tokens(tokens, caller),
        read_run_tokens(other, caller),
    )
    if tokens.shape != other.shape or len(tokens) < 2:
        raise CircuitsError(
            f"{caller}: two inputs of one shape are compared row by row, at least 2 rows; got {list(tokens.shape)} and "
            f"{list(other.shape)}"
        )
    of_key = _whole(groups, tokens.shape[1], "groups", caller)
    here, there = (
        _whole(given, len(tokens), name, caller) for given, name in ((before, "before"), (after, "after"))
    )
    if bool((here == there).any()):
        raise CircuitsError(
            f"{caller}: in {int((here == there).sum())} pairs nothing moves: before equals after"
        )
    chosen = read_layers(layers, surface, caller)
    seed, draws = read_seed(seed, caller), read_draws(draws, caller)
    selected = selected_queries(surface, queries, positions, tokens, caller)
    order = derangement(len(tokens), seed)
    member = torch.nn.functional.one_hot(of_key).double().to(surface.device)  # [key group]
    sums = np.zeros((2, len(chosen), surface.n_heads, len(tokens)))
    for rows in chunks(surface, tokens, chosen, chunk, caller):
        some = selected[rows, None].double().to(surface.device)
        attended: dict[int, Tensor] = {}
        look_at(surface, tokens, rows, chosen, partial(_keep, attended, member))
        for into, pairs in zip(sums, (torch.arange(len(tokens)), order), strict=True):
            places = here[pairs][rows].to(surface.device), there[pairs][rows].to(surface.device)
            take = partial(_compare, into[..., rows], chosen, attended, member, places, some)
            look_at(surface, other, rows, chosen, take)
    counts = selected.sum(1).double().numpy()
    heads = [Head(layer, head) for layer in chosen for head in range(surface.n_heads)]
    return Following(_frame(heads, sums.reshape(2 * len(heads), -1), counts, seed, draws))


def _whole(given: Any, length: int, name: str, caller: str) -> Tensor:
    found = torch.as_tensor(as_dense_tensor(given, f"{caller}: {name}")).cpu()
    if (
        found.shape != (length,)
        or found.is_floating_point()
        or found.dtype == torch.bool
        or bool((found < 0).any())
    ):
        raise CircuitsError(
            f"{caller}: {name} are {length} whole numbers from 0; got {list(found.shape)} of "
            f"{str(found.dtype).removeprefix('torch.')}"
        )
    return found.long()


def _most(pattern: Tensor, member: Tensor) -> Tensor:
    """The group with most attention, [batch head query]."""
    return (pattern @ member).argmax(-1)


def _keep(attended: dict[int, Tensor], member: Tensor, layer: int, pattern: Tensor, seen: Tensor) -> None:
    attended[layer] = _most(pattern, member)


def _compare(
    into: np.ndarray,
    layers: tuple[int, ...],
    attended: dict[int, Tensor],
    member: Tensor,
    places: tuple[Tensor, Tensor],
    some: Tensor,
    layer: int,
    pattern: Tensor,
    seen: Tensor,
) -> None:
    """Of one layer, into [layer head example]: the queries that follow."""
    here, there = (place[:, None, None] for place in places)
    follows = (attended[layer] == here) & (_most(pattern, member) == there)
    into[layers.index(layer)] = (follows * some).sum(-1).T.cpu().numpy()


def _frame(heads: list[Head], series: np.ndarray, counts: np.ndarray, seed: int, draws: int) -> pd.DataFrame:
    entries = np.broadcast_to(counts, series.shape)
    value, drawn = ratio(series.sum(1), entries.sum(1)), bootstrap(series, entries, seed, draws)
    own, theirs = slice(None, len(heads)), slice(len(heads), None)
    low, high = interval(drawn[:, own], LEVEL)
    effect_low, effect_high = interval(drawn[:, own] - drawn[:, theirs], LEVEL)
    return pd.DataFrame(
        {
            "layer": [head.layer for head in heads],
            "head": [head.head for head in heads],
            "share": value[own],
            "ci_low": low,
            "ci_high": high,
            "unpaired": value[theirs],
            "effect": value[own] - value[theirs],
            "effect_ci_low": effect_low,
            "effect_ci_high": effect_high,
            "n": len(counts),
        }
    )
