"""The inputs of a sweep: its variants, and what all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from circuits.interventions.apply import Plan
from circuits.interventions.base import Intervention
from circuits.interventions.reference_runs import References
from circuits.model.prompts import Prompts
from circuits.model.surface import Surface
from circuits.sweeps.measurements import Row
from circuits.sweeps.metrics import Metric
from circuits.sweeps.table import about


@dataclass(frozen=True)
class Variant:
    """One row of the grid, or one draw of it."""

    name: str
    draw: int | None
    interventions: tuple[Intervention, ...]
    plan: Plan

    @property
    def run(self) -> Row:
        """What it edits, as columns of the table."""
        return {"variant": self.name, "draw": self.draw, **about(self.interventions, self.plan)}


@dataclass(frozen=True)
class SweepInputs:
    """The inputs that are common to all variants."""

    prompts: Prompts
    metric: Metric
    step: int  # examples per forward
    chunk: int  # tokens per forward, of all variants in it
    outputs: int  # tokens whose outputs are in memory together
    not_replayed: str | None = None  # why there is no room for a replay
    per_pass: int | None = None  # tokens per forward of sources; None: as many as they take by themselves
    memory: int | None = None  # bytes that are not exceeded

    @property
    def tokens(self) -> Tensor:
        return self.prompts.tokens

    def references(self, surface: Surface) -> References:
        """Returns the sources of the edits, none of which has been run."""
        return References(surface, self.per_pass, (self.prompts.shape, self.step))

    def pieces(self) -> Iterator[slice]:
        """Yields the examples of each forward."""
        for start in range(0, len(self.tokens), self.step):
            yield slice(start, min(start + self.step, len(self.tokens)))

    @property
    def first(self) -> slice:
        """The examples of the first forward."""
        return next(self.pieces())
