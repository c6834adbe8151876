"""Divides the variants of a sweep into stacks, whose runs start at one block each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stack:
    """Variants that share one run, which leaves out the first `start` blocks."""

    start: int
    members: tuple[int, ...]


def stacked(starts: Sequence[int], n_layers: int, width: int, per_call: float) -> list[Stack]:
    """Returns the cheapest division of variants into stacks of at most `width`, ordered by their start.

    A stack costs (n_layers + 1 − start) · (its variants + per_call): all variants in it run the blocks from its start
    on, and what comes after the last of them.

    Args:
        starts: by variant, the number of blocks that its run may leave out.
        per_call: what calling a block takes by itself, in units of one variant's computation in it.
    """
    order = sorted(range(len(starts)), key=lambda at: starts[at])
    # In this order every stack is a piece of the row: exchanging two variants never makes one cheaper.
    run = np.array([n_layers + 1 - starts[at] for at in order], dtype=float)
    count = np.arange(len(order) + 1)
    best, begins = np.zeros(len(order) + 1), [0]
    for end in count[1:]:
        first = max(0, end - width)
        costs = best[first:end] + run[first:end] * (end - count[first:end] + per_call)
        begins.append(first + int(costs.argmin()))
        best[end] = costs.min()
    pieces: list[Stack] = []
    end = len(order)
    while end:
        begin = begins[end]
        pieces.append(Stack(starts[order[begin]], tuple(order[begin:end])))
        end = begin
    return pieces[::-1]
