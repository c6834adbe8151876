"""Reproduces a paper: judges its claims from the records of what was measured, and lists missing runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from interp_tasks.reproduction.claim_numbers import Rows, Seed, Seeds, has_ending
from interp_tasks.reproduction.evidence import Evidence, RunEvidence, names_of
from interp_tasks.reproduction.records import read_records, rule_of, tables_of
from interp_tasks.reproduction.runs import config_digest
from interp_tasks.reproduction.verdicts import CONTROLS, Outcome, judge

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Reproduction:
    """A paper's claims with their verdicts.

    Attributes:
        outcomes: one for each claim and condition (runs of a role that differ in their seed alone), or role, where a
            study looks at its runs together.
        missing: runs that studies lack, each once.
        measured: names of the training runs that verdicts rest on.
        rows: what it was limited to; empty: everything.
    """

    paper: Paper
    preset: str
    outcomes: tuple[Outcome, ...]
    missing: tuple[TrainingRun, ...] = field(repr=False)
    measured: tuple[str, ...] = field(repr=False)
    rows: tuple[int, ...] = ()
    folder: str = "runs"
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Returns a line for each claim whose number is not in its records."""
        return tuple(
            f"claim {each.claim.id} on {each.run}: {each.reason}"
            for each in self.outcomes
            if each.verdict == "error"
        )

    def frame(self) -> pandas.DataFrame:
        """Returns one row per outcome."""
        import pandas

        headlines = headline_outcomes(self.outcomes)
        rows = [
            {
                **{name: getattr(each.claim, name) for name in OF_CLAIM},
                **{name: getattr(each, name) for name in OF_OUTCOME},
                "claim": each.claim.id,
                "headline": each in headlines,
                "published_number": each.claim.number,
                "rule_digest": rule_of(each.claim),
                "value_ci_low": each.low,
                "value_ci_high": each.high,
                **dict(zip(("at_least", "at_most"), each.bounds or (), strict=False)),
                "runs": [{"run": name, "value": value} for name, value in each.runs],
                **dict(each.controls),
            }
            for each in self.outcomes
        ]
        types = {"n_runs": "Int64", **dict.fromkeys(NUMBERS, float)}
        frame = pandas.DataFrame(rows, columns=list(COLUMNS)).astype(types)
        return frame.replace({"at_least": -math.inf, "at_most": math.inf}, math.nan)

    def records(self) -> list[dict[str, Any]]:
        from interp_tasks.measurement.result import json_value

        return [
            {str(key): json_value(value) for key, value in row.items()}
            for row in self.frame().to_dict("records")
        ]

    def to_json(self) -> str:
        rows = (json.dumps(record, allow_nan=False, ensure_ascii=False) for record in self.records())
        return "[\n" + ",\n".join(rows) + "\n]\n"

    def to_csv(self) -> str:
        frame = self.frame()
        # A cell holds one text: the runs' own numbers, in their order.
        run_values = ["; ".join(f"{each['run']}: {each['value']}" for each in runs) for runs in frame["runs"]]
        text: str = frame.assign(runs=run_values).to_csv(index=False, lineterminator="\n")
        return text

    def page(self) -> Page:
        """Returns a page of the headlines, of all claims, of missing runs, and of the rules, by experiment."""
        import pandas

        paper, missing, frame = self.paper, self.missing, self.frame()
        outcomes = frame.to_dict("records")
        departures = "\n".join(f"- {line}" for line in paper.departures)
        introduction = (
            f"{paper.citation}, repeated at the scale {self.preset}. {pages.summary_of(outcomes)}\n\n"
            f"Measured on {len(self.measured)} training runs; {len(missing)} more are described but not measured. "
            f"Our models differ from theirs:\n\n{departures}"
        )
        stands_on = [outcome for _, several in pages.headlines(paper, outcomes) for outcome in several]
        needed = [
            {"run": run.name, "role": run.role, "hours": run.hours, "command": run.command(self.folder)}
            for run in missing
        ]
        by_row = frame.sort_values("headline", ascending=False, kind="stable").sort_values(
            "row", kind="stable"
        )
        tables = [
            Table(
                pandas.DataFrame(stands_on),
                "Headlines",
                pages.HEADLINES_NOTE,
                pages.HEADLINES,
                f"{paper.name}-headlines",
            ),
            Table(
                by_row, "Claims", pages.CLAIMS_NOTE, pages.CLAIMS, name=f"{paper.name}-claims", download=frame
            ),
            Table(
                pandas.DataFrame(needed),
                "Not measured",
                pages.MISSING_NOTE,
                pages.MISSING,
                name="not-measured",
            ),
        ]
        decided, shown = set(frame["claim"]), self.rows
        sections: list[Section] = [
            Text(introduction),
            *(table for table in tables if len(table.frame)),
            *(pages.rules(paper, row, decided) for row in paper.row if not shown or row.number in shown),
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


#: Columns that are attributes of the claim, and of the outcome; and numbers, NaN where there is none.
OF_CLAIM = ("row", "says", "source", "published", "rule", "what")
OF_OUTCOME = ("run", "n_runs", "interval", "verdict", "reason", "value", "median", "p", "p_holm", "hours")
NUMBERS = (
    *OF_OUTCOME[5:],
    *("published_number", "value_ci_low", "value_ci_high", "at_least", "at_most"),
    *CONTROLS,
)
COLUMNS = (
    *("row", "claim", "headline", "says", "source", "published", "published_number", "rule", "rule_digest"),
    *("run", "n_runs", "value", "value_ci_low", "value_ci_high", "median", "at_least", "at_most", "what"),
    *("interval", "runs", *CONTROLS, "p", "p_holm", "verdict", "reason", "hours"),
)


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
    read = read_records(paper, None if records is None else Path(records))
    judged = [
        claim for claim in sorted(paper.claim, key=lambda claim: claim.row) if not rows or claim.row in rows
    ]
    planned = [run for run in paper.run if run.preset == preset]
    configs = {run.name: config_digest(run) for run in planned}
    evidence = {
        study.id: Evidence.of(study, planned, configs, read)
        for study in paper.study
        if any(claim.study == study.id for claim in judged)
    }
    outcomes = [outcome for claim in judged for outcome in decide(claim, evidence[claim.study], preset)]
    entries = [entry for each in evidence.values() for entry in each.entries]
    missing = {run.name: run for entry in entries for run in entry.lacking}
    measured = dict.fromkeys(run.name for entry in entries if entry.is_measured for run in entry.runs)
    return Reproduction(
        *(paper, preset, corrected(outcomes), tuple(missing.values()), tuple(measured), tuple(rows)),
        Path(runs).as_posix(),
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


def decide(claim: Claim, evidence: Evidence, preset: str) -> list[Outcome]:
    """Returns the outcome of a claim on each condition of its study."""
    conditions: dict[str, list[RunEvidence]] = {}
    for entry in evidence.entries:
        conditions.setdefault(entry.condition, []).append(entry)
    if not evidence.study.together and "run" in claim.where and len(conditions) > 1:
        conditions = {
            key: entries
            for key, entries in conditions.items()
            if any(has_ending(entry.name, runs_named(claim)) for entry in entries)
        }
    if preset in claim.scale:
        name = next((condition_name(entries) for entries in conditions.values()), preset)
        return [Outcome(claim, name, 0, "not testable", reason=claim.scale[preset])]
    if not conditions:
        return [Outcome(claim, preset, 0, "not run", reason=f"no run is planned at the scale {preset}")]
    return [decide_on(claim, evidence, entries) for entries in conditions.values()]


def condition_name(entries: Sequence[RunEvidence]) -> str:
    """Returns the name of a condition: that of its first run, without its seed."""
    return re.sub(r"/seed-\d+$", "", entries[0].name)


def decide_on(claim: Claim, evidence: Evidence, entries: Sequence[RunEvidence]) -> Outcome:
    """Returns a claim on the runs of one condition."""
    name, published = condition_name(entries), any(entry.published for entry in entries)
    measured = [entry for entry in entries if entry.is_measured]
    lacking = [run for entry in entries for run in entry.lacking]
    if measured and not (evidence.study.together and is_about(claim, lacking)):
        controls = controls_of(claim, evidence, entries)
        tables = {key: rows for key, rows in controls.items() if not isinstance(rows, str)}
        table = tables_of(entry.record for entry in measured if entry.record is not None)
        outcome = judge(claim, table, name, with_shuffled(evidence, measured), tables)
        without = ", ".join(run.name.rpartition("/")[2] for run in lacking if reads(claim, run))
        parts = [
            outcome.reason,
            f"without runs that are not measured: {without}" if without else "",
            *(f"without {refused}" for refused in refusals(entries)),
            *(why for why in controls.values() if isinstance(why, str)),
        ]
        return replace(outcome, reason="; ".join(filter(None, parts)), published=published)
    if not lacking:
        # It is there, and the study cannot be done on it.
        return Outcome(claim, name, 0, "not testable", reason=entries[0].reason, published=published)
    hours, reason = sum(run.hours for run in lacking) or None, "; ".join(["not measured", *refusals(entries)])
    return Outcome(claim, name, 0, "not run", reason=reason, hours=hours, published=published)


def is_about(claim: Claim, lacking: Sequence[TrainingRun]) -> bool:
    """Returns whether a claim is about one of these runs by name."""
    ends = runs_named(claim)
    return any(has_ending(name, ends) for run in lacking for name in names_of(run).values())


def reads(claim: Claim, run: TrainingRun) -> bool:
    """Returns whether a claim is about this run: by name, or as one of all that its study has."""
    # A row of ``runs drops`` against a setting is of all of them.
    is_of_all = "run" not in claim.where or any(name.startswith("against ") for name in runs_named(claim))
    return is_of_all or is_about(claim, [run])


def runs_named(claim: Claim) -> list[str]:
    """Returns the endings of the names of runs, globs among them, that a claim is about."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    return [name for one in given for name in (one if isinstance(one, list) else [str(one)])]


def refusals(entries: Sequence[RunEvidence]) -> list[str]:
    """Returns on which runs a study cannot be done, and why: those together that lack the same."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        if entry.record is not None and entry.record.refused:
            # What each of them has instead, and where its drop lies, is its own.
            reason = re.split(r": the nearest are| \(steps ", entry.reason)[0].removeprefix(f"{entry.name} ")
            names.setdefault(reason, []).append(entry.name)
    return [f"{', '.join(runs)}: {reason}" for reason, runs in names.items()]


def controls_of(claim: Claim, evidence: Evidence, entries: Sequence[RunEvidence]) -> dict[str, Rows | str]:
    """Returns the table of each control beside the runs of a condition, or the line that says why there is none."""
    tables: dict[str, Rows | str] = {}
    of_condition = {entry.name for entry in entries}
    names = [run.name for entry in entries if entry.is_measured for run in entry.runs]
    for control in claim.control_names(evidence.study):
        found = [
            each for each in evidence.controls[control] if control == "shuffled" or each.name in of_condition
        ]
        measured = [entry.record for entry in found if entry.record is not None and entry.is_measured]
        if not measured:
            reasons = [entry.reason for entry in found if entry.record is not None]
            why = reasons[0] if reasons else "no such run is there"
            tables[control] = f"not judged on its control, {control}: {why}"
            continue
        table = tables_of(measured)
        if control == "shuffled":
            # They stand for the runs themselves, whose names claims and their divisors may ask for.
            # Where fewer runs are there, the others keep their names, as further seeds (`with_shuffled`).
            stand_in = dict(zip((record.on for record in measured), names, strict=False))
            table = [{**row, "run": stand_in.get(row["run"], row["run"])} for row in table]
        tables[control] = table
    return tables


def with_shuffled(evidence: Evidence, measured: Sequence[RunEvidence]) -> Seeds:
    """Returns the identities of runs, where those on shuffled labels are seeds of the condition they stand for."""
    names = [run.name for entry in measured for run in entry.runs if run.name in evidence.seeds]
    if not names:
        return evidence.seeds
    condition = evidence.seeds[names[0]].condition
    others = [entry.name for entry in evidence.controls["shuffled"] if entry.name not in names]
    return {**evidence.seeds, **{name: Seed(condition, evidence.seeds[name].seed) for name in others}}


def headline_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the outcomes that a paper's headlines are decided on."""
    published = {each.claim.id for each in outcomes if each.published}
    return [
        each
        for each in outcomes
        if each.claim.headline and (each.published or each.claim.id not in published)
    ]


def corrected(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Adjusts the headline p-values by Holm; a verdict that is not significant then becomes undecided.

    A headline counts once, on the published configuration, where that is among its conditions.
    """
    import numpy

    from circuits.statistics import holm

    headlines = headline_outcomes(outcomes)
    tested = [index for index, each in enumerate(outcomes) if each in headlines and each.p is not None]
    adjusted = list(outcomes)
    p_values = numpy.array([outcomes[each].p for each in tested], float)
    for index, p in zip(tested, holm(p_values).tolist(), strict=True):
        one = replace(adjusted[index], p_holm=p)
        if p >= ALPHA and one.verdict in ("held", "failed"):
            reason = f"not after Holm's correction over {len(tested)} headline verdicts: {one.verdict} alone"
            one = replace(one, verdict="undecided", reason="; ".join(filter(None, (reason, one.reason))))
        adjusted[index] = one
    return tuple(adjusted)
