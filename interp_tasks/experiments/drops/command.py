"""``interp-run runs drops``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.experiments import Result, drops
from interp_tasks.experiments.drops.measure import check_against
from interp_tasks.measurement.options import check_seed
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Drops(RunsCommand):
    """When and how abruptly runs drop, whether they do at all, and what that depends on.

    A line per run; of RUN/seed-0, RUN/seed-1, ... a line more with the medians.
    """

    name: ClassVar[str] = "drops"

    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="Logged validation metric.", show_default="the task's"),
    ] = None
    against: Annotated[
        list[str],
        typer.Option(
            "--against",
            metavar="KEY",
            help="Rank correlations with a setting, as in model.d_model. Repeatable.",
        ),
    ] = field(default_factory=list)
    seed: Annotated[int, typer.Option("--seed", help="Draws the intervals.")] = 0

    def check(self) -> None:
        check_against(self.against)
        check_seed(self.seed)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return drops(self.ckpt, self.metric, self.against, self.seed)
