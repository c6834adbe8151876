"""``interp-run modular gradients``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.experiments import Result, gradients
from interp_tasks.experiments.gradients.measure import check_start
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Gradients(RunsCommand):
    """When the gradient of each weight becomes small, before and after the filter; of attention against the others.

    Of runs trained with train.gradient_norms_every above 0.
    """

    name: ClassVar[str] = "gradients"

    start: Annotated[int, typer.Option("--start", help="Leave out what was logged before this step.")] = 0

    def check(self) -> None:
        check_start(self.start)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return gradients(self.ckpt, self.start)
