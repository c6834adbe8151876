"""What commands that examine whole runs share: the runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from interp_tasks.cli.result_command import ResultCommand
from interp_tasks.measurement.run_logs import find_runs


@dataclass(kw_only=True)
class RunsCommand(ResultCommand):
    """Reads runs, prints one tidy table."""

    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, globs of some, or zoo:NAME.")
    ]

    def check(self) -> None:
        super().check()
        find_runs(self.runs)
