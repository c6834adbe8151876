"""Finds the runs and records that a study's claims are decided on: conditions, their controls, what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from interp_tasks.published import Claim, Study, TrainingRun
from interp_tasks.reproduction.numbers import Rows, has_ending
from interp_tasks.reproduction.records import Key, Record, table_of, together_name
from interp_tasks.reproduction.runs import PaperRun
from interp_tasks.reproduction.verdicts import CONTROLS, joined, judge


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
    stored: Mapping[Key, Record]

    @property
    def name(self) -> str:
        """Returns that of its first run, without its seed; of several runs of a role, the role."""
        if self.study.together and len({each.run.name for each in self.runs}) > 1:
            return self.study.role
        return re.sub(r"/seed-\d+$", "", self.runs[0].name)

    def record_of(self, run: PaperRun, control: str = "") -> Record | None:
        """Returns the record of a run, or of a control that stands for it; of other settings it is of another run."""
        is_together = self.study.together and control != "shuffled"
        on = together_name(self.study.role, run.run.preset) if is_together else run.name
        record = self.stored.get((self.study.id, on, control))
        identities = [] if record is None else [(each.name, each.config) for each in record.runs]
        return record if (run.name, run.config) in identities else None

    def records(self, control: str = "") -> list[Record]:
        """Returns the records of its runs, or of its controls, each once."""
        runs = self.shuffled if control == "shuffled" else self.runs
        found = [self.record_of(each, control) for each in runs]
        return list({record.key: record for record in found if record is not None}.values())

    @cached_property
    def measured(self) -> list[Record]:
        return [record for record in self.records() if not record.refused]

    @cached_property
    def missing(self) -> list[PaperRun]:
        return [each for each in self.runs if self.record_of(each) is None]

    @cached_property
    def table(self) -> Rows:
        return table_of(self.measured)

    @cached_property
    def controls(self) -> dict[str, Rows | str]:
        """Returns the table of each control, or the line that says why there is none."""
        found: dict[str, Rows | str] = {}
        for control in CONTROLS:
            records = self.records(control)
            done = [record for record in records if not record.refused]
            why = records[0].refused if records else "no such run is there"
            found[control] = table_of(done) if done else f"not judged on its control, {control}: {why}"
            if done and control == "shuffled":
                # They stand for the runs themselves, whose names claims may ask for.
                names = [run.name for record in self.measured for run in record.runs]
                stand_in = dict(zip((each.on for each in done), names, strict=False))
                found[control] = [
                    {**row, "run": stand_in.get(row["run"], row["run"])} for row in table_of(done)
                ]
        return found

    def verdict(self, claim: Claim) -> dict[str, Any]:
        """Returns the row of a claim: its verdict on these runs, or why there is none."""
        row: dict[str, Any] = {
            "run": self.name,
            "n_runs": 0,
            "is_published": any(each.run.published for each in self.runs),
        }
        refused = refusals(self.records())
        if not self.measured and not self.missing:
            # They are there, and the study cannot be done on them.
            return row | {"verdict": "not testable", "reason": self.records()[0].refused}
        lacks_one = any(has_ending(each.name, runs_named(claim)) for each in self.missing)
        if not self.measured or (self.study.together and lacks_one):
            hours = sum(run.hours for run in missing_runs(self.runs, self.missing)) or None
            return row | {"verdict": "not run", "reason": joined("not measured", *refused), "hours": hours}
        controls: dict[str, Rows | str] = {
            name: self.controls[name] for name in claim.control_names(self.study)
        }
        tables = {name: table for name, table in controls.items() if not isinstance(table, str)}
        row |= judge(claim, self.table, tables)
        without = [why for why in controls.values() if isinstance(why, str)]
        return row | {"reason": joined(row["reason"], *(f"without {each}" for each in refused), *without)}


def conditions_of(study: Study, planned: Sequence[PaperRun], stored: Mapping[Key, Record]) -> list[Condition]:
    """Returns the conditions of a study, of the runs that the paper's file plans at a scale."""
    groups: dict[str, list[PaperRun]] = {}
    for each in planned:
        if each.run.role == study.role:
            groups.setdefault("" if study.together else each.config, []).append(each)
    shuffled = tuple(each for each in planned if each.run.role == study.shuffled)
    return [Condition(study, tuple(runs), shuffled, stored) for runs in groups.values()]


def verdicts_of(claim: Claim, conditions: Sequence[Condition], preset: str) -> list[dict[str, Any]]:
    """Returns the row of a claim on each condition of its study, of those that it names where it names runs."""
    if "run" in claim.where and len(conditions) > 1:
        named = runs_named(claim)
        conditions = [each for each in conditions if any(has_ending(run.name, named) for run in each.runs)]
    none = {"run": conditions[0].name if conditions else preset, "n_runs": 0, "is_published": False}
    if preset in claim.scale:
        return [none | {"verdict": "not testable", "reason": claim.scale[preset]}]
    if not conditions:
        return [none | {"verdict": "not run", "reason": f"no run is planned at the scale {preset}"}]
    return [condition.verdict(claim) for condition in conditions]


def missing_runs(planned: Iterable[PaperRun], missing: Sequence[PaperRun]) -> list[TrainingRun]:
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


def runs_named(claim: Claim) -> list[str]:
    """Returns the endings of the names of runs, globs among them, that a claim is about."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    return [name for one in given for name in (one if isinstance(one, list) else [str(one)])]


def refusals(records: Iterable[Record]) -> list[str]:
    """Returns on which runs a study cannot be done, and why: those together that lack the same."""
    names: dict[str, list[str]] = {}
    for record in records:
        if record.refused:
            # What each of them has instead, and where its drop lies, is its own.
            reason = re.split(r": the nearest are| \(steps ", record.refused)[0].removeprefix(f"{record.on} ")
            names.setdefault(reason, []).append(record.on)
    return [f"{', '.join(runs)}: {reason}" for reason, runs in names.items()]
