"""Reproduces a paper: finds the records that each claim is decided on, judges them, and lists missing runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.file_io import write_files_together
from interp_tasks.measurement.confidence_intervals import ALPHA
from interp_tasks.measurement.option_parsing import check_choice
from interp_tasks.measurement.result import frame_to_json
from interp_tasks.pages import Page, Section, Table, Text, package_versions
from interp_tasks.published import Claim, Paper, Study, TrainingRun, read_paper
from interp_tasks.published.paper_schema import PRESETS
from interp_tasks.reproduction import verdict_text as pages
from interp_tasks.reproduction.claim_verdicts import CONTROLS, Rows, has_ending, join_remarks, judge_claim
from interp_tasks.reproduction.runs_and_records import (
    Key,
    PaperRun,
    StudyRecord,
    planned_runs,
    read_own_and_shipped_records,
    role_record_name,
    rows_of_records,
    rule_digest,
)

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Condition:
    """Planned runs that differ in their seed alone, or all of a study that looks at its runs together.

    Attributes:
        shuffled: the runs of the study's control on shuffled labels.
        stored: all records of the paper.
    """

    study: Study
    runs: tuple[PaperRun, ...]
    shuffled: tuple[PaperRun, ...]
    stored: Mapping[Key, StudyRecord]

    @property
    def name(self) -> str:
        """Returns that of its first run, without its seed; of several runs of a role, the role."""
        if self.study.together and len({each.run.name for each in self.runs}) > 1:
            return self.study.role
        return re.sub(r"/seed-\d+$", "", self.runs[0].name)

    def record_of(self, run: PaperRun, control: str = "") -> StudyRecord | None:
        """Returns the record of a run, or of a control that stands for it; of other settings it is of another run."""
        is_together = self.study.together and control != "shuffled"
        on = role_record_name(self.study.role, run.run.preset) if is_together else run.name
        record = self.stored.get((self.study.id, on, control))
        identities = [] if record is None else [(each.name, each.config) for each in record.runs]
        return record if (run.name, run.config) in identities else None

    def records(self, control: str = "") -> list[StudyRecord]:
        """Returns the records of its runs, or of its controls, each once."""
        runs = self.shuffled if control == "shuffled" else self.runs
        found = [self.record_of(each, control) for each in runs]
        return list({record.key: record for record in found if record is not None}.values())

    @cached_property
    def measured_records(self) -> list[StudyRecord]:
        return [record for record in self.records() if not record.refused]

    @cached_property
    def runs_without_record(self) -> list[PaperRun]:
        return [each for each in self.runs if self.record_of(each) is None]

    @cached_property
    def table(self) -> Rows:
        return rows_of_records(self.measured_records)

    @cached_property
    def control_tables_or_reasons(self) -> dict[str, Rows | str]:
        """Returns the table of each control, or the line that says why there is none."""
        found: dict[str, Rows | str] = {}
        for control in CONTROLS:
            records = self.records(control)
            done = [record for record in records if not record.refused]
            why = records[0].refused if records else "no such run is there"
            found[control] = rows_of_records(done) if done else f"not judged on its control, {control}: {why}"
            if done and control == "shuffled":
                # They stand for the runs themselves, whose names claims may ask for.
                names = [run.name for record in self.measured_records for run in record.runs]
                stand_in = dict(zip((each.on for each in done), names, strict=False))
                table = rows_of_records(done)
                found[control] = [{**row, "run": stand_in.get(row["run"], row["run"])} for row in table]
        return found

    def verdict(self, claim: Claim) -> dict[str, Any]:
        """Returns the row of a claim: its verdict on these runs, or why there is none."""
        is_published = any(each.run.published for each in self.runs)
        row: dict[str, Any] = {"run": self.name, "n_runs": 0, "is_published": is_published}
        refused = refusal_lines(self.records())
        if not self.measured_records and not self.runs_without_record:
            # They are there, and the study cannot be done on them.
            return row | {"verdict": "not testable", "reason": self.records()[0].refused}
        lacks_one = any(has_ending(each.name, run_name_endings(claim)) for each in self.runs_without_record)
        if not self.measured_records or (self.study.together and lacks_one):
            hours = (
                sum(run.hours for run in missing_training_runs(self.runs, self.runs_without_record)) or None
            )
            reason = join_remarks("not measured", *refused)
            return row | {"verdict": "not run", "reason": reason, "hours": hours}
        names = claim.control_names(self.study)
        controls: dict[str, Rows | str] = {name: self.control_tables_or_reasons[name] for name in names}
        tables = {name: table for name, table in controls.items() if not isinstance(table, str)}
        row |= judge_claim(claim, self.table, tables)
        without = [why for why in controls.values() if isinstance(why, str)]
        lacking = (f"without {each}" for each in refused)
        return row | {"reason": join_remarks(row["reason"], *lacking, *without)}


def list_conditions(
    study: Study, planned: Sequence[PaperRun], stored: Mapping[Key, StudyRecord]
) -> list[Condition]:
    """Returns the conditions of a study, of the runs that the paper's file plans at a scale."""
    groups: dict[str, list[PaperRun]] = {}
    for each in planned:
        if each.run.role == study.role:
            groups.setdefault("" if study.together else each.config, []).append(each)
    shuffled = tuple(each for each in planned if each.run.role == study.shuffled)
    return [Condition(study, tuple(runs), shuffled, stored) for runs in groups.values()]


def judge_conditions(claim: Claim, conditions: Sequence[Condition], preset: str) -> list[dict[str, Any]]:
    """Returns the row of a claim on each condition of its study, of those that it names where it names runs."""
    if "run" in claim.where and len(conditions) > 1:
        named = run_name_endings(claim)
        conditions = [each for each in conditions if any(has_ending(run.name, named) for run in each.runs)]
    none = {"run": conditions[0].name if conditions else preset, "n_runs": 0, "is_published": False}
    if preset in claim.scale:
        return [none | {"verdict": "not testable", "reason": claim.scale[preset]}]
    if not conditions:
        return [none | {"verdict": "not run", "reason": f"no run is planned at the scale {preset}"}]
    return [condition.verdict(claim) for condition in conditions]


def missing_training_runs(planned: Iterable[PaperRun], missing: Sequence[PaperRun]) -> list[TrainingRun]:
    """Returns the runs that have no record; of a run whose other seeds have one, the seeds that lack it."""
    by_run: dict[str, list[PaperRun]] = {}
    for each in planned:
        by_run.setdefault(each.run.name, []).append(each)
    found = []
    for several in by_run.values():
        run, lacking = several[0].run, [each for each in several if each in missing]
        if 0 < len(lacking) < len(several):
            hours = run.hours * len(lacking) / len(several)
            seeds = ",".join(str(each.seed) for each in lacking)
            run = run.model_copy(update={"seeds": seeds, "hours": hours})
        found += [run] if lacking else []
    return found


def run_name_endings(claim: Claim) -> list[str]:
    """Returns the endings of the names of runs, globs among them, that a claim is about."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    return [name for one in given for name in (one if isinstance(one, list) else [str(one)])]


def refusal_lines(records: Iterable[StudyRecord]) -> list[str]:
    """Returns on which runs a study cannot be done, and why: those together that lack the same."""
    names: dict[str, list[str]] = {}
    for record in records:
        if record.refused:
            # What each of them has instead, and where its drop lies, is its own.
            reason = re.split(r": the nearest are| \(steps ", record.refused)[0].removeprefix(f"{record.on} ")
            names.setdefault(reason, []).append(record.on)
    return [f"{', '.join(runs)}: {reason}" for reason, runs in names.items()]


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
    versions: Mapping[str, str] = field(default_factory=package_versions, repr=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Returns a line for each claim whose number is not in its records."""
        wrong = self.frame[self.frame["verdict"] == "error"].to_dict("records")
        return tuple(f"claim {each['claim']} on {each['run']}: {each['reason']}" for each in wrong)

    def to_json(self) -> str:
        return frame_to_json(self.frame)

    def to_csv(self) -> str:
        """Returns the table, with the numbers of the runs as JSON in one cell."""
        text: str = self.frame.assign(runs=self.frame["runs"].map(json.dumps)).to_csv(
            index=False, lineterminator="\n"
        )
        return text

    def page(self) -> Page:
        """Returns a page of the headlines, of all claims, of missing runs, and of the rules, by experiment."""
        import pandas

        paper, missing, frame = self.paper, self.missing, self.frame
        outcomes = frame.to_dict("records")
        departures = "\n".join(f"- {line}" for line in paper.departures)
        introduction = (
            f"{paper.citation}, repeated at the scale {self.preset}. {pages.claim_count_and_correction(outcomes)}\n\n"
            f"Measured on {len(self.measured)} training runs; {len(missing)} more are described but not measured. "
            f"Our models differ from theirs:\n\n{departures}"
        )
        stands_on = pandas.DataFrame(
            [row for _, several in pages.headline_verdicts(paper, outcomes) for row in several]
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
            pages.rules_section(paper, row, decided)
            for row in paper.row
            if row.number in (self.rows or [row.number])
        ]
        config = {"paper": paper.name, "preset": self.preset, "runs": list(self.measured)}
        return Page(f"{paper.title}: published and ours", sections, config, self.versions)

    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``claims.csv`` and ``.json``, and ``index.html``."""
        folder = Path(folder)
        texts = {"claims.csv": self.to_csv(), "claims.json": self.to_json(), "index.html": self.page().html()}
        return write_files_together({folder / name: text for name, text in texts.items()})


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
        paper: a name (``interp_tasks.published.paper_names()``), or a paper of your own.
        preset: the scale: ``cpu``, ``reference`` or ``paper``.
        rows: only these experiments of the paper.
        records: a file of records that :func:`measure` wrote, beside those that ship.
        runs: where the commands of missing runs would train them.

    Raises:
        UserError: for a paper, preset or row there is not; for a file that holds no records.
    """
    paper = checked_paper(paper, preset, rows)
    stored = read_own_and_shipped_records(paper, None if records is None else Path(records))
    claims = [
        claim for claim in sorted(paper.claim, key=lambda each: each.row) if not rows or claim.row in rows
    ]
    planned = planned_runs(paper, preset)
    studies = {each.id: list_conditions(each, planned, stored) for each in paper.studies(rows)}
    verdicts = [
        {**claim_columns(claim), **row}
        for claim in claims
        for row in judge_conditions(claim, studies[claim.study], preset)
    ]
    conditions = [each for several in studies.values() for each in several]
    missing: dict[str, TrainingRun] = {}
    for study in studies.values():
        runs_of_study = [run for each in study for run in each.runs]
        lacking = [run for each in study for run in each.runs_without_record]
        missing |= {run.name: run for run in missing_training_runs(runs_of_study, lacking)}
    measured = dict.fromkeys(
        run.name for each in conditions for record in each.measured_records for run in record.runs
    )
    frame = frame_with_holm(verdicts)
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


def claim_columns(claim: Claim) -> dict[str, Any]:
    """Returns the columns that are a claim's own."""
    names = ("row", "headline", "says", "source", "published", "rule", "what")
    own = {name: getattr(claim, name) for name in names}
    named = {"claim": claim.id, "published_number": claim.number, "rule_digest": rule_digest(claim)}
    return {**own, **named, "interval": "", "runs": []}


def frame_with_holm(verdicts: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Returns verdicts as a table, with the p-values of headlines adjusted by Holm.

    A headline counts once, on the published configuration, where that is among its conditions. A verdict that is not
    significant then becomes undecided.
    """
    import numpy
    import pandas

    from circuits.statistics import holm_adjusted

    published = {row["claim"] for row in verdicts if row["is_published"]}
    rows = [
        {**row, "headline": row["headline"] and (row["is_published"] or row["claim"] not in published)}
        for row in verdicts
    ]
    tested = [row for row in rows if row["headline"] and row.get("p") is not None]
    adjusted = holm_adjusted(numpy.array([row["p"] for row in tested], float)).tolist()
    for row, p in zip(tested, adjusted, strict=True):
        row["p_holm"] = p
        if p >= ALPHA and row["verdict"] in ("held", "failed"):
            reason = (
                f"not after Holm's correction over {len(tested)} headline verdicts: {row['verdict']} alone"
            )
            row.update(verdict="undecided", reason=join_remarks(reason, row["reason"]))
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    frame = frame.astype({"n_runs": "Int64", **dict.fromkeys(NUMBERS, float)})
    return frame.replace({"at_least": -math.inf, "at_most": math.inf}, math.nan)
