"""``interp-run probe``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.experiments import Result, probe
from interp_tasks.measurement.probes import SAMPLES, ProbeSettings
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Probe(ExperimentCommand):
    """Fit linear probes from activations to what the task declares, and score them on other examples.

    Beside each stands the same probe on shuffled targets, and on an untrained model.
    """

    name: ClassVar[str] = "probe"

    site: Annotated[
        list[str], typer.Option("--site", metavar="SITE", help="resid_post, z.1, ...; repeat for several.")
    ] = field(default_factory=lambda: ["resid_post"])
    target: Annotated[
        list[str],
        typer.Option("--target", metavar="NAME", help="One that the task declares; repeat. Default: all."),
    ] = field(default_factory=list)
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="SPEC", help="These heads one by one, or all.")
    ] = None
    positions: Annotated[
        str | None, typer.Option("--positions", metavar="0,2", help="Look there, not where the task says.")
    ] = None
    each_position: Annotated[
        bool, typer.Option("--each-position", help="A probe for each position, not one for all.")
    ] = False
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit an intercept.")] = False
    ridge: Annotated[
        str | None,
        typer.Option("--ridge", metavar="0.1,1,10", help="Penalty; of several the best by cross-validation."),
    ] = None
    folds: Annotated[int, typer.Option("--folds", help="Folds of examples, for choosing a penalty.")] = 5
    held_out: Annotated[
        float, typer.Option("--held-out", help="Fraction, or number, of examples to score on.")
    ] = 0.25
    shuffles: Annotated[int, typer.Option("--shuffles", help="How often targets are shuffled.")] = 1
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")
    ] = True
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", help="Examples.", show_default=str(SAMPLES))
    ] = None

    def check(self) -> None:
        ProbeSettings.read(**self.asked())
        super().check()

    def asked(self) -> dict[str, Any]:
        return {
            "sites": self.site,
            "targets": self.target,
            "heads": self.heads,
            "positions": self.positions,
            "each_position": self.each_position,
            "intercept": self.intercept,
            "ridge": self.ridge,
            "folds": self.folds,
            "held_out": self.held_out,
            "shuffles": self.shuffles,
            "untrained": self.untrained,
        }

    def measure(self, progress: Progress | None) -> Result:
        return probe(self.ckpt, **self.asked(), **self.common(progress))
