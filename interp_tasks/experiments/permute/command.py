"""``interp-run permute``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.experiments import Result, permute
from interp_tasks.experiments.permute.measure import ALL, check_what
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Permute(ComparisonCommand):
    """Permute the position embeddings, many times, and see which metrics move.

    The table shows the draws pooled, and how they differ; files, JSON and CSV have a row for each draw too.
    """

    name: ClassVar[str] = "permute"

    what: Annotated[
        list[str],
        typer.Option(
            "--what",
            metavar="NAME",
            help="all; of a grid of positions rows, within-rows, middle-row, columns, ... Repeat for rows.",
        ),
    ] = field(default_factory=lambda: [ALL])
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="Random permutations.")] = 20

    def check(self) -> None:
        check_what(self.what)
        check_draws(self.draws)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return permute(self.ckpt, self.draws, self.what, **self.common(progress))
