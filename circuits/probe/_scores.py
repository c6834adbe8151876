"""Scores predictions by sums and counts per held-out example, so that any set of examples can be pooled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from circuits.probe._sites import ProbeSite
from circuits.probe._split import Entries
from circuits.probe._targets import CLASSIFICATION, Target

#: (split, metric) -> sums and counts [example], float64, of the held-out examples in order.
Scored = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]


def metrics_of(target: Target) -> tuple[str, ...]:
    """Returns the metrics of a target; cosines are for vectors only, because for a single number they are the sign."""
    if target.kind == CLASSIFICATION:
        return ("accuracy",)
    return ("mse", "r2") if target.width == 1 else ("mse", "r2", "cosine", "abs_cosine")


class Scores:
    """The scores of one probe, to which predictions are added chunk by chunk.

    mse: the mean over entries and the d numbers of each. r2: 1 − Σ(y − p)² / Σ(y − ȳ)², ȳ the mean of each number over
    the held-out entries of the split, the sums over all d numbers. cosine, abs_cosine: mean over entries of cos(p, y)
    and of its absolute value; entries whose target is the zero vector do not count, a prediction of zero has cosine 0.
    accuracy: the share of entries whose class has the largest prediction.
    """

    def __init__(self, target: Target, site: ProbeSite, entries: Entries) -> None:
        self._target, self._site, self._entries = target, site, entries
        self._places = torch.full((len(entries.used),), -1)
        self._places[entries.held_out] = torch.arange(len(entries.held_out))
        shape = (len(entries.splits), len(metrics_of(target)), 2, len(entries.held_out))
        self._sums = torch.zeros(shape, dtype=torch.float64)
        self._centres = (
            [] if target.kind == CLASSIFICATION else [self._mean(split) for split in entries.splits]
        )

    def add(self, examples: Tensor, chosen: Tensor, predicted: Tensor) -> None:
        """Adds predictions [entry column] for the entries where `chosen` [example pos] is true."""
        positions = self._site.positions
        predicted = predicted.cpu()
        true = self._target.take(examples, positions, chosen)
        rows = self._places[examples].unsqueeze(1).expand(chosen.shape)[chosen]
        for index, mask in enumerate(self._entries.splits.values()):
            inside = mask[examples][:, positions][chosen]
            measured = self._measured(index, predicted[inside], true[inside])
            for metric, parts in enumerate(measured):
                for part, values in enumerate(parts):
                    self._sums[index, metric, part].index_add_(0, rows[inside], values)

    def scored(self) -> Scored:
        """Returns sums and counts by split and metric."""
        scored = {}
        for index, split in enumerate(self._entries.splits):
            for metric, name in enumerate(metrics_of(self._target)):
                sums, counts = self._sums[index, metric].numpy()
                scored[split, name] = sums, counts
        return scored

    def counts(self) -> dict[str, int]:
        """Returns the number of held-out entries by split."""
        used, held_out = self._entries.used[:, self._site.positions], self._entries.held_out
        return {
            name: int((mask[:, self._site.positions] & used)[held_out].sum())
            for name, mask in self._entries.splits.items()
        }

    def _measured(self, split: int, predicted: Tensor, true: Tensor) -> list[tuple[Tensor, Tensor]]:
        ones = torch.ones(len(true), dtype=torch.float64)
        if self._target.kind == CLASSIFICATION:
            return [((predicted.argmax(1) == true).double(), ones)]
        error = (predicted - true).square().sum(1)
        spread = (true - self._centres[split]).square().sum(1)
        sums_and_counts = [(error, ones * self._target.width), (spread - error, spread)]
        if self._target.width == 1:
            return sums_and_counts
        lengths = predicted.norm(dim=1) * true.norm(dim=1)
        cosine = torch.where(lengths > 0, (predicted * true).sum(1) / lengths, 0.0)
        directed = (true.norm(dim=1) > 0).double()
        return [*sums_and_counts, (cosine * directed, directed), (cosine.abs() * directed, directed)]

    def _mean(self, split: str) -> Tensor:
        examples, positions = self._entries.held_out, self._site.positions
        chosen = (self._entries.used & self._entries.splits[split])[examples][:, positions]
        values = self._target.take(examples, positions, chosen)
        # From the first one on, so that the mean of equal numbers is that number, and their spread 0 and no rounding.
        return values[:1].sum(0) + (values - values[:1]).mean(0)


def pooled(draws: list[Scored]) -> Scored | None:
    """Averages the sums and counts of several draws, example by example; None if there is no draw."""
    if not draws:
        return None
    return {
        key: (np.mean([one[key][0] for one in draws], 0), np.mean([one[key][1] for one in draws], 0))
        for key in draws[0]
    }
