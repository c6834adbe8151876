"""``interp-run runs curve``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.devices import check_written_device
from interp_tasks.experiments import Result, curve
from interp_tasks.measurement.options import check_samples, check_seed
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Curve(RunsCommand):
    """Put plateau, drop and final level of runs beside theory, and exact answers beside errors at stored steps."""

    name: ClassVar[str] = "curve"

    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Test examples at stored steps.", show_default="256"),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Draws the examples and the intervals.")] = 0
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"

    def check(self) -> None:
        check_samples(self.samples)
        check_seed(self.seed)
        check_written_device(self.device)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return curve(self.ckpt, samples=self.samples, seed=self.seed, device=self.device, progress=progress)
