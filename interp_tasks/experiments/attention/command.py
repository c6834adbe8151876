"""``interp-run attention``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.experiments import Result, attention
from interp_tasks.experiments.attention.measure import check_threshold
from interp_tasks.measurement.head_classes import READ, THRESHOLD
from interp_tasks.measurement.options import check_queries
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Attention(ExperimentCommand):
    """See what each attention head attends to: scores against templates, a class per head, mean maps.

    Templates are the task's (row, column, identity, ... of a matrix), or identity, previous and first. A score is
    the share of attention on the template's keys, beside that of uniform attention. Where the task says how, also
    how far attention moves when only the mask changes, or only the values, and whether it follows a column that moves.
    Of three checkpoints or more the table counts heads by class.
    """

    name: ClassVar[str] = "attention"

    template: Annotated[
        list[str],
        typer.Option(
            "--template", metavar="NAME", help="Score this template; repeat for several.", show_default="all"
        ),
    ] = field(default_factory=list)
    queries: Annotated[
        str,
        typer.Option(
            "--queries",
            "--positions",
            metavar="WHERE",
            help="Score: read (the positions the task reads), all, hidden, observed, or positions such as 0,3.",
        ),
    ] = READ
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="A template fits from this score on, corrected for chance."),
    ] = THRESHOLD

    mask: Annotated[
        str | None,
        typer.Option(
            "--mask", metavar="MASK", help="One for all examples: rows, columns, or ..#.,#...,... ."
        ),
    ] = None

    def check(self) -> None:
        check_queries(self.queries)
        check_threshold(self.threshold)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return attention(
            self.ckpt, self.template, self.queries, self.threshold, self.mask, **self.common(progress)
        )
