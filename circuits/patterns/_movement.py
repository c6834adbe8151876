"""How far a head's attention moves between two inputs that differ in one thing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.replacements import derangement
from circuits.model.heads import Head
from circuits.model.surface import Surface
from circuits.patterns._read import chunks, look_at, read_draws, read_layers, selected_queries
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.validate import read_run_tokens, read_seed


@dataclass(frozen=True)
class Movement:
    """How far attention moves, in total variation: the share of a query's attention that goes to other keys, 0 to 1.

    Attributes:
        frame: one row per head: `distance` between the two inputs of a pair, mean over pairs and queries; `unpaired`,
            the same between the first input of a pair and the second of another; `effect` = distance − unpaired;
            `share` = distance / unpaired; 95% intervals, bootstrap over pairs. NaN where there is nothing to compare.
    """

    frame: pd.DataFrame

    def plot(self) -> Any:
        """A plotly figure: the distance between paired and between unpaired inputs, by layer and head."""
        from circuits.figures.patterns import compared_figure

        return compared_figure(self.frame, "distance", "How far attention moves")

    def static(self, at_most: float = 0.05) -> tuple[Head, ...]:
        """The heads of which less than this share of attention moves, by the upper end of the interval."""
        still = self.frame[self.frame["ci_high"] <= at_most]
        return tuple(Head(int(row.layer), int(row.head)) for row in still.itertuples())


def movement(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    other: Shaped[Tensor, "batch pos *input"] | Any,
    *,
    queries: Any = None,
    positions: Any = None,
    layers: Any = None,
    seed: int = 0,
    draws: int = 1000,
    chunk: int | str = "auto",
) -> Movement:
    """How far each head's attention moves between `tokens` and `other`, paired row by row.

    What the pairs share and what they do not decides what is measured: the same matrices under other masks give the
    sensitivity to the mask, other matrices under the same masks that to the values. The yardstick `unpaired` pairs
    row i of `tokens` with row d(i) of `other`, d one derangement drawn from `seed`: inputs that share neither.

    Args:
        queries: compare these only: positions, or a boolean mask [batch pos].
        layers: only these. seed also draws the bootstrap, of `draws` resamples.
        chunk: tokens per forward. Inside `intervene` the edits are in force.
    """
    caller = "patterns.movement"
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
    chosen = read_layers(layers, surface, caller)
    seed, draws = read_seed(seed, caller), read_draws(draws, caller)
    selected = selected_queries(surface, queries, positions, tokens, caller)
    order = derangement(len(tokens), seed)
    sums = np.zeros((2, len(chosen), surface.n_heads, len(tokens)))
    for rows in chunks(surface, tokens, chosen, chunk, caller):
        some = selected[rows, None].double().to(surface.device)  # [batch 1 query]
        before: dict[int, Tensor] = {}
        look_at(surface, tokens, rows, chosen, partial(_keep, before))
        pairings: tuple[slice | Tensor, ...] = (rows, order[rows])
        for into, where in zip(sums, pairings, strict=True):
            look_at(surface, other, where, chosen, partial(_compare, into[..., rows], chosen, before, some))
    counts = selected.sum(1).double().numpy()
    heads = [Head(layer, head) for layer in chosen for head in range(surface.n_heads)]
    near, far = sums.reshape(2, len(heads), -1)
    return Movement(_frame(heads, near, far, counts, seed, draws))


def _keep(patterns: dict[int, Tensor], layer: int, pattern: Tensor, seen: Tensor) -> None:
    patterns[layer] = pattern


def _compare(
    into: np.ndarray,
    layers: tuple[int, ...],
    before: dict[int, Tensor],
    some: Tensor,
    layer: int,
    pattern: Tensor,
    seen: Tensor,
) -> None:
    """Of one layer, into [layer head example]: the distances from the patterns before, summed over queries."""
    distance = (pattern - before[layer]).abs().sum(-1) / 2
    into[layers.index(layer)] = (distance * some).sum(-1).T.cpu().numpy()


def _frame(
    heads: list[Head], paired: np.ndarray, unpaired: np.ndarray, counts: np.ndarray, seed: int, draws: int
) -> pd.DataFrame:
    series, entries = (
        np.concatenate([paired, unpaired]),
        np.broadcast_to(counts, (2 * len(heads), len(counts))),
    )
    value = ratio(series.sum(1), entries.sum(1))
    drawn = bootstrap(series, entries, seed, draws)
    near, far = value[: len(heads)], value[len(heads) :]
    drawn_near, drawn_far = drawn[:, : len(heads)], drawn[:, len(heads) :]
    found: dict[str, Any] = {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
    for name, whole, resampled in (
        ("distance", near, drawn_near),
        ("unpaired", far, None),
        ("effect", near - far, drawn_near - drawn_far),
        ("share", ratio(near, far), ratio(drawn_near, drawn_far)),
    ):
        found[name] = whole
        if resampled is not None:
            prefix = "" if name == "distance" else f"{name}_"
            found[f"{prefix}ci_low"], found[f"{prefix}ci_high"] = interval(resampled, LEVEL)
    return pd.DataFrame(found | {"n": len(counts)})
