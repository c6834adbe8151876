"""Defines the options of all commands that train: the task, its preset, settings, the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from interp_tasks.cli.base import Command
from interp_tasks.devices import check_written_device
from interp_tasks.files import check_file
from interp_tasks.settings import import_file, read_settings


@dataclass(kw_only=True)
class RecipeCommand(Command):
    """Trains a task's model, by a preset and what overrides it."""

    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")]
    preset: Annotated[str, typer.Option("--preset", help="cpu, reference or paper.")] = "cpu"
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="As in train.steps=1000, task.n=5, model.d_model=64. Repeat."
        ),
    ] = field(default_factory=list)
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"
    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None

    def check_recipe(self) -> dict[str, str]:
        """Returns the settings given, once device and file are checked."""
        check_written_device(self.device)
        if self.import_path is not None:
            check_file(self.import_path, "--import")
        return read_settings(self.settings)

    def import_tasks(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)
