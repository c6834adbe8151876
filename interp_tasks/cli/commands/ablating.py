"""``interp-run ablation``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.options import ExperimentCommand
from interp_tasks.experiments import Result, ablation
from interp_tasks.experiments.specifications import (
    MODES,
    check_choice,
    check_heads,
    check_keys,
    check_queries,
)
from interp_tasks.experiments.subjects import Progress


@dataclass(kw_only=True)
class Ablation(ExperimentCommand):
    """Ablate attention heads, and see which metrics move.

    Every number is compared with the unedited model on the same examples. Means and resamples are taken over
    the examples evaluated.
    """

    name: ClassVar[str] = "ablation"

    heads: Annotated[
        list[str],
        typer.Option(
            "--heads",
            metavar="SPEC",
            help="all, each (a row per head), or heads such as 0.1+2.3-5. Repeat for rows.",
        ),
    ] = field(default_factory=lambda: ["all"])
    mode: Annotated[str, typer.Option("--mode", help=", ".join(MODES) + ".")] = "uniform"
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only."),
    ] = None
    queries: Annotated[
        str,
        typer.Option(
            "--queries", metavar="WHERE", help="Edit at: all, hidden, observed, or positions such as 0,3."
        ),
    ] = "all"

    def check(self) -> None:
        for spec in self.heads:
            check_heads(spec)
        check_choice("--mode", self.mode, MODES)
        check_keys(self.keys, self.mode)
        check_queries(self.queries)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return ablation(
            self.ckpt, self.heads, self.mode, self.keys, self.queries, progress=progress, **self.common()
        )
