"""``interp-run demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from interp_tasks.cli.base import Command
from interp_tasks.cli.output import FORMATS, print_as, write_and_show
from interp_tasks.cli.progress import progress_line
from interp_tasks.cli.streams import write_line
from interp_tasks.experiments._demo.measure import Demo as DemoResult
from interp_tasks.experiments._demo.measure import check_runs, demo
from interp_tasks.experiments._demo.summary import summary
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.result import join
from interp_tasks.pages import check_writable_file


@dataclass(kw_only=True)
class Demo(Command):
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds.

    All heads of a model of matrix completion and of one of modular addition. Prints ten lines, and writes one HTML page
    that shows both in pictures; --format json and csv print all numbers.
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
        check_runs()

    def execute(self) -> None:
        with progress_line(self.quiet) as progress:
            found = demo(samples=self.samples, seed=self.seed, progress=progress)
        # Its figures need `circuits`, which --help does not load.
        from interp_tasks.experiments._demo.page import demo_page

        write_and_show(lambda: [demo_page(found).write(self.out)], lambda: self.show(found), self.quiet)

    def show(self, found: DemoResult) -> None:
        if self.format == "table":
            for line in summary(found):
                write_line(line)
        else:
            print_as(join(found.results()), self.format)
