"""``interp-run ablation``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.head_command import HEADS_HELP, HeadCommand
from interp_tasks.experiments import Result, ablation
from interp_tasks.measurement.head_edits import read_specs
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Ablation(HeadCommand):
    """Ablate attention heads, and see which metrics move.

    Every number is compared with the unedited model on the same examples. Means and resamples are taken over
    the examples evaluated.
    """

    name: ClassVar[str] = "ablation"

    heads: Annotated[list[str], typer.Option("--heads", metavar="SPEC", help=HEADS_HELP)] = field(
        default_factory=lambda: ["all"]
    )

    def check(self) -> None:
        read_specs(self.heads)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return ablation(self.ckpt, self.heads, self.mode, self.keys, self.queries, **self.common(progress))
