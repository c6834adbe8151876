"""``interp-run reproduce``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.cli.declaring import Command
from interp_tasks.cli.options import check_device
from interp_tasks.cli.output import FORMATS, write_and_show
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.rows import plain
from interp_tasks.cli.streams import write_data
from interp_tasks.cli.tables import console
from interp_tasks.errors import UserError
from interp_tasks.experiments.specifications import check_choice
from interp_tasks.published import papers
from interp_tasks.reporting import check_writable_folder
from interp_tasks.reproducing import Reproduction, reproduce, train_missing
from interp_tasks.reproducing.reproduction import check
from interp_tasks.texts import one_line

if TYPE_CHECKING:
    from interp_tasks.experiments.subjects import Progress


@dataclass(kw_only=True)
class Reproduce(Command):
    """A paper's experiments on the runs that are there: published numbers beside ours, a verdict on every claim.

    Reads the shipped runs, and runs of --runs. What has not been trained is listed with its command and an estimate
    of its hours, or trained with --train, which goes on where it was interrupted. Writes tables and one page.
    """

    paper: Annotated[str, typer.Argument(metavar="PAPER", help="A paper: " + ", ".join(papers()) + ".")]
    preset: Annotated[str, typer.Option("--preset", help="Scale: cpu, reference or paper.")] = "cpu"
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="5,6", help="Only these experiments of the paper.")
    ] = None
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where runs are, or are trained.")] = (
        Path("runs")
    )
    train: Annotated[bool, typer.Option("--train", help="Train what is missing first.")] = False
    device: Annotated[str, typer.Option("--device", help="Where to train: cpu, cuda, ...")] = "cpu"
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Experiments at a time.", show_default="2, or 1 on one core"
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Tables and page.", show_default="results/PAPER-PRESET"),
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        check_device(self.device)
        if self.jobs is not None and not 1 <= self.jobs <= 256:
            raise UserError(f"--jobs {self.jobs}: from 1 to 256 experiments at a time")
        if self.runs.exists() and not self.runs.is_dir():
            raise UserError(f"--runs {self.runs} is not a folder: name the one that holds runs, or will")
        chosen = self.chosen()
        check_writable_folder(self.folder())
        if self.train:
            check_writable_folder(self.runs)
        check(self.paper, self.preset, self.runs, chosen)

    def chosen(self) -> tuple[int, ...]:
        if self.rows is None:
            return ()
        parts = [part.strip() for part in self.rows.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise UserError(f"--rows {self.rows!r}: write numbers of experiments, such as 5,6")
        return tuple(dict.fromkeys(map(int, parts)))

    def folder(self) -> Path:
        return self.out or Path("results") / f"{self.paper}-{self.preset}"

    def execute(self) -> None:
        if self.train:
            with progress_line(self.quiet) as progress:
                train_missing(
                    self.paper,
                    self.preset,
                    runs=self.runs,
                    rows=self.chosen(),
                    device=self.device,
                    progress=None if progress is None else trainer_progress(progress),
                )
        with progress_line(self.quiet) as progress:
            found = reproduce(
                self.paper,
                self.preset,
                runs=self.runs,
                rows=self.chosen(),
                processes=self.jobs or min(2, os.cpu_count() or 1),
                progress=progress,
            )
        write_and_show(lambda: found.write(self.folder()), lambda: self.show(found), self.quiet)
        for line in found.crashed:
            note(one_line(line), quiet=False)
        if found.crashed:
            raise UserError(
                f"{len(found.crashed)} of it could not be measured: see above; the rest is written"
            )

    def show(self, found: Reproduction) -> None:
        if self.format == "json":
            write_data(found.to_json())
        elif self.format == "csv":
            write_data(found.to_csv())
        else:
            print_claims(found)


def trainer_progress(progress: Progress) -> Any:
    """For each run, the trainer's callback as a progress line."""

    def of_run(name: str) -> Any:
        return lambda step, steps, line: progress(step, steps, f"{plain(line.get('validation', {}))}  {name}")

    return of_run


def print_claims(found: Reproduction) -> None:
    """A table of claims, then what is missing."""
    from rich.table import Table

    from interp_tasks.reproducing.presenting import ours, shown_frame, summary

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for header, settings in (
        ("row", {"no_wrap": True}),
        ("claim", {"ratio": 4}),
        ("published", {"ratio": 2}),
        ("run", {"ratio": 2, "overflow": "fold"}),
        ("ours [95% CI]", {"ratio": 2}),
        ("verdict", {"ratio": 1, "min_width": 8}),
    ):
        table.add_column(header, **settings)
    rows: list[Any] = shown_frame(found).to_dict("records")
    for row in rows:
        runs = f"{row['run']} ({row['n_runs']} runs)" if row["n_runs"] > 1 else str(row["run"])
        table.add_row(row["row"], row["says"], row["published"], runs, ours(row), row["verdict"])
    out.print(table)
    out.print()
    remarks = [row for row in rows if row["verdict"] in ("held", "failed") and row["reason"]]
    for row in remarks:
        out.print(f"{row['claim']} ({row['run']}) {row['verdict']}: {row['reason']}.")
    if remarks:
        out.print()
    out.print(summary(found))
    if found.missing:
        hours = sum(each.run.hours for each in found.missing)
        out.print(f"Not trained: {len(found.missing)} run(s), {hours:.1f} h in all; --train trains them.")
    for each in found.missing:
        out.print(f"{each.run.hours:g} h: {each.run.command(found.folder)}", style="dim")
