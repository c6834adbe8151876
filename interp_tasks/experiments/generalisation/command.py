"""``interp-run modular generalisation``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.experiments import Result, generalisation
from interp_tasks.experiments.generalisation.measure import LEVEL, check_level
from interp_tasks.measurement.options import check_seed
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Generalisation(RunsCommand):
    """The step at which each accuracy of a run reaches a level, in training and validation, and in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is
    said to be so by its last step. With --against, how many times as many steps it takes as another.
    """

    name: ClassVar[str] = "generalisation"

    level: Annotated[float, typer.Option("--level", help="Of an accuracy, above 0, at most 1.")] = LEVEL
    against: Annotated[
        list[str],
        typer.Option(
            "--against",
            metavar="RUN",
            help="Compare steps with this run, seed by seed; also the end of the name of one given. Repeatable.",
        ),
    ] = field(default_factory=list)
    seed: Annotated[int, typer.Option("--seed", help="Draws the intervals.")] = 0

    def check(self) -> None:
        check_level(self.level)
        check_seed(self.seed)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return generalisation(self.ckpt, self.level, self.against, self.seed)
