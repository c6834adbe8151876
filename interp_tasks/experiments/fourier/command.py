"""``interp-run fourier``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.experiments import Result, fourier
from interp_tasks.measurement.key_rules import THRESHOLD, check_threshold, read_rule
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Fourier(ExperimentCommand):
    """Say which frequencies embeddings and neurons are made of, over the task's grid of inputs or of positions.

    Of each tensor: how much of its variance the key frequencies carry, and how many neurons follow each.
    """

    name: ClassVar[str] = "fourier"

    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            metavar="NAME[=NUMBER]",
            help="Which frequencies are key: noise, of-largest, above-mean or preferred; as in above-mean=2.",
        ),
    ] = "noise"
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="A neuron follows what explains more than this share of it."),
    ] = THRESHOLD
    every: Annotated[bool, typer.Option("--every", help="A row for every frequency.")] = False

    def check(self) -> None:
        read_rule(self.rule)
        check_threshold(self.threshold)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return fourier(
            self.ckpt,
            rule=self.rule,
            threshold=self.threshold,
            every=self.every,
            **self.common(progress),
        )
