"""``interp-run checkpoints`` and ``interp-run tasks``: what there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from interp_tasks.checkpoints import describe_run, resolve
from interp_tasks.cli.declaring import Command
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.rows import print_rows
from interp_tasks.cli.settings import import_file
from interp_tasks.errors import UserError
from interp_tasks.experiments.specifications import check_choice

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
class Tasks(Command):
    """List the tasks there are, with their presets."""

    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None
    format: Annotated[str, FORMAT_OPTION] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)

    def execute(self) -> None:
        from interp_tasks.training.config import presets_of
        from tasks import catalog

        if self.import_path is not None:
            import_file(self.import_path)
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
