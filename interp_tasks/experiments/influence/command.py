"""``interp-run matrix influence``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, influence
from interp_tasks.experiments.influence.measure import SHIFT, check_shift
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Influence(ExperimentCommand):
    """See which observed entries move which hidden ones: change one at a time.

    Pooled over pairs in the same row, in the same column and neither; over entries on a shortest path of observed
    entries to the hidden one and off it; beside what the rank-1 ratio would do.
    """

    name: ClassVar[str] = "influence"

    shift: Annotated[float, typer.Option("--shift", help="How far a value moves, up or down.")] = SHIFT
    redraw: Annotated[bool, typer.Option("--redraw", help="Give it another example's value instead.")] = False

    def check(self) -> None:
        check_shift(self.shift)
        if self.tokens is not None:
            raise UserError("influence needs a task that says what may be changed: leave --tokens out")
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return influence(self.ckpt, self.shift, redraw=self.redraw, **self.common(progress))
