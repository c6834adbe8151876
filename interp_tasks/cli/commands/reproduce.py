"""``interp-run reproduce``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.cli.command_building import CommonOptions
from interp_tasks.cli.options import FORMAT
from interp_tasks.cli.streams_and_exit_codes import print_note, progress_line, write_data
from interp_tasks.cli.tables import print_wrapped, stdout_console, training_progress, write_and_show
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_folder
from interp_tasks.measurement.option_parsing import DEVICE
from interp_tasks.pages import number
from interp_tasks.text_formatting import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from interp_tasks.reproduction import Reproduction

#: Widths of columns: verdict, published, ours, seeds; the claim's name has the rest, 26 of 80.
VERDICT, PUBLISHED, OURS, SEEDS = 12, 9, 24, 5
PAPERS = "A paper: grokfast, matrix-completion, miiii or nanda."
#: Where measurements are, beside those that ship.
RECORDS = typer.Option(
    "--records", metavar="FILE", help="Own measurements.", show_default="measurements.jsonl in --out"
)
ROWS = typer.Option("--rows", metavar="5,6", help="Only these experiments of the paper.")
RUNS = typer.Option("--runs", metavar="DIR", help="Where runs are, or are trained.")
MEASURE = typer.Option("--measure", help="First measure the runs that have no measurement.")
CHECK = typer.Option("--check", help="Measure again, and say what comes out otherwise.")
TRAIN = typer.Option("--train", help="Train what is missing first, and measure it.")
OUT = typer.Option("--out", metavar="DIR", help="Tables and page.", show_default="results/PAPER-PRESET")


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=PAPERS)],
    common: CommonOptions,
    preset: Annotated[str, typer.Option("--preset", help="Scale: cpu, reference or paper.")] = "cpu",
    rows: Annotated[str | None, ROWS] = None,
    runs: Annotated[Path, RUNS] = Path("runs"),
    measure: Annotated[bool, MEASURE] = False,
    check: Annotated[bool, CHECK] = False,
    records: Annotated[Path | None, RECORDS] = None,
    train: Annotated[bool, TRAIN] = False,
    device: DEVICE = "cpu",
    out: Annotated[Path | None, OUT] = None,
    format: FORMAT = "table",
) -> None:
    """Judges a paper's claims: published numbers beside ours, and a verdict on each.

    Judges the measurements that ship, and those of --measure, which runs the paper's experiments on the shipped
    runs and those of --runs where they have none yet. What has not been trained is listed with its command and
    an estimate of its hours, or trained with --train. Writes tables and one page; --format json or csv only with --out.
    """
    from interp_tasks import reproduction
    from interp_tasks.reproduction.judge_paper import checked_paper

    if device != "cpu" and not train:
        raise UserError(f"--device {device} is for --train: what is trained is measured on the CPU")
    if runs.exists() and not runs.is_dir():
        raise UserError(f"--runs {runs} is not a folder: name the one that holds runs, or will")
    chosen, folder = parse_row_numbers(rows), out or Path("results") / f"{paper}-{preset}"
    writes = out is not None or format == "table"
    if writes or measure or train:
        check_writable_folder(folder)
    if train:
        check_writable_folder(runs)
    checked_paper(paper, preset, chosen)
    if train:
        with progress_line(common.quiet) as progress:
            reproduction.train_missing(
                paper,
                preset,
                runs=runs,
                rows=chosen,
                device=device,
                progress=partial(training_progress, progress),
            )
    asked: dict[str, Any] = {"file": records or folder / "measurements.jsonl", "runs": runs, "rows": chosen}
    failed: list[str] = []
    with progress_line(common.quiet) as progress:
        if measure or train:
            reproduction.measure(paper, preset, **asked, progress=progress)
        if check:
            failed += reproduction.compare_records_with_runs(paper, preset, **asked, progress=progress)
    done = reproduction.reproduce(paper, preset, rows=chosen, records=asked["file"], runs=runs)
    write_and_show(
        lambda: done.write(folder) if writes else [], lambda: print_reproduction(done, format), common.quiet
    )
    failed += done.errors
    for text in failed:
        print_note(one_line(text), quiet=False)
    if failed:
        raise UserError(f"{len(failed)} of it could not be measured, or came out otherwise: see above")


def parse_row_numbers(rows: str | None) -> tuple[int, ...]:
    """Returns the numbers of ``--rows 5,6``."""
    if rows is None:
        return ()
    parts = [part.strip() for part in rows.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UserError(f"--rows {rows!r}: write numbers of experiments, such as 5,6")
    return tuple(dict.fromkeys(map(int, parts)))


def print_reproduction(reproduction: Reproduction, format: str) -> None:
    if format == "table":
        print_claims(reproduction)
    else:
        write_data(reproduction.to_json() if format == "json" else reproduction.to_csv())


def print_claims(reproduction: Reproduction) -> None:
    """Prints a line for each claim and condition, by experiment of the paper; then what is missing."""
    from interp_tasks.reproduction.verdict_text import claim_count_and_correction

    out = stdout_console()
    every: list[Any] = reproduction.frame.to_dict("records")
    out.print(make_claims_table([("verdict", "claim", "published", "ours", "seeds")], out.width), style="dim")
    for experiment in reproduction.paper.row:
        outcomes = [each for each in every if each["row"] == experiment.number]
        if not outcomes:
            continue
        title = f"{experiment.number}. {experiment.title}"
        print_wrapped("\n" + (f"{title} ({experiment.where})" if experiment.where else title), "bold")
        for name in dict.fromkeys(each["claim"] for each in outcomes):
            of_claim = [each for each in outcomes if each["claim"] == name]
            # What has not been trained stands below, once.
            run = [each for each in of_claim if each["verdict"] != "not run"]
            out.print(make_claims_table(rows_of_one_claim(run or of_claim), out.width))
    print_wrapped(f"\n{claim_count_and_correction(every)}")
    print_wrapped("*: a headline. –: none, or none that is one number. The page says why.")
    if reproduction.missing:
        hours = sum(each.hours for each in reproduction.missing)
        print_wrapped(
            f"Not measured: {len(reproduction.missing)} run(s), {hours:.1f} h of training; --train makes them."
        )
    for each in reproduction.missing:
        print_wrapped(f"{each.hours:g} h: {each.command(reproduction.folder)}", "dim")


def rows_of_one_claim(rows: Sequence[Any]) -> list[tuple[str, ...]]:
    """Returns a claim's line; for several conditions, its name and a line for each below."""
    from interp_tasks.reproduction.verdict_text import n_runs_text, our_number, published_number

    # Words that do not fit say nothing once they are cut: the page has them.
    published = published_number(rows[0])
    published = published if 0 < len(published) <= PUBLISHED else "–"
    name = rows[0]["claim"] + " *" * any(each["headline"] for each in rows)
    numbers = [(our_number(row, format_narrow), n_runs_text(row)) for row in rows]
    if len(rows) == 1:
        return [(rows[0]["verdict"], name, published, *numbers[0])]
    conditions = [f"  {row['run'].rpartition('/')[2]}" for row in rows]
    below = zip(rows, conditions, numbers, strict=True)
    return [("", name, published, "", ""), *((row["verdict"], of, "", *found) for row, of, found in below)]


def make_claims_table(rows: Sequence[Sequence[str]], width: int) -> Table:
    """Returns rows in columns of fixed widths; a name that is too long for its column breaks at a hyphen."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    names = max(width - (VERDICT + PUBLISHED + OURS + SEEDS) - 4, 12)
    for wide in (VERDICT, names, PUBLISHED, OURS, SEEDS):
        table.add_column(width=wide, overflow="fold")
    for verdict, name, *numbers in rows:
        table.add_row(verdict, textwrap.fill(name, names), *numbers)
    return table


def format_narrow(value: float) -> str:
    """Formats a number for a narrow column; three digits, two of a small one, since its power of ten says most."""
    small = 0 < abs(value) < 1e-3
    return f"{value:.1e}" if small else number(value, 3, zeros=True)
