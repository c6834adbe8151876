"""``interp-run modular neurons``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, neurons
from interp_tasks.experiments.fourier.measure import THRESHOLD, check_threshold
from interp_tasks.experiments.neurons.measure import check_draws, read_neurons, read_site
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Neurons(ExperimentCommand):
    """See neurons, or heads' attention to each digit, as images over all inputs, with what explains their variance.

    Clusters by frequency, variance explained, active frequencies; over three checkpoints of a run or more also the
    published count of active frequencies.
    """

    name: ClassVar[str] = "neurons"

    neurons: Annotated[
        str, typer.Option("--neurons", metavar="N,N", help="Draw these, counted from 0; heads are all drawn.")
    ] = "0,1,2"
    site: Annotated[
        str,
        typer.Option(
            "--site",
            metavar="SITE[.LAYER]",
            help="mlp_pre, mlp_post, mlp_out, or pattern: attention from where the task reads to each digit.",
        ),
    ] = "mlp_post"
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="A cluster's frequency explains more than this share of a neuron."),
    ] = THRESHOLD
    draws: Annotated[
        int,
        typer.Option("--draws", help="Relabellings of the digits that active frequencies are held against."),
    ] = 19

    def check(self) -> None:
        read_neurons(self.neurons)
        read_site(self.site)
        check_threshold(self.threshold)
        check_draws(self.draws)
        if self.tokens is not None:
            raise UserError(
                "neurons needs a task with a grid of inputs: leave --tokens out, or give --task NAME instead"
            )
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return neurons(
            self.ckpt,
            read_neurons(self.neurons),
            self.site,
            threshold=self.threshold,
            draws=self.draws,
            **self.common(progress),
        )
