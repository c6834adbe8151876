"""``interp-run runs search``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.streams import write_data
from interp_tasks.cli.tables import console, print_rows
from interp_tasks.cli.training_command import RecipeCommand
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import check_writable_folder
from interp_tasks.settings import read_settings

if TYPE_CHECKING:
    from interp_tasks.search.plan import Plan
    from interp_tasks.search.study import SearchResult

#: Trials that people are shown.
SHOWN = 10
#: More trials than one command would ever finish.
MOST_TRIALS = 100_000


@dataclass(kw_only=True)
class Search(RecipeCommand):
    """Search hyper-parameters with Optuna: a training run for every trial.

    The same command goes on with a search that was stopped; a larger --trials extends it. What is tried by default
    are the published values of the task: docs/search.md. Prints the best trials and how much each setting matters;
    OUT/search.html shows both.
    """

    trials: Annotated[
        int, typer.Option("--trials", metavar="N", help="Trials in all, those of earlier calls included.")
    ] = 10
    space: Annotated[
        str | None,
        typer.Option(
            "--space", metavar="NAME|FILE.toml", help="What to try.", show_default="the task's, if no --vary"
        ),
    ] = None
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="As in train.weight_decay=0.1,1 or train.learning_rate=1e-4:1e-2:log. Repeat.",
        ),
    ] = field(default_factory=list)
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="METRIC",
            help="Validation metric, the mean of its last 10 logged values; METRIC:min or :max.",
            show_default="loss",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler.")] = 42
    prune: Annotated[
        bool, typer.Option("--prune", help="Stop trials behind the median, from half of their steps on.")
    ] = False
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", metavar="URL", help="Database of the trials.", show_default="sqlite:///OUT/search.db"
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="OUT", help="Folder.", show_default="runs/search-TASK-PRESET"),
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        from interp_tasks.search.plan import parse_vary

        check_choice("--format", self.format, FORMATS)
        settings = self.check_recipe()
        if not 1 <= self.trials <= MOST_TRIALS:
            raise UserError(f"--trials {self.trials}: from 1 to {MOST_TRIALS}")
        parse_vary(self.vary)
        if self.import_path is None:
            self.plan(settings)
        check_free(self.folder(), "search")
        check_writable_folder(self.folder())

    def folder(self) -> Path:
        return self.out or Path("runs") / f"search-{self.task}-{self.preset}"

    def plan(self, settings: dict[str, str]) -> Plan:
        from interp_tasks.search.plan import make_plan

        return make_plan(
            self.task,
            preset=self.preset,
            space=self.space,
            vary=self.vary,
            settings=settings,
            objective=self.objective,
            seed=self.seed,
            prune=self.prune,
        )

    def execute(self) -> None:
        """Runs the search, prints its best trials, and says what it wrote."""
        self.import_tasks()
        from interp_tasks.search.study import search

        with progress_line(self.quiet) as progress:
            result = search(
                self.plan(read_settings(self.settings)),
                out=self.folder(),
                trials=self.trials,
                storage=self.storage,
                device=self.device,
                progress=progress,
            )
        self.show(result)
        note(f"wrote {self.folder() / 'search.html'}, trials.csv, trials.json", self.quiet)

    def show(self, result: SearchResult) -> None:
        if self.format == "json":
            write_data(result.to_json())
        elif self.format == "csv":
            write_data(result.to_csv())
        else:
            print_found(result)


def print_found(result: SearchResult) -> None:
    """Prints the best trials, then importances."""
    objective = result.identity["objective"]
    out = console()
    out.print(f"{result.summary()}; {objective['direction']} {objective['metric']}", style="bold")
    # The section of a key is left out where room is short: no two settings of a space have one name.
    rows = [
        {
            "trial": trial["trial"],
            objective["metric"]: trial["value"],
            **{key.partition(".")[2]: trial["params"][key] for key in result.identity["space"]},
            "run": trial["run"],
        }
        for trial in result.ranked[:SHOWN]
    ]
    if rows:
        print_rows(rows, "table", list(rows[0]))
    for trial in result.trials:
        if trial["reason"]:
            out.print(f"trial {trial['trial']} {trial['state']}: {trial['reason']}", style="dim")
    out.print()
    if result.importances:
        print_rows(
            [{"setting": key, "importance": f"{share:.2f}"} for key, share in result.importances.items()],
            "table",
            ["setting", "importance"],
        )
    else:
        out.print("Too few different trials to say what matters.", style="dim")
