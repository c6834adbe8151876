"""The options of every command that examines checkpoints: which examples; an experiment adds its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.cli.result_command import PrintingCommand, ResultCommand
from interp_tasks.devices import check_written_device
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import EXPERIMENTS
from interp_tasks.measurement.options import unknown
from interp_tasks.measurement.subjects import (
    Examples,
    Options,
    Progress,
    References,
    resolve_refs,
)
from interp_tasks.settings import check_task_name, task_config

if TYPE_CHECKING:
    from tasks import Task

REF_HELP = (
    "Checkpoint: RUN@4000, RUN@last, @all, @0:20000:2000 (end included), @pre, @onset, @end, @post, "
    "zoo:NAME@..., or a checkpoint folder. Repeat for several."
)


@dataclass(kw_only=True)
class ExamplesCommand(PrintingCommand):
    """Runs models on examples of a task, or on tokens."""

    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Examples; every row with --tokens.", show_default="256"),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Draws the examples, resamples and intervals.")] = 0
    split: Annotated[
        str | None, typer.Option("--split", help="train, validation or test.", show_default="test")
    ] = None
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Task, for a checkpoint that names none.")
    ] = None
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of --task, as in task.n=4. Repeatable."),
    ] = field(default_factory=list)
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE.npy", help="Run on these tokens, an int array (batch, pos)."),
    ] = None

    def check(self) -> None:
        check_written_device(self.device)
        self.examples()
        if self.task is not None and self.import_path is None:
            check_task_name(self.task)
        if self.tokens is not None:
            check_file(self.tokens, "--tokens")
        super().check()

    def examples(self) -> Examples:
        """Checks and returns the examples that the options choose."""
        examples = Examples.of(self.common(None))
        examples.check()
        return examples

    def common(self, progress: Progress | None) -> Options:
        """Returns the shared options as an experiment's function takes them."""
        return {
            "progress": progress,
            "samples": self.samples,
            "seed": self.seed,
            "split": self.split,
            "task": self.task,
            "task_config": self.task_config(),
            "tokens": self.tokens,
            "device": self.device,
        }

    def task_config(self) -> dict[str, Any]:
        return task_config(self.task, self.settings)


@dataclass(kw_only=True)
class ExperimentCommand(ExamplesCommand, ResultCommand):
    """Loads checkpoints, measures, prints one tidy table."""

    ckpt: Annotated[list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP)]

    def check(self) -> None:
        super().check()
        if self.reads_checkpoints:
            _ = self.examined

    @cached_property
    def examined(self) -> References:
        """Returns the checkpoints that ``--ckpt`` names, resolved once."""
        return resolve_refs(self.ckpt, self.examples())

    @property
    def tasks(self) -> Mapping[str, str]:
        if self.task is not None:
            return {"--task": self.task}
        if not self.reads_checkpoints or self.tokens is not None:
            return {}
        return {each.label: read_meta(each.resolved.path)["task"]["name"] for each in self.examined.named}

    @property
    def reads_checkpoints(self) -> bool:
        return True


@dataclass(kw_only=True)
class ComparisonCommand(ExperimentCommand):
    """Compares metrics of a task, of which people see one."""

    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Rows of this metric, or all.",
            show_default="the task's own; in json, csv and files all",
        ),
    ] = None

    @property
    def shown_metric(self) -> str | None:
        return self.metric

    def check_tasks(self) -> None:
        super().check_tasks()
        if self.metric is None or self.metric == "all" or self.tokens is not None:
            return
        names_of = EXPERIMENTS[self.name].metrics
        if names_of is None:
            return
        from interp_tasks.measurement.table import plain_metric

        each = [names_of(task) for task in self.examined_tasks()]
        names = list(dict.fromkeys(name for some in each for name in some))
        # A task of the user's own need not say what its metrics are called.
        if all(each) and plain_metric(self.metric) not in names:
            raise unknown("--metric", self.metric, names, "metrics")

    def examined_tasks(self) -> list[Task]:
        """Returns the tasks whose metrics are measured, made without their models."""
        from interp_tasks.measurement.subjects import tasks_of

        named = self.examined.named if self.reads_checkpoints else ()
        return tasks_of(named, self.examples())
