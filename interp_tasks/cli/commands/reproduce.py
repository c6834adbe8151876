"""``interp-run reproduce``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.cli.base import Command
from interp_tasks.cli.commands import PAPERS
from interp_tasks.cli.output import FORMATS, write_and_show
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.rows import plain
from interp_tasks.cli.streams import write_data
from interp_tasks.cli.tables import console
from interp_tasks.devices import check_written_device
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import check_writable_folder
from interp_tasks.pages.numbers import three_digits
from interp_tasks.texts import one_line

if TYPE_CHECKING:
    from interp_tasks.measurement.subjects import Progress
    from interp_tasks.reproduction import Reproduction


@dataclass(kw_only=True)
class Reproduce(Command):
    """A paper's experiments on the runs that are there: published numbers beside ours.

    Every claim gets a verdict. Reads the shipped runs, and runs of --runs. What has not been trained is
    listed with its command and an estimate of its hours, or trained with --train, which goes on where it
    was interrupted. Writes tables and one page.
    """

    paper: Annotated[str, typer.Argument(metavar="PAPER", help="A paper: " + ", ".join(PAPERS) + ".")]
    preset: Annotated[str, typer.Option("--preset", help="Scale: cpu, reference or paper.")] = "cpu"
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="5,6", help="Only these experiments of the paper.")
    ] = None
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where runs are, or are trained.")] = (
        Path("runs")
    )
    train: Annotated[bool, typer.Option("--train", help="Train what is missing first.")] = False
    device: Annotated[str, typer.Option("--device", help="With --train, where: cpu, cuda, ...")] = "cpu"
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Experiments at a time.", show_default="2, or 1 on one core"
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Tables and page.", show_default="results/PAPER-PRESET"),
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Below each line what the claim says, and why the verdict.")
    ] = False

    def check(self) -> None:
        from interp_tasks.reproduction.reproduction import check

        check_choice("--format", self.format, FORMATS)
        check_written_device(self.device)
        if self.device != "cpu" and not self.train:
            raise UserError(f"--device {self.device} is for --train: what is trained is measured on the CPU")
        if self.jobs is not None and not 1 <= self.jobs <= 256:
            raise UserError(f"--jobs {self.jobs}: from 1 to 256 experiments at a time")
        if self.runs.exists() and not self.runs.is_dir():
            raise UserError(f"--runs {self.runs} is not a folder: name the one that holds runs, or will")
        chosen = self.chosen()
        check_writable_folder(self.folder())
        if self.train:
            check_writable_folder(self.runs)
        check(self.paper, self.preset, self.runs, chosen)

    def chosen(self) -> tuple[int, ...]:
        if self.rows is None:
            return ()
        parts = [part.strip() for part in self.rows.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise UserError(f"--rows {self.rows!r}: write numbers of experiments, such as 5,6")
        return tuple(dict.fromkeys(map(int, parts)))

    def folder(self) -> Path:
        return self.out or Path("results") / f"{self.paper}-{self.preset}"

    def execute(self) -> None:
        """Trains what is missing if that is asked for, measures the paper's claims, prints and writes verdicts."""
        from interp_tasks.reproduction import reproduce, train_missing

        if self.train:
            with progress_line(self.quiet) as progress:
                train_missing(
                    self.paper,
                    self.preset,
                    runs=self.runs,
                    rows=self.chosen(),
                    device=self.device,
                    progress=None if progress is None else trainer_progress(progress),
                )
        with progress_line(self.quiet) as progress:
            reproduction = reproduce(
                self.paper,
                self.preset,
                runs=self.runs,
                rows=self.chosen(),
                processes=self.jobs or min(2, os.cpu_count() or 1),
                progress=progress,
            )
        write_and_show(lambda: reproduction.write(self.folder()), lambda: self.show(reproduction), self.quiet)
        for line in reproduction.crashed:
            note(one_line(line), quiet=False)
        if reproduction.crashed:
            raise UserError(
                f"{len(reproduction.crashed)} of it could not be measured: see above; the rest is written"
            )

    def show(self, reproduction: Reproduction) -> None:
        if self.format == "json":
            write_data(reproduction.to_json())
        elif self.format == "csv":
            write_data(reproduction.to_csv())
        else:
            print_claims(reproduction, self.verbose)


def trainer_progress(progress: Progress) -> Any:
    """Returns a function that makes, for the name of a run, a trainer's callback that draws the progress line."""

    def of_run(name: str) -> Any:
        return lambda step, steps, line: progress(step, steps, f"{plain(line.get('validation', {}))}  {name}")

    return of_run


#: Widths of an unbroken line: verdict, published, ours, seeds; the claim's name has the rest, 26 of 80.
VERDICT, PUBLISHED, OURS, SEEDS = 12, 9, 24, 5
#: Of sentences below a line.
INDENT = VERDICT + 1


def print_claims(reproduction: Reproduction, verbose: bool) -> None:
    """Prints a line for each claim and condition, by experiment of the paper; then what is missing."""
    from rich.text import Text

    from interp_tasks.reproduction.reproduction import summary

    out = console()
    width = out.width
    rows: list[Any] = reproduction.frame().to_dict("records")
    shorts = {claim.id: claim.short for claim in reproduction.paper.claim}
    head = ("verdict", "claim", "published", "ours", "seeds")
    out.print(Text(line(head, width), style="dim"), soft_wrap=True)
    for row in reproduction.paper.row:
        row_outcomes = [each for each in rows if each["row"] == row.number]
        if not row_outcomes:
            continue
        title = f"{row.number}. {row.title}"
        whole = f"{title} ({row.where})" if row.where else title
        out.print()
        out.print(Text(whole if len(whole) <= width else cut(title, width), style="bold"), soft_wrap=True)
        for claim in dict.fromkeys(each["claim"] for each in row_outcomes):
            claim_outcomes = [each for each in row_outcomes if each["claim"] == claim]
            # What has not been trained stands below, once.
            run = [each for each in claim_outcomes if each["verdict"] != "not run"]
            print_claim(out, claim_outcomes if verbose or not run else run, shorts.get(claim, ""), verbose)
    out.print()
    print_wrapped(out, summary(reproduction))
    print_wrapped(out, "*: a headline. –: none, or none that is one number.")
    if not verbose:
        print_wrapped(out, "--verbose: what each claim says, its rule, interval, runs, controls and reasons.")
    if reproduction.missing:
        hours = sum(each.run.hours for each in reproduction.missing)
        out.print(
            f"Not trained: {len(reproduction.missing)} run(s), {hours:.1f} h in all; --train trains them."
        )
    for each in reproduction.missing:
        out.print(Text(f"{each.run.hours:g} h: {each.run.command(reproduction.folder)}", style="dim"))


def print_wrapped(out: Any, text: str) -> None:
    from rich.text import Text

    for part in wrap(text, out.width):
        out.print(Text(part), soft_wrap=True)


def print_claim(out: Any, rows: list[Any], short: str, verbose: bool) -> None:
    """Prints a claim's line; for several conditions, a line for each below its name.

    Args:
        short: what stands in the place of a name that has no room.
    """
    from rich.text import Text

    from interp_tasks.reproduction.page import our_number, published_number, seeds

    first = rows[0]
    # Words that do not fit say nothing once they are cut: --verbose has them.
    published = published_number(first)
    published = published if 0 < len(published) <= PUBLISHED else "–"
    several = len(rows) > 1
    star = " *" if first["headline"] else ""
    name = first["claim"] + star
    if short and len(name) > name_width(out.width):
        name = short + star
    sentences_of_claim = [
        f"{first['claim']}: {first['says']}",
        f"Published: {first['published']}." * bool(first["published"]),
        f"Rule: {first['rule']}.",
    ]
    if several:
        out.print(Text(line(("", name, published, "", ""), out.width)), soft_wrap=True)
        if verbose:
            print_sentences(out, sentences_of_claim)
    called = [f"  {each}" for each in conditions([row["run"] for row in rows], name_width(out.width) - 2)]
    for row, condition in zip(rows, called if several else [name], strict=True):
        ours = our_number(row, rounded)
        cells = (row["verdict"], condition, "" if several else published, ours, seeds(row))
        out.print(Text(line(cells, out.width)), soft_wrap=True)
        if verbose:
            print_sentences(out, [*([] if several else sentences_of_claim), *particulars(row)])


def conditions(runs: Sequence[str], width: int) -> list[str]:
    """Returns the last names of runs; without the words that all begin with, where one has no room."""
    names = [run.rpartition("/")[2] for run in runs]
    if max(map(len, names)) <= width:
        return names
    words = [name.split("-") for name in names]
    # The last word of each stays, whatever the others are.
    beginnings = zip(*(each[:-1] for each in words), strict=False)
    shared = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, beginnings))
    return ["-".join(each[shared:]) for each in words]


def rounded(value: float) -> str:
    """Formats a number for a narrow column; three digits, two of a small one, since its power of ten says most."""
    small = 0 < abs(value) < 1e-3
    return f"{value:.1e}" if small else three_digits(value)


def print_sentences(out: Any, sentences: Sequence[str]) -> None:
    from rich.text import Text

    for sentence in filter(None, sentences):
        for part in wrap(sentence, out.width - INDENT):
            out.print(Text(" " * INDENT + part, style="dim"), soft_wrap=True)


def particulars(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the particulars of a verdict, a sentence each."""
    from interp_tasks.reproduction.page import controls, interval_text, number, our_number, run_numbers

    if row["interval"]:
        yield f"{our_number(row)}, interval {interval_text(row)} ({row['interval']})."
    if len(row["runs"]) > 1:
        yield f"Each run: {run_numbers(row)}."
    if controls(row) != "–":
        yield f"Untrained: {controls(row)}."
    if row["p_holm"] == row["p_holm"]:
        yield f"p {number(row['p'])}, {number(row['p_holm'])} after Holm's correction."
    if row["reason"]:
        yield f"{row['reason'][0].upper()}{row['reason'][1:]}."


def name_width(width: int) -> int:
    """Returns how much of a line's width a claim's name has."""
    return max(width - (VERDICT + PUBLISHED + OURS + SEEDS) - 4, 12)


def line(cells: Sequence[str], width: int) -> str:
    """Returns one line of the terminal's width; a text too long for its column ends in three dots."""
    widths = (VERDICT, name_width(width), PUBLISHED, OURS, SEEDS)
    shown = [
        cut(text, wide, middle=column == 1).ljust(wide)
        for column, (text, wide) in enumerate(zip(cells, widths, strict=True))
    ]
    return " ".join(shown).rstrip()


def cut(text: str, width: int, middle: bool = False) -> str:
    """Returns a text that fits; of a name both ends stay, since names begin alike."""
    if len(text) <= width:
        return text
    end = width // 2 if middle else 0
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"
