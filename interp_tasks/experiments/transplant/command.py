"""``interp-run transplant``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.experiments import Result, transplant
from interp_tasks.measurement.donors import check_donors
from interp_tasks.measurement.options import COMPONENTS, check_components, check_layers
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Transplant(ComparisonCommand):
    """Give a model some weights of another checkpoint, and see which metrics move.

    Weights go from each --source to each --ckpt, with their biases; every parameter that moved is listed in the
    configuration that --out and --plot write. With several sources the figure is a map per component.
    """

    name: ClassVar[str] = "transplant"

    source: Annotated[
        list[str],
        typer.Option(
            "--source", metavar="REF", help="The checkpoint that lends its weights. Repeat for several."
        ),
    ]
    components: Annotated[
        list[str],
        typer.Option(
            "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp; each. Repeat for rows."
        ),
    ] = field(default_factory=lambda: ["qkv"])
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all")
    ] = None

    def check(self) -> None:
        check_layers(self.layers, [check_components(spec) for spec in self.components])
        super().check()
        check_donors(self.source, self.ckpt, self.examples())

    def measure(self, progress: Progress | None) -> Result:
        return transplant(self.ckpt, self.source, self.components, self.layers, **self.common(progress))
