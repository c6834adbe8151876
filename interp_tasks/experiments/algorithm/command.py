"""``interp-run matrix algorithm``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.experiments import Result, algorithm
from interp_tasks.experiments.baseline.measure import no_tokens
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Algorithm(ExperimentCommand):
    """Ask which known method fills in the blanks as the model does: agreement of predictions and of errors.

    The table is about the output; files, JSON, CSV and the figure have the read-out after each layer too.
    """

    name: ClassVar[str] = "algorithm"

    method: Annotated[
        list[str],
        typer.Option(
            "--method", metavar="NAME", help="One that the task declares; repeat.", show_default="all"
        ),
    ] = field(default_factory=list)
    entries: Annotated[
        list[str],
        typer.Option(
            "--entries", metavar="KIND", help="Kind of entries it declares; repeat.", show_default="all"
        ),
    ] = field(default_factory=list)

    def check(self) -> None:
        no_tokens(self.common(None), self.name)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return algorithm(self.ckpt, self.method, self.entries, **self.common(progress))
