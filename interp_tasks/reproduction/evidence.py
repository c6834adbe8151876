"""Decides a claim on the records of its study's runs and controls, and says which runs are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from interp_tasks.published import Claim, Study, TrainingRun
from interp_tasks.recipes import seed_numbers
from interp_tasks.reproduction.numbers import Rows, Seed, Seeds, has_ending
from interp_tasks.reproduction.records import Key, Record, tables_of, together_name
from interp_tasks.reproduction.verdicts import Outcome, joined, judge


@dataclass(frozen=True)
class Entry:
    """A training run that the paper's file plans for a study, with the study's record of it.

    Attributes:
        config: the digest of its settings: runs that share it are one condition.
    """

    name: str
    seed: int
    run: TrainingRun
    config: str
    record: Record | None = None

    @property
    def is_measured(self) -> bool:
        return self.record is not None and not self.record.refused

    @property
    def is_missing(self) -> bool:
        return self.record is None and not self.run.untestable

    @property
    def reason(self) -> str:
        """Returns why the study could not be done."""
        return self.run.untestable or (self.record.refused if self.record is not None else "")


def names_of(run: TrainingRun) -> dict[int, str]:
    """Returns the name of each training run of a section of the paper's file, by its seed."""
    if run.seeds is None:
        return {int(run.settings.get("train.seed", 0)): run.name}
    return {seed: f"{run.name}/seed-{seed}" for seed in seed_numbers(run.seeds)}


def missing_runs(entries: Iterable[Entry]) -> list[TrainingRun]:
    """Returns the runs that have no record: as a whole where none of its seeds has one, otherwise seed by seed."""
    by_run: dict[str, list[Entry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run.name, []).append(entry)
    missing = []
    for several in by_run.values():
        run, lacking = several[0].run, [entry for entry in several if entry.is_missing]
        if len(lacking) == len(several):
            missing.append(run)
            continue
        missing += [
            run.model_copy(
                update={
                    "name": entry.name,
                    "seeds": None,
                    "settings": {**run.settings, "train.seed": entry.seed},
                    "hours": run.hours / len(several),
                }
            )
            for entry in lacking
        ]
    return missing


@dataclass(frozen=True)
class Evidence:
    """Everything that a study's claims are decided on: its runs and controls, and all records of the paper."""

    study: Study
    entries: tuple[Entry, ...]
    shuffled: tuple[Entry, ...]
    records: Mapping[Key, Record]

    @classmethod
    def of(
        cls,
        study: Study,
        runs: Sequence[TrainingRun],
        configs: Mapping[str, str],
        records: Mapping[Key, Record],
    ) -> Evidence:
        """Finds the records of a study's runs and controls.

        Args:
            runs: all that the paper's file plans at this scale.
            configs: the digest of each one's settings, by its name.
        """
        entries = {
            role: tuple(
                Entry(name, seed, run, configs[run.name])
                for run in runs
                if run.role == role
                for seed, name in names_of(run).items()
            )
            for role in (study.role, study.shuffled)
        }
        found = cls(study, entries[study.role], entries[study.shuffled] if study.shuffled else (), records)
        return replace(
            found, entries=tuple(replace(each, record=found.of_entry(each)) for each in found.entries)
        )

    def of_entry(self, entry: Entry, control: str = "") -> Record | None:
        """Returns the record of a run, or of a control that stands for it."""
        study = self.study
        if study.together and control != "shuffled":
            record = self.records.get((study.id, together_name(study.role, entry.run.preset), control))
            # It is of the runs that were there.
            is_of = record is not None and any(run.name == entry.name for run in record.runs)
            return record if is_of else None
        record = self.records.get((study.id, entry.name, control))
        if control or record is None:
            return record
        # A record of other settings is of another run.
        fits = not entry.run.untestable and all(run.config == entry.config for run in record.runs)
        return record if fits else None

    @property
    def seeds(self) -> Seeds:
        """Returns which training runs are seeds of each other."""
        planned = {entry.name: Seed(entry.config, entry.seed) for entry in (*self.entries, *self.shuffled)}
        # A folder may hold more seeds than are planned.
        there = [run for record in records_of(self.entries) for run in record.runs]
        return planned | {run.name: Seed(run.config, run.seed) for run in there}

    def outcomes(self, claim: Claim, preset: str) -> list[Outcome]:
        """Returns the outcome of a claim on each condition of its study."""
        conditions: dict[str, list[Entry]] = {}
        for entry in self.entries:
            conditions.setdefault("" if self.study.together else entry.config, []).append(entry)
        if "run" in claim.where and len(conditions) > 1:
            conditions = {
                key: entries
                for key, entries in conditions.items()
                if any(has_ending(entry.name, runs_named(claim)) for entry in entries)
            }
        if preset in claim.scale:
            name = next((self.condition_name(entries) for entries in conditions.values()), preset)
            return [Outcome(claim, name, 0, "not testable", reason=claim.scale[preset])]
        if not conditions:
            return [Outcome(claim, preset, 0, "not run", reason=f"no run is planned at the scale {preset}")]
        return [self.outcome(claim, entries) for entries in conditions.values()]

    def condition_name(self, entries: Sequence[Entry]) -> str:
        """Returns the name of a condition: that of its first run, without its seed; of runs of a role, the role."""
        if self.study.together and len({entry.run.name for entry in entries}) > 1:
            return self.study.role
        return re.sub(r"/seed-\d+$", "", entries[0].name)

    def outcome(self, claim: Claim, entries: Sequence[Entry]) -> Outcome:
        """Returns a claim on the runs of one condition."""
        name, published = self.condition_name(entries), any(entry.run.published for entry in entries)
        missing = [entry for entry in entries if entry.is_missing]
        about = [entry for entry in missing if has_ending(entry.name, runs_named(claim))]
        measured = records_of(entry for entry in entries if entry.is_measured)
        if not measured and not missing:
            # It is there, and the study cannot be done on it.
            return Outcome(claim, name, 0, "not testable", reason=entries[0].reason, published=published)
        if not measured or (self.study.together and about):
            hours = sum(run.hours for run in missing_runs(entries)) or None
            reason = joined("not measured", *refusals(entries))
            return Outcome(claim, name, 0, "not run", reason=reason, hours=hours, published=published)
        controls = self.controls(claim, entries, measured)
        tables = {key: rows for key, rows in controls.items() if not isinstance(rows, str)}
        outcome = judge(claim, tables_of(measured), name, self.seeds_with_shuffled(measured), tables)
        # A row of ``runs drops`` against a setting is of all runs.
        of_all = "run" not in claim.where or any(run.startswith("against ") for run in runs_named(claim))
        without = ", ".join(
            run.name.rpartition("/")[2]
            for run in missing_runs(entries)
            if of_all or any(entry.run.name == run.name or entry.name == run.name for entry in about)
        )
        reason = joined(
            outcome.reason,
            f"without runs that are not measured: {without}" if without else "",
            *(f"without {refused}" for refused in refusals(entries)),
            *(why for why in controls.values() if isinstance(why, str)),
        )
        return replace(outcome, reason=reason, published=published)

    def controls(
        self, claim: Claim, entries: Sequence[Entry], measured: Sequence[Record]
    ) -> dict[str, Rows | str]:
        """Returns the table of each control of a condition, or the line that says why there is none."""
        tables: dict[str, Rows | str] = {}
        for control in claim.control_names(self.study):
            of = self.shuffled if control == "shuffled" else entries
            records = records_of(replace(entry, record=self.of_entry(entry, control)) for entry in of)
            done = [record for record in records if not record.refused]
            if not done:
                why = records[0].refused if records else "no such run is there"
                tables[control] = f"not judged on its control, {control}: {why}"
                continue
            table = tables_of(done)
            if control == "shuffled":
                # They stand for the runs themselves, whose names claims and their divisors may ask for.
                # Where fewer runs are there, the others keep their names, as further seeds.
                names = [run.name for record in measured for run in record.runs]
                stand_in = dict(zip((record.on for record in done), names, strict=False))
                table = [{**row, "run": stand_in.get(row["run"], row["run"])} for row in table]
            tables[control] = table
        return tables

    def seeds_with_shuffled(self, measured: Sequence[Record]) -> Seeds:
        """Returns the identities of runs, where those on shuffled labels are seeds of the condition they stand for."""
        seeds = self.seeds
        names = [run.name for record in measured for run in record.runs]
        others = [entry.name for entry in self.shuffled if self.of_entry(entry, "shuffled")]
        condition = seeds[names[0]].condition
        return {**seeds, **{name: Seed(condition, seeds[name].seed) for name in others if name not in names}}


def records_of(entries: Iterable[Entry]) -> list[Record]:
    """Returns the records of runs, each once."""
    return list({entry.record.key: entry.record for entry in entries if entry.record is not None}.values())


def runs_named(claim: Claim) -> list[str]:
    """Returns the endings of the names of runs, globs among them, that a claim is about."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    return [name for one in given for name in (one if isinstance(one, list) else [str(one)])]


def refusals(entries: Iterable[Entry]) -> list[str]:
    """Returns on which runs a study cannot be done, and why: those together that lack the same."""
    names: dict[str, list[str]] = {}
    for record in records_of(entries):
        if record.refused:
            # What each of them has instead, and where its drop lies, is its own.
            reason = re.split(r": the nearest are| \(steps ", record.refused)[0].removeprefix(f"{record.on} ")
            names.setdefault(reason, []).append(record.on)
    return [f"{', '.join(runs)}: {reason}" for reason, runs in names.items()]
