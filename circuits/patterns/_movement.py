"""Measures how far attention moves between two inputs, in total variation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.heads import Head
from circuits.patterns._read import PairedPass
from circuits.statistics import LEVEL, interval, ratio
from circuits.tables import short_table
from circuits.validate import answers_former_names


@dataclass(frozen=True)
class Movement:
    """Distances between attention patterns, in total variation: the share of a query's attention that moves, 0 to 1.

    Attributes:
        frame: one row per head: `distance` between the two inputs of a pair, mean over pairs and queries; `unpaired`,
            the distance between the first input of a pair and the second of another; `effect` = distance − unpaired;
            `share` = distance / unpaired; 95% intervals, bootstrap over pairs. NaN where no query is compared.
    """

    frame: pd.DataFrame

    def __repr__(self) -> str:
        return short_table(self.frame, list(self.frame.columns))

    def plot(self) -> Any:
        """Returns a plotly figure of the distances between paired and between unpaired inputs, by layer and head."""
        from circuits.figures.results import compared_figure

        return compared_figure(self.frame, "distance", "How far attention moves")

    def static(self, at_most: float = 0.05) -> tuple[Head, ...]:
        """Returns the heads of whose attention at most this share moves, by the upper end of the interval."""
        still = self.frame[self.frame["distance_ci_high"] <= at_most]
        return tuple(Head(int(row.layer), int(row.head)) for row in still.itertuples())


@answers_former_names
def movement(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    other: Shaped[Tensor, "batch pos *input"] | Any,
    *,
    positions: Any = None,
    layers: Any = None,
    seed: int = 0,
    draws: int = 1000,
    batch_size: int | None = None,
) -> Movement:
    """Measures how far each head's attention moves between `tokens` and `other`, paired row by row.

    The difference within pairs decides what is measured: the same matrices under other masks give the sensitivity to
    the mask, other matrices under the same masks the sensitivity to the values. The control `unpaired` pairs row i of
    `tokens` with row d(i) of `other`, d one derangement drawn from `seed`: inputs that share neither. Pairs may be of
    unequal lengths; the control compares queries that both its rows have, in causal models, where a query sees as many
    keys in both.

    Args:
        positions: compare these queries only: numbers, or a boolean mask [batch pos].
        layers: only these. seed also draws the bootstrap, of `draws` resamples.
        batch_size: examples in a forward, by default as in `sweep`. Inside `intervene` the edits are in force.
    """
    caller = "patterns.movement"
    pairs = PairedPass.read_pair(caller, model, tokens, other, layers, positions, seed, draws)
    lengths = pairs.prompts.lengths
    if int(lengths.min()) < int(lengths.max()) and not pairs.surface.causal:
        raise CircuitsError(
            f"{caller}: in bidirectional attention queries of prompts of unequal length see different keys; give "
            "prompts of one length"
        )
    sums, compared = pairs.zeros(), pairs.compared
    for rows, query_mask in pairs.chunks(batch_size):
        before: dict[int, Tensor] = {}
        pairs.visit(rows, partial(_keep, before))
        control_mask = compared[rows, None].to(query_mask.device)
        pairings: tuple[tuple[slice | Tensor, Tensor], ...] = (
            (rows, query_mask),
            (pairs.order[rows], control_mask),
        )
        for distances, (other_rows, queries_compared) in zip(sums, pairings, strict=True):
            compare = partial(_compare, distances[..., rows], pairs.layers, before, queries_compared.double())
            pairs.visit_other(other_rows, compare)
    return Movement(_frame(pairs, sums))


def _keep(patterns: dict[int, Tensor], layer: int, pattern: Tensor, seen: Tensor) -> None:
    patterns[layer] = pattern


def _compare(
    distances: np.ndarray,
    layers: tuple[int, ...],
    before: dict[int, Tensor],
    query_weights: Tensor,
    layer: int,
    pattern: Tensor,
    seen: Tensor,
) -> None:
    """Writes one layer's distances from the patterns before, summed over queries, into [layer head example]."""
    distance = (pattern - before[layer]).abs_().sum(-1) / 2
    distances[layers.index(layer)] = (distance * query_weights).sum(-1).T.cpu().numpy()


def _frame(pairs: PairedPass, sums: np.ndarray) -> pd.DataFrame:
    """Returns a row for each head: how far attention moves, unpaired, their difference and ratio, and intervals."""
    (paired_mean, unpaired_mean), (paired_resamples, unpaired_resamples) = pairs.means(sums, pairs.compared)
    table_columns: dict[str, Any] = {
        "layer": [head.layer for head in pairs.heads],
        "head": [head.head for head in pairs.heads],
    }
    for name, values, resampled in (
        ("distance", paired_mean, paired_resamples),
        ("unpaired", unpaired_mean, None),
        ("effect", paired_mean - unpaired_mean, paired_resamples - unpaired_resamples),
        ("share", ratio(paired_mean, unpaired_mean), ratio(paired_resamples, unpaired_resamples)),
    ):
        table_columns[name] = values
        if resampled is not None:
            table_columns[f"{name}_ci_low"], table_columns[f"{name}_ci_high"] = interval(resampled, LEVEL)
    return pd.DataFrame(table_columns | {"n": len(pairs.prompts)})
