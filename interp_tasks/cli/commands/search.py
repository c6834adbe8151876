"""``interp-run runs search``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.cli.options import FORMAT, RecipeOptions
from interp_tasks.cli.tables import print_rows, say
from interp_tasks.cli.terminal import note, progress_line, write_data
from interp_tasks.disk import check_writable_folder
from interp_tasks.settings import parse_settings

if TYPE_CHECKING:
    from interp_tasks.search.study import SearchResult

#: Trials that people are shown.
SHOWN = 10


SPACE = typer.Option(
    "--space", metavar="NAME|FILE.toml", help="What to try.", show_default="the task's, if no --vary"
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
    recipe: RecipeOptions,
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
    are the published values of the task: docs/search.md. Prints the best trials and how much each setting matters;
    OUT/search.html shows both.
    """
    from interp_tasks.search.plan import make_plan

    recipe.import_tasks()
    varied: dict[str, Any] = {"space": space, "vary": vary, "objective": objective, "seed": seed}
    plan = make_plan(recipe.task, preset=recipe.preset, settings=parse_settings(recipe.settings), **varied)
    folder = out or Path("runs") / f"search-{recipe.task}-{recipe.preset}"
    check_free(folder, "search")
    check_writable_folder(folder)
    from interp_tasks.search.study import search

    work: dict[str, Any] = {"trials": trials, "jobs": jobs, "device": recipe.device}
    work["imports"] = [] if recipe.import_path is None else [recipe.import_path]
    with progress_line(recipe.quiet) as progress:
        result = search(plan, out=folder, progress=progress, **work)
    if format == "table":
        print_found(result)
    else:
        write_data(result.to_json() if format == "json" else result.frame.to_csv(index=False))
    note(f"wrote {folder / 'search.html'}, trials.csv, trials.json", recipe.quiet)


def print_found(result: SearchResult) -> None:
    """Prints the best trials, then importances."""
    objective = result.identity["objective"]
    say(f"{result.summary()}; {objective['direction']} {objective['metric']}", "bold")
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
            say(f"trial {trial['trial']} {trial['state']}: {trial['reason']}", "dim")
    say()
    if result.importances:
        print_rows(
            [{"setting": key, "importance": f"{share:.2f}"} for key, share in result.importances.items()],
            "table",
            ["setting", "importance"],
        )
    else:
        say("Too few different trials to say what matters.", "dim")
