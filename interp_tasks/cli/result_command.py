"""Defines the options of all commands that print a result: its format, its files, its figures."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from interp_tasks.cli.base import Command
from interp_tasks.cli.output import FORMATS, PICTURES, PLOT_FORMATS, check_targets, emit
from interp_tasks.cli.progress import progress_line
from interp_tasks.files import check_file
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.subjects import Progress
from interp_tasks.settings import import_file

if TYPE_CHECKING:
    from interp_tasks.experiments import Result


@dataclass(kw_only=True)
class PrintingCommand(Command):
    """Prints a table, of tasks that a file of the user's may bring."""

    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        if self.import_path is not None:
            check_file(self.import_path, "--import")

    def import_tasks(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)


@dataclass(kw_only=True)
class ResultCommand(PrintingCommand):
    """Measures something and prints one tidy table."""

    name: ClassVar[str]

    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write parquet, csv and json files there.")
    ] = None
    plot: Annotated[bool, typer.Option("--plot", help="Write an HTML page with a figure.")] = False
    plot_format: Annotated[
        str | None,
        typer.Option(
            "--plot-format", metavar="FORMAT", help="As --plot, as pictures: png or svg.", show_default="html"
        ),
    ] = None

    @property
    def shown_metric(self) -> str | None:
        """Returns the chosen metric."""
        return None

    @property
    def plot_as(self) -> str | None:
        """Returns one of ``PLOT_FORMATS``; ``None`` for no figure."""
        return self.plot_format or ("html" if self.plot else None)

    def check(self) -> None:
        super().check()
        if self.plot_format is not None:
            check_choice("--plot-format", self.plot_format, PLOT_FORMATS)
        check_targets(self.name, self.out, self.plot_as)

    def execute(self) -> None:
        self.import_tasks()
        if self.plot_as in PICTURES:
            # Pictures that nothing here can draw are refused before anything is measured.
            from circuits.figures.export import check_exporter

            check_exporter()
        with progress_line(self.quiet) as progress:
            result = self.measure(progress)
        emit(result, self.format, self.out, self.plot_as, self.quiet, self.shown_metric)

    @abstractmethod
    def measure(self, progress: Progress | None) -> Result:
        """Run the experiment."""
