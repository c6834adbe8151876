"""Holds what was measured: a metric's sums and counts of every run and example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from circuits.errors import CircuitsError
from circuits.sweeps.metrics import PerExample, in_errors

BASELINE = "the unedited model"

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    """The metric of several runs on the same examples, and of the unedited run of the same model.

    Attributes:
        runs: of each run but the unedited one, its columns in the table: `variant`, `draw` and what it edits.
        engine: what computed the outputs of runs that do not say it themselves.
        chunks: for consecutive examples, by run, the metric of each; 0 is the unedited run.
    """

    runs: list[Row]
    engine: str
    chunks: list[dict[int, PerExample]] = field(default_factory=list)

    def begin(self, unedited: PerExample) -> None:
        """Begins a chunk of examples, with the metric of the unedited run."""
        self.chunks.append({0: self.check(unedited, BASELINE)})

    def add(self, index: int, values: PerExample) -> None:
        """Adds the metric of the run of this index for the examples of the chunk begun last."""
        self.chunks[-1][1 + index] = self.check(values, titled(self.runs[index]))

    def check(self, values: PerExample, title: str) -> PerExample:
        """Returns the values; refuses those of other metrics than those of the unedited run."""
        first = self.chunks[0][0] if self.chunks else values
        added, missing = sorted(set(values) - set(first)), sorted(set(first) - set(values))
        if added:
            raise CircuitsError(f"{in_errors(added[0])}: returned for {title} but not for {BASELINE}")
        if missing:
            raise CircuitsError(f"{in_errors(missing[0])}: returned for {BASELINE} but not for {title}")
        return values

    @property
    def metrics(self) -> list[str]:
        return list(self.chunks[0][0])

    def of(self, metric: str) -> np.ndarray:
        """Returns sums and counts of all examples, [2 run example]; run 0 is the unedited one."""
        places = range(1 + len(self.runs))
        parts = [np.stack([chunk[place][metric] for place in places], axis=1) for chunk in self.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def titled(run: Row) -> str:
    """Returns what a run is called in messages."""
    return f"variant {run['variant']!r}" + ("" if run.get("draw") is None else f", draw {run['draw']}")
