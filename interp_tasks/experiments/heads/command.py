"""``interp-run heads``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.head_command import HeadCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, heads
from interp_tasks.experiments.heads.measure import check_controls
from interp_tasks.measurement.head_classes import NO_CLASSES
from interp_tasks.measurement.options import check_groups
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Heads(HeadCommand):
    """Ablate every head alone, each layer's heads together, all heads, and groups of your own.

    One table; the figure is a map of effects, layer by head, with the groups as points.
    """

    name: ClassVar[str] = "heads"

    groups: Annotated[
        list[str],
        typer.Option(
            "--group", metavar="NAME=HEADS", help="Some heads together, as in copying=0.1+2.3-5. Repeat."
        ),
    ] = field(default_factory=list)
    by_class: Annotated[
        bool,
        typer.Option(
            "--by-class", help="Groups are classes by what heads attend to on other examples; with ratios."
        ),
    ] = False
    least: Annotated[
        int, typer.Option("--least", help="With --by-class: the N heads closest to no template, as a group.")
    ] = 0
    random: Annotated[
        int, typer.Option("--random", help="Beside groups N draws of as many heads at random.")
    ] = 0

    def check(self) -> None:
        check_groups(self.groups)
        check_controls(self.by_class, self.least, self.random)
        if self.by_class and self.tokens is not None:
            raise UserError(NO_CLASSES)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return heads(
            self.ckpt,
            self.mode,
            self.keys,
            self.queries,
            self.groups,
            self.by_class,
            self.least,
            self.random,
            **self.common(progress),
        )
