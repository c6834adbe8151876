"""Reproduces a paper: judges its claims from the records of what was measured, and lists missing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.disk import atomic_write
from interp_tasks.errors import UserError
from interp_tasks.measurement.intervals import ALPHA
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import Page, Section, Table, Text, versions
from interp_tasks.published import Claim, Paper, TrainingRun, read_paper
from interp_tasks.published.paper import PRESETS
from interp_tasks.reproduction import page as pages
from interp_tasks.reproduction.conditions import conditions_of, missing_runs, verdicts_of
from interp_tasks.reproduction.records import read_records, rule_of
from interp_tasks.reproduction.runs import planned_runs
from interp_tasks.reproduction.verdicts import CONTROLS, joined

if TYPE_CHECKING:
    import pandas

#: Numbers of a verdict, NaN where there is none.
NUMBERS = (
    *("published_number", "value", "value_ci_low", "value_ci_high", "median", "at_least", "at_most"),
    *CONTROLS,
    *("p", "p_holm", "hours"),
)
COLUMNS = (
    *("row", "claim", "headline", "says", "source", "published", "published_number", "rule", "rule_digest"),
    *("run", "n_runs", "value", "value_ci_low", "value_ci_high", "median", "at_least", "at_most", "what"),
    *("interval", "runs", *CONTROLS, "p", "p_holm", "verdict", "reason", "hours"),
)


@dataclass(frozen=True)
class Reproduction:
    """A paper's claims with their verdicts.

    Attributes:
        frame: a row for each claim and condition (runs of a role that differ in their seed alone), or role, where a
            study looks at its runs together: ``COLUMNS``.
        missing: runs that studies lack, each once.
        measured: names of the training runs that verdicts rest on.
        rows: what it was limited to; empty: everything.
    """

    paper: Paper
    preset: str
    frame: pandas.DataFrame = field(repr=False)
    missing: tuple[TrainingRun, ...] = field(repr=False)
    measured: tuple[str, ...] = field(repr=False)
    rows: tuple[int, ...] = ()
    folder: str = "runs"
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Returns a line for each claim whose number is not in its records."""
        wrong = self.frame[self.frame["verdict"] == "error"].to_dict("records")
        return tuple(f"claim {each['claim']} on {each['run']}: {each['reason']}" for each in wrong)

    def to_json(self) -> str:
        from interp_tasks.measurement.result import json_value

        rows = [json_value(row) for row in self.frame.to_dict("records")]
        lines = (json.dumps(row, allow_nan=False, ensure_ascii=False) for row in rows)
        return "[\n" + ",\n".join(lines) + "\n]\n"

    def to_csv(self) -> str:
        # A cell holds one text: the runs' own numbers, in their order.
        runs = [
            "; ".join(f"{each['run']}: {each['value']}" for each in several) for several in self.frame["runs"]
        ]
        text: str = self.frame.assign(runs=runs).to_csv(index=False, lineterminator="\n")
        return text

    def page(self) -> Page:
        """Returns a page of the headlines, of all claims, of missing runs, and of the rules, by experiment."""
        import pandas

        paper, missing, frame = self.paper, self.missing, self.frame
        outcomes = frame.to_dict("records")
        departures = "\n".join(f"- {line}" for line in paper.departures)
        introduction = (
            f"{paper.citation}, repeated at the scale {self.preset}. {pages.summary_of(outcomes)}\n\n"
            f"Measured on {len(self.measured)} training runs; {len(missing)} more are described but not measured. "
            f"Our models differ from theirs:\n\n{departures}"
        )
        stands_on = pandas.DataFrame(
            [row for _, several in pages.headlines(paper, outcomes) for row in several]
        )
        needed = pandas.DataFrame(
            {"run": run.name, "role": run.role, "hours": run.hours, "command": run.command(self.folder)}
            for run in missing
        )
        by_row = frame.sort_values(["row", "headline"], ascending=[True, False], kind="stable")
        named = f"{paper.name}-"
        tables = [
            Table(stands_on, "Headlines", pages.HEADLINES_NOTE, pages.HEADLINES, f"{named}headlines"),
            Table(by_row, "Claims", pages.CLAIMS_NOTE, pages.CLAIMS, f"{named}claims", download=frame),
            Table(needed, "Not measured", pages.MISSING_NOTE, pages.MISSING, "not-measured"),
        ]
        sections: list[Section] = [Text(introduction), *(table for table in tables if len(table.frame))]
        decided = set(frame["claim"])
        sections += [
            pages.rules(paper, row, decided) for row in paper.row if row.number in (self.rows or [row.number])
        ]
        config = {"paper": paper.name, "preset": self.preset, "runs": list(self.measured)}
        return Page(f"{paper.title}: published and ours", sections, config, self.versions)

    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``claims.csv`` and ``.json``, and ``index.html``.

        Raises:
            UserError: if the file system refuses.
        """
        folder = Path(folder)
        return [
            atomic_write(folder / "claims.csv", self.to_csv()),
            atomic_write(folder / "claims.json", self.to_json()),
            self.page().write(folder / "index.html"),
        ]


def reproduce(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    rows: Sequence[int] = (),
    records: str | Path | None = None,
    runs: str | Path = "runs",
) -> Reproduction:
    """Decides a paper's claims from the records of what was measured; no model runs.

    Args:
        paper: a name (``interp_tasks.published.papers()``), or a paper of your own.
        preset: the scale: ``cpu``, ``reference`` or ``paper``.
        rows: only these experiments of the paper.
        records: a file of records that :func:`measure` wrote, beside those that ship.
        runs: where the commands of missing runs would train them.

    Raises:
        UserError: for a paper, preset or row there is not; for a file that holds no records.
    """
    paper = checked_paper(paper, preset, rows)
    stored = read_records(paper, None if records is None else Path(records))
    claims = [
        claim for claim in sorted(paper.claim, key=lambda each: each.row) if not rows or claim.row in rows
    ]
    planned = planned_runs(paper, preset)
    studies = {each.id: conditions_of(each, planned, stored) for each in paper.studies(rows)}
    verdicts = [
        {**of_claim(claim), **row}
        for claim in claims
        for row in verdicts_of(claim, studies[claim.study], preset)
    ]
    conditions = [each for several in studies.values() for each in several]
    missing: dict[str, TrainingRun] = {}
    for study in studies.values():
        runs_of_study = [run for each in study for run in each.runs]
        lacking = [run for each in study for run in each.missing]
        missing |= {run.name: run for run in missing_runs(runs_of_study, lacking)}
    measured = dict.fromkeys(
        run.name for each in conditions for record in each.measured for run in record.runs
    )
    frame = frame_of(verdicts)
    return Reproduction(
        *(paper, preset, frame, tuple(missing.values()), tuple(measured), tuple(rows)), Path(runs).as_posix()
    )


def checked_paper(paper: str | Paper, preset: str, rows: Sequence[int]) -> Paper:
    """Returns the paper; refuses a scale or rows that it does not have."""
    paper = read_paper(paper) if isinstance(paper, str) else paper
    check_choice("--preset", preset, PRESETS)
    numbers = [row.number for row in paper.row]
    for row in rows:
        if row not in numbers:
            raise UserError(f"--rows {row}: {paper.name} has rows {min(numbers)} to {max(numbers)}")
    return paper


def of_claim(claim: Claim) -> dict[str, Any]:
    """Returns the columns that are a claim's own."""
    own = {
        name: getattr(claim, name)
        for name in ("row", "headline", "says", "source", "published", "rule", "what")
    }
    digest = rule_of(claim)
    return {
        **own,
        "claim": claim.id,
        "published_number": claim.number,
        "rule_digest": digest,
        "interval": "",
        "runs": [],
    }


def frame_of(verdicts: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Returns verdicts as a table, with the p-values of headlines adjusted by Holm.

    A headline counts once, on the published configuration, where that is among its conditions. A verdict that is not
    significant then becomes undecided.
    """
    import numpy
    import pandas

    from circuits.statistics import holm

    published = {row["claim"] for row in verdicts if row["is_published"]}
    rows = [
        {**row, "headline": row["headline"] and (row["is_published"] or row["claim"] not in published)}
        for row in verdicts
    ]
    tested = [row for row in rows if row["headline"] and row.get("p") is not None]
    adjusted = holm(numpy.array([row["p"] for row in tested], float)).tolist()
    for row, p in zip(tested, adjusted, strict=True):
        row["p_holm"] = p
        if p >= ALPHA and row["verdict"] in ("held", "failed"):
            reason = (
                f"not after Holm's correction over {len(tested)} headline verdicts: {row['verdict']} alone"
            )
            row.update(verdict="undecided", reason=joined(reason, row["reason"]))
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    frame = frame.astype({"n_runs": "Int64", **dict.fromkeys(NUMBERS, float)})
    return frame.replace({"at_least": -math.inf, "at_most": math.inf}, math.nan)
