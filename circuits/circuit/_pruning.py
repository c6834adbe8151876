"""Ranks members of circuits by what removing them jointly costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from circuits.circuit._circuit_runner import CircuitRunner, PatchSetup
from circuits.circuit._faithfulness_curve import Ranking
from circuits.model.types import BatchLike, MetricLike, RankingLike, TokensLike

#: Blocks that are measured in a round, and the share of what is left that goes in it.
_BLOCKS, _SHARE = 20, 0.2


def prune(
    model: nn.Module,
    ranking: RankingLike,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    batch_size: int | None = None,
) -> list[str]:
    """Returns the names of a ranking in a better order, by greedy removal of blocks: the last to go comes first.

    A round takes the last two fifths of the members that are left, in up to 20 blocks; measures the circuit without
    each block; and removes the half of them without which faithfulness is nearest to 1 (of several metrics, in the
    mean). A thousand edges take some 400 forwards of all examples. Removing one edge at a time is ACDC (Conmy et al.
    2023, arXiv:2304.14997). Test what comes out on other examples (`circuit.curve`).

    Args:
        ranking: a screening of one metric (`patch.screen`, `patch.edges`), or a list of names, largest first.
        base: tokens [n pos], the clean run.
        source: tokens, whose values are on the edges outside a circuit.
        metric: `fn(output)`, or `fn(output, batch[rows])`.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge outside carries: "resample", the source's values; "mean", their mean; "zero", nothing.
        batch_size: examples in a forward; by default by the model's size.

    Where the gap's interval holds 0, a warning says so.
    """
    given = Ranking.of(ranking, "circuit.prune")
    examples = PatchSetup.parse("circuit.prune", model, base, source, metric, batch, how)
    runs = CircuitRunner.of(examples, batch_size, 0, 1000)
    runs.tabulate_ends()
    members = given.resolve(runs.graph)
    left, removed = members.entries[::-1], []
    while left:
        considered = 2 * max(1, round(_SHARE * len(left)))
        size = -(-min(considered, len(left)) // _BLOCKS)
        starts = range(0, min(considered, len(left)), size)
        without = [replace(members, entries=left[:at] + left[min(at + size, considered) :]) for at in starts]
        measured = [runs.measure_circuit(kept.top_circuit(len(left))) for kept in without]
        errors = np.sum([abs(1 - found.share) for _, found in runs.faithfulness(measured)], axis=0)
        best = np.argsort(errors, kind="stable")[: max(1, len(starts) // 2)]
        for at in best:
            removed += left[starts[at] : min(starts[at] + size, considered)]
        left = [entry for entry in left if entry not in removed]
    return [f"{member}{at.suffix}" for member, at in reversed(removed)]
