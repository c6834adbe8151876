"""``interp-run matrix baseline``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import REF_HELP, ComparisonCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, baseline
from interp_tasks.experiments._baseline.measure import VARY
from interp_tasks.measurement.baselines.comparison import no_tokens
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Baseline(ComparisonCommand):
    """Compare models with methods that are not trained, such as completions of least nuclear norm.

    With --ckpt over a group of variations of the task, such as the share of hidden entries. With --task alone the
    methods are tried by themselves: --task matrix-completion is 7×7 of rank 2.
    """

    name: ClassVar[str] = "baseline"

    ckpt: Annotated[
        list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP, show_default="none, with --task")
    ] = field(default_factory=list)
    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            metavar="NAME",
            help="One that the task declares; repeat.",
            show_default="the first; without --ckpt all",
        ),
    ] = field(default_factory=list)
    vary: Annotated[
        str, typer.Option("--vary", metavar="GROUP", help="Variations of the task to go through.")
    ] = VARY
    variant: Annotated[
        list[str],
        typer.Option("--variant", metavar="NAME", help="Only this of them; repeat.", show_default="all"),
    ] = field(default_factory=list)

    def check(self) -> None:
        no_tokens(self.common(None), self.name)
        if self.alone and (self.variant or self.vary != VARY):
            raise UserError(
                "--vary and --variant go with --ckpt: without one use --set, as in --set task.p_mask=0.5"
            )
        super().check()

    @property
    def alone(self) -> bool:
        return self.task is not None and not self.ckpt

    @property
    def reads_checkpoints(self) -> bool:
        return not self.alone

    def measure(self, progress: Progress | None) -> Result:
        return baseline(
            [] if self.alone else self.examined,
            self.method,
            self.vary,
            self.variant,
            self.alone,
            **self.common(progress),
        )
