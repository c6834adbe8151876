"""What a study's claims are decided on: the records of its runs and controls, and which runs are missing."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from interp_tasks.published import Study, TrainingRun
from interp_tasks.recipes.spec import seed_numbers
from interp_tasks.reproduction.claim_numbers import Seed, Seeds
from interp_tasks.reproduction.records import Key, MeasuredRun, Record, together_name


@dataclass(frozen=True)
class RunEvidence:
    """What is known of one run, or of all runs of a role together: its record, or which runs are missing.

    Attributes:
        condition: shared by runs that a claim is decided on together.
        unfit: why nothing can be tested on it.
        published: whether it is of the paper's own configuration.
    """

    name: str
    condition: str
    record: Record | None = None
    lacking: tuple[TrainingRun, ...] = ()
    unfit: str = ""
    published: bool = False

    @property
    def is_measured(self) -> bool:
        return self.record is not None and not self.record.refused

    @property
    def runs(self) -> tuple[MeasuredRun, ...]:
        return () if self.record is None else self.record.runs

    @property
    def reason(self) -> str:
        """Returns why the study could not be done."""
        return self.unfit or (self.record.refused if self.record is not None else "")


@dataclass(frozen=True)
class Evidence:
    """Everything that a study's claims are decided on.

    Attributes:
        entries: of the runs that the paper's file plans at this scale.
        controls: by name, their entries.
        seeds: which training runs are seeds of each other.
    """

    study: Study
    entries: tuple[RunEvidence, ...]
    controls: Mapping[str, tuple[RunEvidence, ...]]
    seeds: Seeds

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
        playing = [run for run in runs if run.role == study.role]
        entries = entries_of(study, playing, configs, records)
        controls = {
            control: tuple(
                RunEvidence(
                    entry.name,
                    entry.condition,
                    records.get((study.id, key_name(study, entry, playing[0].preset), control)),
                )
                for entry in entries
            )
            for control in ("untrained", "memorised")
        }
        shuffled = [run for run in runs if run.role == study.shuffled]
        controls["shuffled"] = tuple(
            RunEvidence(name, "", record)
            for run in shuffled
            for name in names_of(run).values()
            if (record := records.get((study.id, name, "shuffled"))) is not None
        )
        seeds = {
            name: Seed(configs[run.name], seed)
            for run in (*playing, *shuffled)
            for seed, name in names_of(run).items()
        }
        # A folder may hold more seeds than are planned.
        seeds |= {run.name: Seed(run.config, run.seed) for entry in entries for run in entry.runs}
        return cls(study, tuple(entries), controls, seeds)


def key_name(study: Study, entry: RunEvidence, preset: str) -> str:
    return together_name(study.role, preset) if study.together else entry.name


def names_of(run: TrainingRun) -> dict[int, str]:
    """Returns the name of each training run of a section of the paper's file, by its seed."""
    if run.seeds is None:
        return {int(run.settings.get("train.seed", 0)): run.name}
    return {seed: f"{run.name}/seed-{seed}" for seed in seed_numbers(run.seeds)}


def entries_of(
    study: Study, playing: Sequence[TrainingRun], configs: Mapping[str, str], records: Mapping[Key, Record]
) -> list[RunEvidence]:
    """Returns an entry for each training run of a role, or one for all where the study looks at them together."""
    if study.together:
        if not playing:
            return []
        record = records.get((study.id, together_name(study.role, playing[0].preset), ""))
        there = set() if record is None else {run.name for run in record.runs}
        lacking = tuple(each for run in playing for each in lacking_of(run, there))
        return [RunEvidence(playing[0].name if len(playing) == 1 else study.role, "", record, lacking)]
    entries = []
    for run in playing:
        config = configs[run.name]
        if run.untestable:
            entries.append(RunEvidence(run.name, config, unfit=run.untestable, published=run.published))
            continue
        found = {name: records.get((study.id, name, "")) for name in names_of(run).values()}
        # A record of other settings is of another run.
        fitting = {
            name: record
            for name, record in found.items()
            if record is not None and all(each.config == config for each in record.runs)
        }
        entries += [
            RunEvidence(name, config, record, published=run.published) for name, record in fitting.items()
        ]
        entries += [
            RunEvidence(each.name, config, lacking=(each,), published=run.published)
            for each in lacking_of(run, fitting)
        ]
    return entries


def lacking_of(run: TrainingRun, there: Container[str]) -> list[TrainingRun]:
    """Returns a run whose records are missing: as a whole where none of its seeds has one, otherwise seed by seed."""
    names = names_of(run)
    lacking = {seed: name for seed, name in names.items() if name not in there}
    if run.seeds is None or len(lacking) == len(names):
        return [run] if lacking else []
    return [
        run.model_copy(
            update={
                "name": name,
                "seeds": None,
                "settings": {**run.settings, "train.seed": seed},
                "hours": run.hours / len(names),
            }
        )
        for seed, name in lacking.items()
    ]
