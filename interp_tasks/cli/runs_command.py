"""Defines the argument of all commands that examine whole runs: the runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from interp_tasks.checkpoints import read_run
from interp_tasks.cli.result_command import ResultCommand
from interp_tasks.measurement.run_logs import find_runs

RUNS_HELP = "A run: its folder, a quoted glob of some, or zoo:NAME. Repeat for several."


@dataclass(kw_only=True)
class RunsCommand(ResultCommand):
    """Reads runs, prints one tidy table."""

    ckpt: Annotated[list[str], typer.Option("--ckpt", metavar="RUN", help=RUNS_HELP)]

    def check(self) -> None:
        super().check()
        find_runs(self.ckpt)

    @property
    def tasks(self) -> Mapping[str, str]:
        tasks = {}
        for name, path in find_runs(self.ckpt).items():
            task = (read_run(path).get("config") or {}).get("task")
            if isinstance(task, dict) and isinstance(task.get("name"), str):
                tasks[name] = task["name"]
        return tasks
