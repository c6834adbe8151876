"""``interp-run demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interp_tasks.cli.command_building import CommonOptions
from interp_tasks.cli.options import FORMAT
from interp_tasks.cli.streams_and_exit_codes import progress_line, write_line
from interp_tasks.cli.tables import print_in_format, write_and_show
from interp_tasks.demo import Demo, demo_page, summary_lines
from interp_tasks.demo import demo as measured
from interp_tasks.file_io import check_writable_file
from interp_tasks.measurement.option_parsing import SEED
from interp_tasks.measurement.result import join_results


def demo(
    common: CommonOptions,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Examples of each task.")] = 256,
    seed: SEED = 0,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path(
        "interp-demo.html"
    ),
    format: FORMAT = "table",
) -> None:
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds.

    All heads of a model of matrix completion and of one of modular addition. Prints ten lines, and writes one HTML page
    that shows both in pictures; --format json and csv print all numbers.
    """
    check_writable_file(out)
    with progress_line(common.quiet) as progress:
        found = measured(samples=samples, seed=seed, progress=progress)
    write_and_show(lambda: [demo_page(found).write(out)], lambda: print_demo(found, format), common.quiet)


def print_demo(found: Demo, format: str) -> None:
    if format == "table":
        for line in summary_lines(found):
            write_line(line)
    else:
        print_in_format(join_results([found.matrices.result, found.sums.result]), format)
