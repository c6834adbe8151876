"""``interp-run modular prime-order``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.experiments import Result, prime_order
from interp_tasks.experiments.prime_order.measure import LEVEL, check_level
from interp_tasks.measurement.options import check_seed
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class PrimeOrder(RunsCommand):
    """See what the order in which primes generalise follows: q, whether q divides p − 1, or p mod q.

    Give runs of several p: of one p the primes differ in all of these at once.
    """

    name: ClassVar[str] = "prime-order"

    level: Annotated[float, typer.Option("--level", help="Of an accuracy, above 0, at most 1.")] = LEVEL
    seed: Annotated[int, typer.Option("--seed", help="Draws the permutations.")] = 0

    def check(self) -> None:
        check_level(self.level)
        check_seed(self.seed)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return prime_order(self.ckpt, self.level, self.seed)
