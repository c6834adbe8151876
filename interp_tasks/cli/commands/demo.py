"""``interp-run demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from interp_tasks.cli.base import Command
from interp_tasks.cli.output import FORMATS, print_as, write_and_show
from interp_tasks.cli.progress import progress_line
from interp_tasks.cli.tables import print_sentences
from interp_tasks.experiments.demo.measure import Outcome, check_studies, demo, demo_page
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.result import join
from interp_tasks.pages import check_writable_file


@dataclass(kw_only=True)
class Demo(Command):
    """Ablate attention in shipped models before and after they learn abruptly: some ten seconds.

    All heads of a model of matrix completion and of one of modular addition. Prints the tables and what they say
    about the published claims, and writes one HTML page.
    """

    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Examples of each task.")] = 256
    seed: Annotated[int, typer.Option("--seed", help="Draws the examples and the intervals.")] = 0
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path(
        "interp-demo.html"
    )
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        check_samples(self.samples)
        check_seed(self.seed)
        check_writable_file(self.out)
        check_studies()

    def execute(self) -> None:
        with progress_line(self.quiet) as progress:
            outcomes = demo(samples=self.samples, seed=self.seed, progress=progress)
        write_and_show(lambda: [demo_page(outcomes).write(self.out)], lambda: self.show(outcomes), self.quiet)

    def show(self, outcomes: list[Outcome]) -> None:
        if self.format == "table":
            for outcome in outcomes:
                print_as(outcome.result, "table")
                print_sentences(outcome.sentences)
        else:
            print_as(join([outcome.result for outcome in outcomes]), self.format)
