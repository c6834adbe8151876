"""``interp-run train``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.run_files import check_no_run, check_run_name, read_run
from interp_tasks.cli.options import RecipeOptions
from interp_tasks.cli.tables import plain, training_progress
from interp_tasks.cli.terminal import asked_to_stop, note, progress_line, write_line
from interp_tasks.disk import check_writable_folder
from interp_tasks.errors import UserError
from interp_tasks.settings import parse_seeds, parse_settings

if TYPE_CHECKING:
    from interp_tasks.training.config import Resolved


def train(
    recipe: RecipeOptions,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Run folder.", show_default="runs/TASK-PRESET")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0:8", help="A run each (end excluded), in RUN/seed-0, ..."),
    ] = None,
) -> None:
    """Train a task's model into a run folder.

    The same command resumes a run that was stopped; a larger train.steps extends one. What each preset sets:
    interp-run tasks. What --set can set besides, with the defaults: docs/training.md; a key that does not exist is
    answered with the closest that does.
    """
    several, folder = parse_seeds(seeds), out or Path("runs") / f"{recipe.task}-{recipe.preset}"
    if several is not None and "train.seed" in parse_settings(recipe.settings):
        raise UserError("give --seeds or --set train.seed=..., not both")
    resolved = recipe.resolve()
    if resolved.train.start_from is not None:
        resolve(resolved.train.start_from)
    if several is not None:
        check_no_run(folder)
    check_run_name(folder)
    check_writable_folder(folder)
    import interp_tasks.training.trainer  # noqa: F401  (while it is imported, Ctrl-C has nothing to store)

    with asked_to_stop() as stop:
        if several is None:
            train_one(recipe, resolved, folder, resolved.train.seed, stop)
        for seed in several or []:
            train_one(recipe, resolved, folder / f"seed-{seed}", seed, stop)


def train_one(
    recipe: RecipeOptions, resolved: Resolved, out: Path, seed: int, stop: Callable[[], bool]
) -> None:
    """Trains a run, or goes on with it, and prints its last metrics."""
    from importlib.metadata import version

    from interp_tasks.checkpoints import read_metrics
    from interp_tasks.checkpoints.run_folder import newest_point
    from interp_tasks.training.trainer import train_resolved

    before, _ = newest_point(out)
    versions = {} if before is None else read_run(out).get("versions") or {}
    began, now = versions.get("torch"), version("torch")
    with progress_line(recipe.quiet) as progress:
        shown = training_progress(progress)(str(out))
        train_resolved(resolved, out, seed=seed, device=recipe.device, progress=shown, stop=stop)
    if before is not None:
        other = f"; torch {began} began it, and sums of {now} may differ in their last bit"
        note(f"{out}: went on from step {before.step}{other * (began not in (None, now))}", recipe.quiet)
    last = read_metrics(out)[-1]
    write_line(f"{out}@last  step {last['step']}  {plain(last.get('validation', {}))}")
