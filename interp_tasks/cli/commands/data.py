"""``interp-run tasks data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.result_command import ResultCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, data
from interp_tasks.experiments._data.measure import MULTIPLES, SAMPLES, check_multiples
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.subjects import SPLITS, Progress
from interp_tasks.settings import check_task_name, task_config


@dataclass(kw_only=True)
class Data(ResultCommand):
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    With --plot a page: numbers in polar coordinates, inputs and answers over the grid, the DFT matrix; of tasks whose
    positions are a matrix some examples.
    """

    name: ClassVar[str] = "data"

    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")]
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the task, as in task.p=11. Repeatable."),
    ] = field(default_factory=list)
    multiples: Annotated[
        str, typer.Option("--multiples", metavar="17,23", help="Multiples that the polar plot shows.")
    ] = ",".join(map(str, MULTIPLES))
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", help="Examples, of a task that has no grid.", show_default=str(SAMPLES)
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Draws the examples.")] = 0
    split: Annotated[str, typer.Option("--split", help="train, validation or test: of the examples.")] = (
        "test"
    )

    def check(self) -> None:
        check_choice("--split", self.split, SPLITS)
        check_samples(self.samples)
        check_seed(self.seed)
        check_multiples(self.numbers())
        task_config(self.task, self.settings)
        if self.import_path is None:
            check_task_name(self.task)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return data(
            self.task,
            task_config(self.task, self.settings),
            multiples=self.numbers(),
            samples=self.samples,
            split=self.split,
            seed=self.seed,
        )

    def numbers(self) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in self.multiples.split(","))
        except ValueError:
            raise UserError(f"--multiples {self.multiples}: write whole numbers, such as 17,23") from None
