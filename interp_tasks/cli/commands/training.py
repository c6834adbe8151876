"""``interp-run train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints import resolve
from interp_tasks.cli.declaring import Command
from interp_tasks.cli.options import DEVICE
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.rows import plain
from interp_tasks.cli.settings import import_file, read_seeds, read_settings
from interp_tasks.errors import UserError
from interp_tasks.reporting import check_writable_folder
from interp_tasks.training.config import Resolved, resolve_config

if TYPE_CHECKING:
    from interp_tasks.experiments.subjects import Progress


@dataclass(kw_only=True)
class Train(Command):
    """Train a task's model into a run folder.

    The same command resumes a run that was stopped; a larger train.steps extends one. What each preset sets:
    interp-run tasks. What --set can set besides, with the defaults: docs/training.md; a key that does not exist
    (--set train.help=) is answered with all that do.
    """

    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")]
    preset: Annotated[str, typer.Option("--preset", help="cpu, reference or paper.")] = "cpu"
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="As in train.steps=1000, task.n=5, model.d_model=64. Repeat."
        ),
    ] = field(default_factory=list)
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Run folder.", show_default="runs/TASK-PRESET")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0:8", help="A run each (end excluded), in RUN/seed-0, ..."),
    ] = None
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"
    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None

    def check(self) -> None:
        settings, seeds = read_settings(self.settings), read_seeds(self.seeds)
        if seeds is not None and "train.seed" in settings:
            raise UserError("give --seeds or --set train.seed=..., not both")
        if not DEVICE.fullmatch(self.device):
            raise UserError(f"--device {self.device!r}: write cpu, cuda, cuda:1 or mps")
        if self.import_path is None:
            start = resolve_config(self.task, self.preset, settings).train.start_from
            if start is not None:
                resolve(start)
        elif not self.import_path.is_file():
            raise UserError(f"--import {self.import_path}: no such file")
        check_writable_folder(self.folder())

    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.task}-{self.preset}"

    def execute(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)
        resolved = resolve_config(self.task, self.preset, read_settings(self.settings))
        seeds = read_seeds(self.seeds)
        if seeds is None:
            self.train_one(resolved, self.folder(), resolved.train.seed)
        for seed in seeds or []:
            self.train_one(resolved, self.folder() / f"seed-{seed}", seed)

    def train_one(self, resolved: Resolved, out: Path, seed: int) -> None:
        from interp_tasks.checkpoints import read_metrics, stored_steps
        from interp_tasks.training.trainer import train
        from tasks import get

        done = stored_steps(out)
        with progress_line(self.quiet) as progress:
            train(
                get(resolved.task_name, **resolved.task),
                out=out,
                preset=resolved.preset,
                settings=resolved.model,
                config=resolved.train.model_copy(update={"seed": seed}),
                device=self.device,
                progress=None if progress is None else shown(progress, out),
            )
        if done:
            note(f"{out}: went on from step {done[-1]}", self.quiet)
        last = read_metrics(out)[-1]
        print(f"{out}@last  step {last['step']}  {plain(last.get('validation', {}))}")


def shown(progress: Progress, out: Path) -> Any:
    """The trainer's callback as a progress line."""

    def show(step: int, steps: int, line: Mapping[str, Any]) -> None:
        progress(step, steps, f"{plain(line.get('validation', {}))}  {out}")

    return show
