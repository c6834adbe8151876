"""What commands that examine whole runs share: the runs, and where the table goes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from interp_tasks.cli.declaring import Command
from interp_tasks.cli.output import FORMATS, check_targets, emit
from interp_tasks.cli.progress import progress_line
from interp_tasks.cli.settings import import_file
from interp_tasks.errors import UserError
from interp_tasks.experiments.runs import find_runs
from interp_tasks.experiments.specifications import check_choice
from interp_tasks.experiments.subjects import Progress

if TYPE_CHECKING:
    from interp_tasks.experiments import Result


@dataclass(kw_only=True)
class RunsCommand(Command):
    """Reads runs, prints one tidy table."""

    name: ClassVar[str]

    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, globs of some, or zoo:NAME.")
    ]
    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write parquet, csv and json files there.")
    ] = None
    plot: Annotated[bool, typer.Option("--plot", help="Write an HTML page with a figure.")] = False

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        if self.import_path is not None and not self.import_path.is_file():
            raise UserError(f"--import {self.import_path}: no such file")
        check_targets(self.name, self.out, self.plot)
        find_runs(self.runs)

    def execute(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)
        with progress_line(self.quiet) as progress:
            result = self.measure(progress)
        emit(result, self.format, self.out, self.plot, self.quiet)

    @abstractmethod
    def measure(self, progress: Progress | None) -> Result:
        """Run the experiment."""
