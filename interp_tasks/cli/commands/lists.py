"""``interp-run checkpoints``, ``interp-run tasks`` and ``interp-run schema``: what there is."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

import typer

from interp_tasks.checkpoints import describe_run, resolve
from interp_tasks.cli.base import Command
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.result_command import PrintingCommand
from interp_tasks.cli.rows import print_rows
from interp_tasks.cli.streams import write_data
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice

FORMAT_OPTION = typer.Option("--format", help="table, json or csv, on stdout.")


@dataclass(kw_only=True)
class Checkpoints(Command):
    """List the checkpoints of a run, and where its drop lies."""

    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a glob of some, or zoo:NAME.")]
    format: Annotated[str, FORMAT_OPTION] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        if "@" in self.run:
            raise UserError(
                f"{self.run!r}: name the run alone, {self.run.rpartition('@')[0]}, to list its checkpoints"
            )

    def execute(self) -> None:
        found = resolve(f"{self.run}@all")
        runs = {each.run_name: each.run_path for each in found if each.run_path is not None}
        rows = [
            {"run": name, "ref": f"{name}@{row['step']}", **row}
            for name, path in runs.items()
            for row in describe_run(path)
        ]
        shown = ["ref", "step", "marks", *(["task"] if len(runs) > 1 else []), "metrics"]
        print_rows([{**row, "metrics": row["metrics"] or {}} for row in rows], self.format, shown)


@dataclass(kw_only=True)
class Tasks(PrintingCommand):
    """List the tasks there are, with their presets."""

    def execute(self) -> None:
        from interp_tasks.training.config import presets_of
        from tasks import catalog

        self.import_tasks()
        rows: list[dict[str, Any]] = [
            {
                "task": name,
                "preset": preset,
                "settings": {
                    f"{section}.{key}": value
                    for section, values in sections.items()
                    for key, value in values.items()
                },
            }
            for name in catalog.names()
            for preset, sections in presets_of(name).items()
        ]
        print_rows(rows, self.format, ["task", "preset", "settings"])


@dataclass(kw_only=True)
class Schema(Command):
    """Print the JSON schema of what --format json prints."""

    def check(self) -> None:
        """There is nothing to choose."""

    def execute(self) -> None:
        write_data(resources.files("interp_tasks.cli").joinpath("output.schema.json").read_text("utf-8"))
