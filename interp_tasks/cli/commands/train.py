"""``interp-run train``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.run_files import check_no_run
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.rows import plain
from interp_tasks.cli.signals import asked_to_stop
from interp_tasks.cli.streams import write_line
from interp_tasks.cli.training_command import RecipeCommand
from interp_tasks.errors import UserError
from interp_tasks.pages import check_writable_folder
from interp_tasks.settings import read_seeds, read_settings
from interp_tasks.training.launch import launched

if TYPE_CHECKING:
    from interp_tasks.measurement.subjects import Progress
    from interp_tasks.training.config import Resolved


@dataclass(kw_only=True)
class Train(RecipeCommand):
    """Train a task's model into a run folder.

    The same command resumes a run that was stopped; a larger train.steps extends one. What each preset sets:
    interp-run tasks. What --set can set besides, with the defaults: docs/training.md; a key that does not exist is
    answered with the closest that does.
    """

    takes_processes: ClassVar[bool] = True

    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Run folder.", show_default="runs/TASK-PRESET")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0:8", help="A run each (end excluded), in RUN/seed-0, ..."),
    ] = None
    stacked: Annotated[
        bool,
        typer.Option("--stacked", help="Train the seeds as one, in larger operations; for small models."),
    ] = False

    def check(self) -> None:
        """Refuses options that do not go together, a start_from that is not there, and a folder in use."""
        settings, seeds = self.check_recipe(), read_seeds(self.seeds)
        launched().device(self.device)
        if seeds is not None and "train.seed" in settings:
            raise UserError("give --seeds or --set train.seed=..., not both")
        if self.stacked and launched().count > 1:
            raise UserError("--stacked trains in one process: leave out torchrun, or --stacked")
        if self.stacked and seeds is None:
            raise UserError("--stacked trains several seeds as one: give --seeds 0:8 with it")
        if self.import_path is None:
            from interp_tasks.training.config import resolve_config

            start = resolve_config(self.task, self.preset, settings).train.start_from
            if start is not None:
                resolve(start)
        if seeds is not None:
            check_no_run(self.folder())
        check_writable_folder(self.folder())

    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.task}-{self.preset}"

    def execute(self) -> None:
        from interp_tasks.training.config import resolve_config

        self.import_tasks()
        resolved = resolve_config(self.task, self.preset, read_settings(self.settings))
        seeds = read_seeds(self.seeds)
        import interp_tasks.training.trainer  # noqa: F401  (while it is imported, Ctrl-C has nothing to store)

        with asked_to_stop() as stop:
            if seeds is not None and self.stacked:
                self.train_stacked(resolved, seeds, stop)
                return
            if seeds is None:
                self.train_one(resolved, self.folder(), resolved.train.seed, stop)
            for seed in seeds or []:
                self.train_one(resolved, self.folder() / f"seed-{seed}", seed, stop)

    def train_one(self, resolved: Resolved, out: Path, seed: int, stop: Callable[[], bool]) -> None:
        from interp_tasks.training.trainer import train_resolved

        follows = launched().rank > 0
        before = None if follows else goes_on_from(out)
        with progress_line(self.quiet or follows) as progress:
            line = None if progress is None else shown(progress, out)
            train_resolved(resolved, out, seed=seed, device=self.device, progress=line, stop=stop)
        if not follows:
            self.say(out, before)

    def train_stacked(self, resolved: Resolved, seeds: list[int], stop: Callable[[], bool]) -> None:
        """Trains several seeds in one process, and says where each run is."""
        from interp_tasks.training.stacked import train_stacked
        from tasks import get

        before = [goes_on_from(self.folder() / f"seed-{seed}") for seed in seeds]
        with progress_line(self.quiet) as progress:
            runs = train_stacked(
                get(resolved.task_name, **resolved.task),
                out=self.folder(),
                seeds=seeds,
                preset=resolved.preset,
                settings=resolved.model,
                config=resolved.train,
                device=self.device,
                progress=None if progress is None else shown(progress, self.folder()),
                stop=stop,
            )
        for run, step in zip(runs, before, strict=True):
            self.say(run, step)

    def say(self, out: Path, before: int | None) -> None:
        from interp_tasks.checkpoints import read_metrics

        if before is not None:
            note(f"{out}: went on from step {before}", self.quiet)
        last = read_metrics(out)[-1]
        write_line(f"{out}@last  step {last['step']}  {plain(last.get('validation', {}))}")


def goes_on_from(run: Path) -> int | None:
    """Returns the step that training will go on from; None of a run that has stored nothing yet."""
    from interp_tasks.checkpoints.meta import reached
    from interp_tasks.checkpoints.run_folder import resumable

    return None if reached(run) is None else next(resumable(run), None)


def shown(progress: Progress, out: Path) -> Any:
    """Returns the trainer's callback as a progress line."""

    def show(step: int, steps: int, line: Mapping[str, Any]) -> None:
        run = out / f"seed-{line['seed']}" if "seed" in line else out
        progress(step, steps, f"{plain(line.get('validation', {}))}  {run}")

    return show
