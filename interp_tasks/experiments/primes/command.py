"""``interp-run modular primes``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, primes
from interp_tasks.experiments.primes.measure import DRAWS, SAMPLES
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Primes(ExperimentCommand):
    """Say which parts of a model belong to which modular answer, and how far answers share them.

    Shares of the variance of embeddings, attention and MLP; every answer judged with each one taken away. Controls:
    shuffled digits, other linear forms, as much taken away at random.
    """

    name: ClassVar[str] = "primes"

    draws: Annotated[
        int, typer.Option("--draws", metavar="N", help="Shuffles of the digits for controls.")
    ] = DRAWS
    ablate: Annotated[
        bool, typer.Option("--ablate/--no-ablate", help="Take each answer away, and judge the others.")
    ] = True
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Examples to judge by.", show_default=str(SAMPLES)),
    ] = None

    def check(self) -> None:
        check_draws(self.draws)
        if self.tokens is not None:
            raise UserError("primes needs a task: leave --tokens out, or give --task NAME instead")
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return primes(self.ckpt, draws=self.draws, ablate=self.ablate, **self.common(progress))
