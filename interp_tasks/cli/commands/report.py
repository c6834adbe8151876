"""``interp-run runs report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from interp_tasks.cli.checkpoint_command import ExamplesCommand
from interp_tasks.cli.output import write_and_show
from interp_tasks.cli.progress import progress_line
from interp_tasks.cli.rows import print_rows
from interp_tasks.errors import UserError
from interp_tasks.pages import check_writable_file


@dataclass(kw_only=True)
class Report(ExamplesCommand):
    """Show a run on one page: its training curve and drop, effects and attention of its heads at each checkpoint.

    One file, which opens offline, with a slider over the checkpoints; prints the numbers at its top.
    """

    ckpt: Annotated[
        str,
        typer.Option(
            "--ckpt",
            metavar="RUN",
            help="A run folder or zoo:NAME; RUN@0:20000:2000 and the like for some checkpoints.",
        ),
    ]
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="RUN", help="Another run, shown beside it.")
    ] = None
    circuit: Annotated[
        bool,
        typer.Option("--circuit", help="Find the smallest faithful circuit at each checkpoint, too: slow."),
    ] = False
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path("report.html")

    def check(self) -> None:
        from interp_tasks.report import check_report

        super().check()
        check_writable_file(self.out)
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise UserError(f"--out {self.out}: a report is a page: name a file that ends in .html")
        check_report(self.ckpt, self.compare, self.common(None), circuit=self.circuit)

    def execute(self) -> None:
        from interp_tasks.report import report

        self.import_tasks()
        with progress_line(self.quiet) as progress:
            result = report(self.ckpt, self.compare, circuit=self.circuit, **self.common(progress))
            page = result.page()
        rows = result.headlines()
        write_and_show(
            lambda: [page.write(self.out)], lambda: print_rows(rows, self.format, list(rows[0])), self.quiet
        )
