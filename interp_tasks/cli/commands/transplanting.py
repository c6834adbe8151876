"""``interp-run transplant``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.options import ExperimentCommand
from interp_tasks.experiments import Result, transplant
from interp_tasks.experiments.donors import check_donor
from interp_tasks.experiments.specifications import COMPONENTS, check_components, check_layers
from interp_tasks.experiments.subjects import Progress


@dataclass(kw_only=True)
class Transplant(ExperimentCommand):
    """Give a model some weights of another checkpoint, and see which metrics move.

    Weights go from --source to each --ckpt, with their biases; every parameter that moved is listed in the
    configuration that --out and --plot write.
    """

    name: ClassVar[str] = "transplant"

    source: Annotated[
        str, typer.Option("--source", metavar="REF", help="The one checkpoint that lends its weights.")
    ] = ""
    components: Annotated[
        list[str],
        typer.Option(
            "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp. Repeat for rows."
        ),
    ] = field(default_factory=lambda: ["qkv"])
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all")
    ] = None

    def check(self) -> None:
        check_layers(self.layers, [check_components(spec) for spec in self.components])
        super().check()
        check_donor(self.source, self.ckpt, self.examples())

    def measure(self, progress: Progress | None) -> Result:
        return transplant(self.ckpt, self.source, self.components, self.layers, **self.common(progress))
