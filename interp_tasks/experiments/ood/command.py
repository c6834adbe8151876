"""``interp-run matrix ood``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.experiments import Result, ood
from interp_tasks.experiments.baseline.measure import no_tokens
from interp_tasks.experiments.ood.measure import GROUPS
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Ood(ExperimentCommand):
    """Try models on other laws of the entries, ranks, numbers of rows and columns than they were trained on.

    Beside each stands a method that is not trained. Shapes that a model cannot take are named in the notes, as are
    those that use positions it was never trained at.
    """

    name: ClassVar[str] = "ood"

    vary: Annotated[
        list[str],
        typer.Option(
            "--vary", metavar="GROUP", help="Variations of the task; repeat.", show_default=", ".join(GROUPS)
        ),
    ] = field(default_factory=lambda: list(GROUPS))
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="The method.", show_default="the first")
    ] = None

    def check(self) -> None:
        no_tokens(self.common(None), self.name)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return ood(self.ckpt, self.vary, self.method, **self.common(progress))
