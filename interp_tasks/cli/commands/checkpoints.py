"""``interp-run runs checkpoints``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from interp_tasks.checkpoints import describe_run, resolve
from interp_tasks.cli.base import Command
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.rows import print_rows
from interp_tasks.cli.runs_command import RUNS_HELP
from interp_tasks.cli.streams import write_line
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.run_logs import check_run_name


@dataclass(kw_only=True)
class Checkpoints(Command):
    """List the checkpoints of a run, and where its drop lies."""

    ckpt: Annotated[list[str], typer.Option("--ckpt", metavar="RUN", help=RUNS_HELP)]
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        for run in self.ckpt:
            check_run_name(run)

    def execute(self) -> None:
        """Prints the stored checkpoints of each run, with their marks and metrics."""
        checkpoints = [each for run in self.ckpt for each in resolve(f"{run}@all")]
        runs = {each.run_name: each.run_path for each in checkpoints if each.run_path is not None}
        rows = [
            {"run": name, "ref": f"{name}@{row['step']}", **row}
            for name, path in runs.items()
            for row in describe_run(path)
        ]
        if self.format != "table":
            print_rows([{**row, "metrics": row["metrics"] or {}} for row in rows], self.format, [])
            return
        for place, name in enumerate(runs):
            if place:
                write_line("")
            of_run = [row for row in rows if row["run"] == name]
            metrics = [whole(row["metrics"] or {}) for row in of_run]
            names = list(dict.fromkeys(metric for each in metrics for metric in each))
            listed = [
                {**dict.fromkeys(names), **each, "checkpoint": f"@{row['step']}", "marks": row["marks"]}
                for row, each in zip(of_run, metrics, strict=True)
            ]
            print_rows(listed, "table", ["checkpoint", "marks", *names], [str(name), str(of_run[0]["task"])])


def whole(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of all answers together: ``accuracy`` without ``accuracy_2``, ``accuracy_3`` and so on."""
    return {name: value for name, value in metrics.items() if name.rpartition("_")[0] not in metrics}
