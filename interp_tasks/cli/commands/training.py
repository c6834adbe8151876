"""``interp-run train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints import resolve
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.recipes import RecipeCommand
from interp_tasks.cli.rows import plain
from interp_tasks.cli.settings import read_seeds, read_settings
from interp_tasks.errors import UserError
from interp_tasks.reporting import check_writable_folder
from interp_tasks.training.config import Resolved, resolve_config

if TYPE_CHECKING:
    from interp_tasks.experiments.subjects import Progress


@dataclass(kw_only=True)
class Train(RecipeCommand):
    """Train a task's model into a run folder.

    The same command resumes a run that was stopped; a larger train.steps extends one. What each preset sets:
    interp-run tasks. What --set can set besides, with the defaults: docs/training.md; a key that does not exist
    (--set train.help=) is answered with all that do.
    """

    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Run folder.", show_default="runs/TASK-PRESET")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0:8", help="A run each (end excluded), in RUN/seed-0, ..."),
    ] = None

    def check(self) -> None:
        settings, seeds = self.check_recipe(), read_seeds(self.seeds)
        if seeds is not None and "train.seed" in settings:
            raise UserError("give --seeds or --set train.seed=..., not both")
        if self.import_path is None:
            start = resolve_config(self.task, self.preset, settings).train.start_from
            if start is not None:
                resolve(start)
        check_writable_folder(self.folder())

    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.task}-{self.preset}"

    def execute(self) -> None:
        self.import_tasks()
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
