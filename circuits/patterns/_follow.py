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
from circuits.model.heads import Head
from circuits.patterns._read import PairedPass
from circuits.statistics import LEVEL, interval
from circuits.tables import short_table
from circuits.tensors import read_numbers
from circuits.validate import answers_former_names


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

    def __repr__(self) -> str:
        return short_table(self.frame, list(self.frame.columns))

    def plot(self) -> Any:
        """Returns a plotly figure of the share of queries that follow, in pairs and unpaired, by layer and head."""
        from circuits.figures.results import compared_figure

        return compared_figure(self.frame, "share", "How often attention follows")

    def heads(self, at_least: int | float = 0.5) -> tuple[Head, ...]:
        """Returns the heads that follow at this share of queries or more, by the lower end of the interval."""
        sure = self.frame[self.frame["share_ci_low"] >= at_least]
        return tuple(Head(int(row.layer), int(row.head)) for row in sure.itertuples())


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
    pairs = PairedPass.read_pair(caller, model, tokens, other, layers, positions, seed, draws)
    count, length = pairs.prompts.shape[:2]
    of_key = _whole(groups, length, "groups", caller)
    group_before, group_after = (
        _whole(values, count, name, caller) for values, name in ((before, "before"), (after, "after"))
    )
    if bool((group_before == group_after).any()):
        raise CircuitsError(
            f"{caller}: in {int((group_before == group_after).sum())} pairs nothing moves: before equals after"
        )
    absent = {*group_before.tolist(), *group_after.tolist()} - {*of_key.tolist()}
    if absent:
        raise CircuitsError(
            f"{caller}: no position is in group {min(absent)}, which before or after names; groups are "
            f"{', '.join(map(str, sorted({*of_key.tolist()})))}"
        )
    device = pairs.surface.device
    member = torch.nn.functional.one_hot(of_key).double().to(device)  # [key group]
    sums = pairs.zeros()
    for rows, query_mask in pairs.chunks(batch_size):
        attended_before: dict[int, Tensor] = {}
        attended_after: dict[int, Tensor] = {}
        pairs.visit(rows, partial(_keep, attended_before, member))
        pairs.visit_other(rows, partial(_keep, attended_after, member))
        for follow_counts, judged_by in zip(sums, (torch.arange(count), pairs.order), strict=True):
            here, there = (
                group[judged_by][rows].to(device)[:, None, None] for group in (group_before, group_after)
            )
            for at, layer in enumerate(pairs.layers):
                follows = (attended_before[layer] == here) & (attended_after[layer] == there)
                follow_counts[at, ..., rows] = (follows * query_mask.double()).sum(-1).T.cpu().numpy()
    return Following(_frame(pairs, sums))


def _whole(given: Any, length: int, name: str, caller: str) -> Tensor:
    numbers = read_numbers(given, f"{caller}: {name}").cpu()
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


def _frame(pairs: PairedPass, sums: np.ndarray) -> pd.DataFrame:
    """Returns a row for each head: how often attention follows, by chance, their difference, and intervals."""
    (paired, unpaired), (paired_resamples, unpaired_resamples) = pairs.means(sums)
    low, high = interval(paired_resamples, LEVEL)
    effect_low, effect_high = interval(paired_resamples - unpaired_resamples, LEVEL)
    return pd.DataFrame(
        {
            "layer": [head.layer for head in pairs.heads],
            "head": [head.head for head in pairs.heads],
            "share": paired,
            "share_ci_low": low,
            "share_ci_high": high,
            "unpaired": unpaired,
            "effect": paired - unpaired,
            "effect_ci_low": effect_low,
            "effect_ci_high": effect_high,
            "n": len(pairs.prompts),
        }
    )
