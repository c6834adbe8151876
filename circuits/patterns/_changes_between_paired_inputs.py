"""Measures how attention changes between paired inputs: how far it moves, and whether it follows what moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_count, parse_seed
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import parse_numbers
from circuits.interventions.replacements import derangement
from circuits.model.heads import Head
from circuits.model.prompts_with_mask import Prompts
from circuits.model.types import ArrayLike, PositionsLike, TokensLike
from circuits.patterns._patterns_and_means import PatternPass, Recorded, parse_prompts_and_recorded
from circuits.statistics import bootstrap_ratios, ratio
from circuits.table_printing import interval_columns, short_table_text


@dataclass(frozen=True)
class _PairedHeadMeasure:
    """A measure of each head between paired inputs, beside that between unpaired ones, in `frame`."""

    frame: pd.DataFrame

    def __repr__(self) -> str:
        return short_table_text(self.frame, list(self.frame.columns))

    def _heads(self, chosen: pd.Series) -> tuple[Head, ...]:
        return tuple(Head(int(row.layer), int(row.head)) for row in self.frame[chosen].itertuples())


class Movement(_PairedHeadMeasure):
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


class Following(_PairedHeadMeasure):
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


@check_renamed_args
def movement(
    model: nn.Module,
    tokens: TokensLike | Recorded,
    other: TokensLike | Recorded,
    *,
    positions: PositionsLike = None,
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
        seed: also draws the bootstrap, of `draws` resamples.
        batch_size: examples in a forward; by default by the model's size. Inside `intervene` the edits are in force.
    """
    caller = "patterns.movement"
    pairs = _PairedPasses.parse(caller, model, tokens, other, positions, seed, draws)
    lengths = pairs.first.prompts.lengths
    if int(lengths.min()) < int(lengths.max()) and not pairs.first.hooked.causal:
        raise CircuitsError(
            f"{caller}: in bidirectional attention queries of prompts of unequal length see different keys; give "
            "prompts of one length"
        )
    # In the control, the queries that both rows have.
    compared = pairs.first.selected & pairs.other.prompts.reached[pairs.order]
    sums = pairs.zero_sums()
    for rows, query_mask in pairs.first.rows_and_query_masks(batch_size):
        before = [pattern for _, pattern, _ in pairs.first.patterns_and_visible_keys(rows)]
        of_control = compared[rows, None].to(query_mask.device)
        partners: tuple[slice | Tensor, ...] = (rows, pairs.order[rows])
        for distances, others, queries in zip(sums, partners, (query_mask, of_control), strict=True):
            for at, after, _ in pairs.other.patterns_and_visible_keys(others):
                distance = (after - before[at]).abs_().sum(-1) / 2
                distances[at, :, rows] = (distance * queries.double()).sum(-1).T.cpu().numpy()
    return Movement(pairs.tabulate("distance", sums, compared))


@check_renamed_args
def follow(
    model: nn.Module,
    tokens: TokensLike | Recorded,
    other: TokensLike | Recorded,
    groups: ArrayLike,
    before: ArrayLike,
    after: ArrayLike,
    *,
    positions: PositionsLike = None,
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
        seed: draws the bootstrap and the pairs of `unpaired`.
        draws: the number of bootstrap resamples.
        batch_size: examples in a forward; by default by the model's size.

    Inside `intervene` the edits are in force.
    """
    caller = "patterns.follow"
    pairs = _PairedPasses.parse(caller, model, tokens, other, positions, seed, draws)
    first, device = pairs.first, pairs.first.hooked.device
    count, length = first.prompts.shape[:2]
    named = (("groups", groups, length), ("before", before, count), ("after", after, count))
    of_key, was, comes = (
        _parse_group_numbers(given, size, f"{caller}: {name}") for name, given, size in named
    )
    if still := int((was == comes).sum()):
        raise CircuitsError(f"{caller}: in {still} pairs nothing moves: before equals after")
    if absent := {*was.tolist(), *comes.tolist()} - {*of_key.tolist()}:
        raise CircuitsError(
            f"{caller}: no position is in group {min(absent)}, which before or after names; groups are "
            f"{', '.join(map(str, sorted({*of_key.tolist()})))}"
        )
    member = torch.nn.functional.one_hot(of_key).double().to(device)
    sums = pairs.zero_sums()
    for rows, query_mask in first.rows_and_query_masks(batch_size):
        attended = [
            [(pattern @ member).argmax(-1) for _, pattern, _ in one.patterns_and_visible_keys(rows)]
            for one in (first, pairs.other)
        ]
        for hits, judged_by in zip(sums, (torch.arange(count), pairs.order), strict=True):
            here, there = (group[judged_by][rows].to(device)[:, None, None] for group in (was, comes))
            for at, (one, two) in enumerate(zip(*attended, strict=True)):
                follows = (one == here) & (two == there)
                hits[at, ..., rows] = (follows * query_mask.double()).sum(-1).T.cpu().numpy()
    return Following(pairs.tabulate("share", sums, first.selected))


def _parse_group_numbers(given: Any, length: int, what: str) -> Tensor:
    """Returns whole numbers from 0, [length]."""
    numbers = parse_numbers(given, what).cpu()
    if numbers.shape != (length,) or numbers.is_floating_point() or bool((numbers < 0).any()):
        raise CircuitsError(
            f"{what} are {length} whole numbers from 0; got {numbers.dtype} {list(numbers.shape)}"
        )
    return numbers.long()


@dataclass(frozen=True)
class _PairedPasses:
    """Passes over two inputs that are compared row by row, with a control that pairs other rows.

    Attributes:
        other: the pass over the second input, in the layout of the first.
        order: [batch], the row of the control's pair: a derangement drawn from `seed`.
        seed: also of the bootstrap, of `draws` resamples.
    """

    first: PatternPass
    other: PatternPass
    order: Tensor
    seed: int
    draws: int

    @classmethod
    def parse(
        cls, caller: str, model: Any, tokens: Any, other: Any, positions: Any, seed: Any, draws: Any
    ) -> _PairedPasses:
        """Reads the arguments; raises `CircuitsError` unless both inputs have as many tokens row by row, in at least 2
        rows.
        """
        seed, draws = parse_seed(seed, caller), parse_count(draws, caller)
        first = PatternPass.parse(caller, model, tokens, positions)
        second, recorded = parse_prompts_and_recorded(first.hooked, other, caller)
        _check_pairs(first.prompts, second, caller)
        laid_out = second.like(first.prompts)
        # A record of another layout is of no use.
        paired = replace(first, prompts=laid_out, recorded=recorded if laid_out is second else None)
        return cls(first, paired, derangement(len(second), seed), seed, draws)

    def zero_sums(self) -> np.ndarray:
        """Returns zeros [pairing layer head example], to add to; the pairings are the pairs and the control."""
        hooked = self.first.hooked
        return np.zeros((2, hooked.n_layers, hooked.n_heads, len(self.first.prompts)))

    def tabulate(self, name: str, sums: np.ndarray, control_queries: Tensor) -> pd.DataFrame:
        """Returns a row per head: a mean over queries in pairs and unpaired, what the pairing makes, and intervals.

        Args:
            sums: over queries, [pairing layer head example].
            control_queries: the queries of the control, bool [batch pos].
        """
        series = sums.reshape(-1, sums.shape[-1])
        queries = torch.stack([self.first.selected, control_queries]).sum(2).double()
        entries = np.broadcast_to(queries[:, None, None].numpy(), sums.shape).reshape(series.shape)
        paired, unpaired = np.split(ratio(series.sum(1), entries.sum(1)), 2)
        drawn, of_control = np.split(bootstrap_ratios(series, entries, self.seed, self.draws), 2, axis=1)
        layers, heads = zip(*self.first.heads, strict=True)
        table: dict[str, Any] = {"layer": layers, "head": heads}
        table |= interval_columns(name, paired, drawn) | {"unpaired": unpaired}
        table |= interval_columns("effect", paired - unpaired, drawn - of_control)
        if name == "distance":
            table |= interval_columns("share", ratio(paired, unpaired), ratio(drawn, of_control))
        return pd.DataFrame(table | {"n": sums.shape[-1]})


def _check_pairs(one: Prompts, two: Prompts, caller: str) -> None:
    """Refuses two inputs that cannot be compared row by row."""
    if len(one) != len(two) or len(one) < 2 or (one.shape != two.shape and not (one.padded or two.padded)):
        raise CircuitsError(
            f"{caller}: two inputs of one shape are compared row by row, at least 2 rows; got {list(one.shape)} and "
            f"{list(two.shape)}"
        )
    if rows := (one.lengths != two.lengths).nonzero().flatten().tolist():
        raise CircuitsError(
            f"{caller}: example {rows[0]} has {int(one.lengths[rows[0]])} tokens, the one it is compared with "
            f"{int(two.lengths[rows[0]])}; give pairs of one length"
        )
