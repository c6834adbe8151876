"""Reproduces a paper: judges its claims from the records of what was measured, and lists missing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.disk import atomic_write
from interp_tasks.errors import UserError
from interp_tasks.measurement.intervals import ALPHA
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import Page, Section, Table, Text, versions
from interp_tasks.published import Paper, TrainingRun, read_paper
from interp_tasks.published.paper import PRESETS
from interp_tasks.reproduction import page as pages
from interp_tasks.reproduction.evidence import Evidence, missing_runs, records_of
from interp_tasks.reproduction.records import read_records, rule_of
from interp_tasks.reproduction.runs import config_digest
from interp_tasks.reproduction.verdicts import CONTROLS, Outcome, joined

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
    outcomes = [outcome for claim in judged for outcome in evidence[claim.study].outcomes(claim, preset)]
    missing = {run.name: run for each in evidence.values() for run in missing_runs(each.entries)}
    records_read = [
        record for each in evidence.values() for record in records_of(each.entries) if not record.refused
    ]
    measured = dict.fromkeys(run.name for record in records_read for run in record.runs)
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
            one = replace(one, verdict="undecided", reason=joined(reason, one.reason))
        adjusted[index] = one
    return tuple(adjusted)
