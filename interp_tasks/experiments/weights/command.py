"""``interp-run modular weights``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, weights
from interp_tasks.experiments.weights.measure import check_control
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Weights(ExperimentCommand):
    """See embeddings as tables: similar positions, singular values and vectors, frequencies over the digits.

    Beside each number stands that of untrained models. With --plot also a map of every weight.
    """

    name: ClassVar[str] = "weights"

    control: Annotated[
        list[str],
        typer.Option(
            "--control",
            metavar="REF",
            help="A model to compare with, such as one of shuffled answers. Repeat.",
        ),
    ] = field(default_factory=list)
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with untrained models.")
    ] = True
    every: Annotated[bool, typer.Option("--every", help="A row for every frequency.")] = False

    def check(self) -> None:
        if self.tokens is not None:
            raise UserError("weights needs a task that says what its tokens stand for: leave --tokens out")
        super().check()
        check_control(self.ckpt, self.control, self.examples())

    def measure(self, progress: Progress | None) -> Result:
        return weights(
            self.ckpt,
            self.control,
            untrained=self.untrained,
            every=self.every,
            **self.common(progress),
        )
