"""The options of every command that examines checkpoints. An experiment adds its own, and ``measure``."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from interp_tasks.cli.declaring import Command
from interp_tasks.cli.output import FORMATS, check_targets, emit
from interp_tasks.cli.progress import progress_line
from interp_tasks.cli.settings import import_file, read_settings
from interp_tasks.errors import UserError
from interp_tasks.experiments.specifications import check_choice
from interp_tasks.experiments.subjects import Examples, Options, Progress, check_refs

if TYPE_CHECKING:
    from interp_tasks.experiments import Result

DEVICE = re.compile(r"cpu|(cuda|mps)(:\d+)?", re.ASCII)
REF_HELP = (
    "Checkpoint: RUN@4000, RUN@last, @all, @0:20000:2000 (end included), @pre, @onset, @end, @post, "
    "zoo:NAME@..., or a checkpoint folder. Repeat for several."
)


def check_device(device: str) -> None:
    """Refuse what cannot be the name of a device; whether it is there, torch says.

    Raises:
        UserError: in one line.
    """
    if not DEVICE.fullmatch(device):
        raise UserError(f"--device {device!r}: write cpu, cuda, cuda:1 or mps")


@dataclass(kw_only=True)
class ExperimentCommand(Command):
    """Loads checkpoints, measures, prints one tidy table."""

    name: ClassVar[str]

    ckpt: Annotated[list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP)] = field(
        default_factory=list
    )
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
        check_device(self.device)
        examples = self.examples()
        if self.task is not None and self.import_path is None:
            check_task_name(self.task)
        if self.tokens is not None and not self.tokens.is_file():
            raise UserError(f"--tokens {self.tokens}: no such file")
        if self.import_path is not None and not self.import_path.is_file():
            raise UserError(f"--import {self.import_path}: no such file")
        check_targets(self.name, self.out, self.plot)
        if self.reads_checkpoints:
            check_refs(self.ckpt, examples)

    def execute(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)
        with progress_line(self.quiet) as progress:
            result = self.measure(progress)
        emit(result, self.format, self.out, self.plot, self.quiet)

    @property
    def reads_checkpoints(self) -> bool:
        return True

    @abstractmethod
    def measure(self, progress: Progress | None) -> Result:
        """Run the experiment."""

    def examples(self) -> Examples:
        """Which examples are asked for, checked."""
        examples = Examples.of(self.common(None))
        examples.check()
        return examples

    def common(self, progress: Progress | None) -> Options:
        """The shared options as an experiment's function takes them."""
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


def task_config(task: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """A task's own settings as ``--set`` gives them."""
    if not settings:
        return {}
    from interp_tasks.training.config import list_keys, typed
    from tasks import catalog

    # A task that --import brings is not known yet when the options are checked.
    lists = list_keys(task) if task in catalog.names() else frozenset()
    config = {}
    for key, value in read_settings(settings).items():
        section, _, name = key.rpartition(".")
        if section not in ("", "task"):
            raise UserError(f"--set {key}: here it sets the task's own settings, such as task.n=4")
        config[name] = typed(value, is_list=f"task.{name}" in lists)
    return config


def check_task_name(name: str) -> None:
    """Refuse an unknown task without importing any."""
    from tasks import catalog

    if name not in catalog.names():
        raise UserError(catalog.unknown(name))
