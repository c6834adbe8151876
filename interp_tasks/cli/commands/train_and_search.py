"""``interp-run train`` and ``interp-run runs search``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.run_reader import check_folder_kind, check_no_run, check_run_target, read_run
from interp_tasks.cli.options import FORMAT, TaskAndPresetOptions
from interp_tasks.cli.streams_and_exit_codes import (
    print_note,
    progress_line,
    watch_stop_signals,
    write_data,
    write_line,
)
from interp_tasks.cli.tables import cell_text, print_rows, print_wrapped, training_progress
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_folder
from interp_tasks.setting_and_seed_parsing import parse_seeds, parse_settings

if TYPE_CHECKING:
    from interp_tasks.search.run_search import SearchResult
    from interp_tasks.training.config import ResolvedConfig


def train(
    recipe: TaskAndPresetOptions,
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
    several = None if seeds is None else parse_seeds(seeds)
    folder = out or Path("runs") / f"{recipe.task}-{recipe.preset}"
    if several is not None and "train.seed" in parse_settings(recipe.settings):
        raise UserError("give --seeds or --set train.seed=..., not both")
    resolved = recipe.resolve()
    if resolved.train.start_from is not None:
        resolve(resolved.train.start_from)
    if several is not None:
        check_no_run(folder)
    check_run_target(folder)
    check_writable_folder(folder)
    import interp_tasks.training.train  # noqa: F401  (while it is imported, Ctrl-C has nothing to store)

    with watch_stop_signals() as stop:
        if several is None:
            train_one(recipe, resolved, folder, resolved.train.seed, stop)
        for seed in several or []:
            train_one(recipe, resolved, folder / f"seed-{seed}", seed, stop)


def train_one(
    recipe: TaskAndPresetOptions, resolved: ResolvedConfig, out: Path, seed: int, stop: Callable[[], bool]
) -> None:
    """Trains a run, or goes on with it, and prints its last metrics."""
    from importlib.metadata import version

    from interp_tasks.checkpoints import read_metrics
    from interp_tasks.checkpoints.run_writer import newest_resume_point_or_fault
    from interp_tasks.training.train import train_resolved

    before, _ = newest_resume_point_or_fault(out)
    versions = {} if before is None else read_run(out).get("versions") or {}
    began, now = versions.get("torch"), version("torch")
    with progress_line(recipe.quiet) as progress:
        shown = training_progress(progress, str(out))
        train_resolved(resolved, out, seed=seed, device=recipe.device, progress=shown, stop=stop)
    if before is not None:
        other = f"; torch {began} began it, and sums of {now} may differ in their last bit"
        print_note(
            f"{out}: went on from step {before.step}{other * (began not in (None, now))}", recipe.quiet
        )
    last = read_metrics(out)[-1]
    write_line(f"{out}@last  step {last['step']}  val: {cell_text(last.get('validation', {}))}")


#: Trials that people are shown.
SHOWN = 10


SPACE = typer.Option(
    "--space", metavar="NAME", help="A space that ships.", show_default="the task's, if no --vary"
)
VARY = typer.Option(
    "--vary",
    metavar="KEY=VALUES",
    help="As in train.weight_decay=0.1,1 or train.learning_rate=1e-4:1e-2:log. Repeat.",
)
OBJECTIVE = typer.Option(
    "--objective",
    metavar="METRIC",
    help="Validation metric, the mean of its last 10 logged values; METRIC:min or :max.",
    show_default="loss",
)
JOBS = typer.Option("--jobs", metavar="N", help="Trials at a time.")
TRIALS = typer.Option(
    "--trials", metavar="N", help="Trials in all, those of earlier calls included.", min=1, max=100_000
)
OUT = typer.Option("--out", metavar="OUT", help="Folder.", show_default="runs/search-TASK-PRESET")


def search(
    recipe: TaskAndPresetOptions,
    space: Annotated[str | None, SPACE] = None,
    vary: Annotated[list[str], VARY] = [],  # noqa: B006  (never changed)
    objective: Annotated[str | None, OBJECTIVE] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler.")] = 42,
    trials: Annotated[int, TRIALS] = 10,
    jobs: Annotated[int, JOBS] = 1,
    out: Annotated[Path | None, OUT] = None,
    format: FORMAT = "table",
) -> None:
    """Search hyper-parameters with Optuna: a training run for every trial.

    The same command goes on with a search that was stopped; a larger --trials extends it. What is tried by default
    are the published values of the task: docs/search.md. Prints the best trials; OUT/search.html shows how much
    each setting matters.
    """
    from interp_tasks.search.search_plan import make_plan

    recipe.import_tasks()
    varied: dict[str, Any] = {"space": space, "vary": vary, "objective": objective, "seed": seed}
    plan = make_plan(recipe.task, preset=recipe.preset, settings=parse_settings(recipe.settings), **varied)
    folder = out or Path("runs") / f"search-{recipe.task}-{recipe.preset}"
    check_folder_kind(folder, "search")
    check_writable_folder(folder)
    from interp_tasks.search.run_search import search

    work: dict[str, Any] = {"trials": trials, "jobs": jobs, "device": recipe.device}
    work["imports"] = [] if recipe.import_path is None else [recipe.import_path]
    with progress_line(recipe.quiet) as progress:
        result = search(plan, out=folder, progress=progress, **work)
    if format == "table":
        print_best_trials(result)
    else:
        write_data(result.to_json() if format == "json" else result.frame.to_csv(index=False))
    print_note(f"wrote {folder / 'search.html'}, trials.csv, trials.json", recipe.quiet)


def print_best_trials(result: SearchResult) -> None:
    """Prints the best trials, and why others have no value."""
    objective = result.identity["objective"]
    print_wrapped(f"{result.summary()}; {objective['direction']} {objective['metric']}", "bold")
    # The section of a key is left out where room is short: no two settings of a space have one name.
    rows = [
        {
            "trial": trial["trial"],
            objective["metric"]: trial["value"],
            **{key.partition(".")[2]: trial[key] for key in result.identity["space"]},
            "run": trial["run"],
        }
        for trial in result.trials[:SHOWN]
        if trial["value"] is not None
    ]
    if rows:
        print_rows(rows, "table", list(rows[0]))
    for trial in result.trials:
        if trial["reason"]:
            print_wrapped(f"trial {trial['trial']} {trial['state']}: {trial['reason']}", "dim")
