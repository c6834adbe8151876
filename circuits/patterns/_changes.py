"""Measures how attention changes between paired inputs: how far it moves, and whether it follows what moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.heads import Head
from circuits.patterns._read import PairedPass
from circuits.statistics import LEVEL, interval, ratio
from circuits.tables import short_table
from circuits.tensors import parse_numbers
from circuits.validate import answers_former_names


@dataclass(frozen=True)
class _Compared:
    """A measure of each head between paired inputs, beside that between unpaired ones, in `frame`."""

    frame: pd.DataFrame

    def __repr__(self) -> str:
        return short_table(self.frame, list(self.frame.columns))

    def _heads(self, chosen: pd.Series) -> tuple[Head, ...]:
        return tuple(Head(int(row.layer), int(row.head)) for row in self.frame[chosen].itertuples())


class Movement(_Compared):
    """Distances between attention patterns, in total variation: the share of a query's attention that moves, 0 to 1.

    `plots.heads(found.frame, column="distance")` draws them.

    Attributes:
        frame: one row per head: `distance` between the two inputs of a pair, mean over pairs and queries; `unpaired`,
            the distance between the first input of a pair and the second of another; `effect` = distance − unpaired;
            `share` = distance / unpaired; 95% intervals, bootstrap over pairs. NaN where no query is compared.
    """

    def static(self, at_most: float = 0.05) -> tuple[Head, ...]:
        """Returns the heads of whose attention at most this share moves, by the upper end of the interval."""
        return self._heads(self.frame["distance_ci_high"] <= at_most)


class Following(_Compared):
    """The share of queries at which a head's attention follows what moves; drawn as a `Movement` is.

    Attributes:
        frame: one row per head: `share` of the queries that attend most to the right group both before and after the
            move, pooled over pairs; `unpaired`, that share judged by the groups of another pair, which is above 0 for a
            head that always prefers some groups; `effect` = share − unpaired; 95% intervals, bootstrap over pairs; `n`
            pairs.
    """

    def heads(self, at_least: int | float = 0.5) -> tuple[Head, ...]:
        """Returns the heads that follow at this share of queries or more, by the lower end of the interval."""
        return self._heads(self.frame["share_ci_low"] >= at_least)


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
    pairs = PairedPass.parse_pair(caller, model, tokens, other, layers, positions, seed, draws)
    lengths = pairs.prompts.lengths
    if int(lengths.min()) < int(lengths.max()) and not pairs.surface.causal:
        raise CircuitsError(
            f"{caller}: in bidirectional attention queries of prompts of unequal length see different keys; give "
            "prompts of one length"
        )
    sums, compared = pairs.zeros(), pairs.compared
    for rows, query_mask in pairs.chunks(batch_size):
        before = [pattern for _, pattern, _ in pairs.patterns(rows)]
        control_mask = compared[rows, None].to(query_mask.device)
        pairings: tuple[tuple[slice | Tensor, Tensor], ...] = (
            (rows, query_mask),
            (pairs.order[rows], control_mask),
        )
        for distances, (other_rows, queries) in zip(sums, pairings, strict=True):
            for at, after, _ in pairs.other.patterns(other_rows):
                distance = (after - before[at]).abs_().sum(-1) / 2
                distances[at, :, rows] = (distance * queries.double()).sum(-1).T.cpu().numpy()
    return Movement(_table(pairs, "distance", *pairs.means(sums, compared)))


@answers_former_names
def follow(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    other: Shaped[Tensor, "batch pos *input"] | Any,
    groups: Any,
    before: Any,
    after: Any,
    *,
    positions: Any = None,
    layers: Any = None,
    seed: int = 0,
    draws: int = 1000,
    batch_size: int | None = None,
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
        positions: these queries only: numbers, or a boolean mask [batch pos].
        layers: only these.
        seed: draws the bootstrap and the pairs of `unpaired`.
        draws: the number of bootstrap resamples.
        batch_size: examples in a forward, by default as in `sweep`.

    Inside `intervene` the edits are in force.
    """
    caller = "patterns.follow"
    pairs = PairedPass.parse_pair(caller, model, tokens, other, layers, positions, seed, draws)
    member, group_before, group_after = _parse_groups(pairs, groups, before, after, caller)
    count, device = len(pairs.prompts), pairs.surface.device
    sums = pairs.zeros()
    for rows, query_mask in pairs.chunks(batch_size):
        attended_before, attended_after = (
            [(pattern @ member).argmax(-1) for _, pattern, _ in patterns]
            for patterns in (pairs.patterns(rows), pairs.other.patterns(rows))
        )
        for follow_counts, judged_by in zip(sums, (torch.arange(count), pairs.order), strict=True):
            here, there = (
                group[judged_by][rows].to(device)[:, None, None] for group in (group_before, group_after)
            )
            for at in range(len(pairs.layers)):
                follows = (attended_before[at] == here) & (attended_after[at] == there)
                follow_counts[at, ..., rows] = (follows * query_mask.double()).sum(-1).T.cpu().numpy()
    return Following(_table(pairs, "share", *pairs.means(sums)))


def _parse_groups(
    pairs: PairedPass, groups: Any, before: Any, after: Any, caller: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which keys are in which group, [key group], and each pair's group before and after the move."""
    count, length = pairs.prompts.shape[:2]
    of_key = _whole(groups, length, "groups", caller)
    group_before, group_after = (
        _whole(values, count, name, caller) for values, name in ((before, "before"), (after, "after"))
    )
    still = int((group_before == group_after).sum())
    if still:
        raise CircuitsError(f"{caller}: in {still} pairs nothing moves: before equals after")
    absent = {*group_before.tolist(), *group_after.tolist()} - {*of_key.tolist()}
    if absent:
        raise CircuitsError(
            f"{caller}: no position is in group {min(absent)}, which before or after names; groups are "
            f"{', '.join(map(str, sorted({*of_key.tolist()})))}"
        )
    member = torch.nn.functional.one_hot(of_key).double().to(pairs.surface.device)
    return member, group_before, group_after


def _whole(given: Any, length: int, name: str, caller: str) -> Tensor:
    numbers = parse_numbers(given, f"{caller}: {name}").cpu()
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


def _table(
    pairs: PairedPass, name: str, means: np.ndarray, resampled: tuple[np.ndarray, np.ndarray]
) -> pd.DataFrame:
    """Returns a row for each head: a measure in pairs and unpaired, what the pairing makes, and intervals.

    Args:
        means: [pairing head]; `resampled`, for each pairing, [draw head].
    """
    (paired, unpaired), (drawn, drawn_unpaired) = means, resampled
    columns = {name: (paired, drawn), "unpaired": (unpaired, None)}
    columns["effect"] = paired - unpaired, drawn - drawn_unpaired
    if name == "distance":
        columns["share"] = ratio(paired, unpaired), ratio(drawn, drawn_unpaired)
    table: dict[str, Any] = {
        "layer": [head.layer for head in pairs.heads],
        "head": [head.head for head in pairs.heads],
    }
    for column, (values, draws) in columns.items():
        table[column] = values
        if draws is not None:
            table[f"{column}_ci_low"], table[f"{column}_ci_high"] = interval(draws, LEVEL)
    return pd.DataFrame(table | {"n": len(pairs.prompts)})
