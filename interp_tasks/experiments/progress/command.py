"""``interp-run modular progress``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, progress
from interp_tasks.experiments.progress.measure import KINDS, USUAL, check_kinds, read_key_rule, read_keys
from interp_tasks.measurement.subjects import Progress as ProgressLine


@dataclass(kw_only=True)
class Progress(ExperimentCommand):
    """See how far a model of modular arithmetic has come: Nanda et al.'s progress measures, for each answer.

    Restricted and excluded loss, cosines in the logits, Gini coefficients, weight norms, W_L and neurons by frequency,
    attention as waves of the digits, losses without attention or MLP; of a run's checkpoints the phases too.
    """

    name: ClassVar[str] = "progress"

    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            metavar="NAME[=NUMBER]",
            help="Which frequencies are key: of W_L by noise, of-largest, above-mean or preferred; of neurons by "
            "clusters.",
        ),
    ] = USUAL
    keys: Annotated[str | None, typer.Option("--keys", metavar="3,24", help="These frequencies instead.")] = (
        None
    )
    answer: Annotated[
        list[str],
        typer.Option(
            "--answer",
            metavar="NAME",
            help="Only this answer of the task, such as mod_7; repeat for several.",
            show_default="all",
        ),
    ] = field(default_factory=list)
    kind: Annotated[
        list[str],
        typer.Option(
            "--kind",
            metavar="NAME",
            help=f"Measure these: {', '.join(KINDS)}; repeat for several.",
            show_default="all",
        ),
    ] = field(default_factory=list)

    def check(self) -> None:
        read_key_rule(self.rule, read_keys(self.keys))
        check_kinds(self.kind)
        if self.tokens is not None:
            raise UserError("progress needs a task: leave --tokens out, or give --task NAME instead")
        super().check()

    def measure(self, progress_line: ProgressLine | None) -> Result:
        return progress(
            self.ckpt,
            rule=self.rule,
            keys=read_keys(self.keys),
            answers=self.answer,
            kinds=self.kind,
            **self.common(progress_line),
        )
