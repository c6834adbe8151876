"""``interp-run patch``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.cli.head_command import HEADS_HELP, Queries
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, patch
from interp_tasks.experiments.patch.measure import check_sites, check_source
from interp_tasks.measurement.head_classes import NO_CLASSES
from interp_tasks.measurement.head_edits import read_specs
from interp_tasks.measurement.options import check_queries
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Patch(ComparisonCommand):
    """Put activations from a source into a run, and see which metrics move.

    The source is another checkpoint on the same examples, another example (resample), or an input that the
    task declares (negated, for matrix completion). Metrics marked (source) judge the same output by the targets
    of the source.
    """

    name: ClassVar[str] = "patch"

    source: Annotated[
        str, typer.Option("--source", metavar="SOURCE", help="REF, resample, or a name of the task's.")
    ]
    site: Annotated[
        list[str],
        typer.Option("--site", metavar="SITE", help="z, z.1 (layer 1), resid_pre.1, ... Repeat for rows."),
    ] = field(default_factory=lambda: ["z"])
    heads: Annotated[
        list[str],
        typer.Option("--heads", metavar="SPEC", help=HEADS_HELP, show_default="all, where there are heads"),
    ] = field(default_factory=list)
    queries: Queries = "all"
    by_class: Annotated[
        bool, typer.Option("--by-class", help="A row more for each class of heads, by what they attend to.")
    ] = False

    def check(self) -> None:
        check_sites(self.site, bool(self.heads))
        read_specs(self.heads or "all")
        check_queries(self.queries)
        if self.by_class and self.tokens is not None:
            raise UserError(NO_CLASSES)
        super().check()
        check_source(self.source, self.ckpt, self.examples())

    def measure(self, progress: Progress | None) -> Result:
        return patch(
            self.ckpt,
            self.source,
            self.site,
            self.heads or None,
            self.queries,
            self.by_class,
            **self.common(progress),
        )
