"""The options of commands that edit attention heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.measurement.head_edits import HeadEdit
from interp_tasks.measurement.options import MODES

HEADS_HELP = "all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows."
Queries = Annotated[
    str,
    typer.Option(
        "--queries",
        "--positions",
        metavar="WHERE",
        help="Edit at: all, hidden, observed, or positions such as 0,3.",
    ),
]


@dataclass(kw_only=True)
class HeadCommand(ComparisonCommand):
    """Does one and the same thing to heads."""

    mode: Annotated[str, typer.Option("--mode", help=", ".join(MODES) + ".")] = "uniform"
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only."),
    ] = None
    queries: Queries = "all"

    def check(self) -> None:
        HeadEdit.read(self.mode, self.keys, self.queries)
        super().check()
