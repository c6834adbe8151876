"""Measures: calls the experiments of a paper's studies on runs, and keeps what claims read as records."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_reader import stored_steps
from interp_tasks.errors import UserError
from interp_tasks.measurement.options_and_examples import Progress
from interp_tasks.pages import package_versions
from interp_tasks.published import Claim, Paper, Study, read_paper
from interp_tasks.published.paper_schema import Control
from interp_tasks.reproduction.claim_verdicts import Rows, filter_rows
from interp_tasks.reproduction.runs_and_records import (
    KEPT,
    VARIANCE,
    Key,
    PaperRun,
    RunIdentity,
    StudyRecord,
    config_of_run,
    matrix_entry_variance,
    read_own_and_shipped_records,
    read_records_file,
    read_run_config,
    record_differences,
    role_record_name,
    stored_runs,
    study_digest,
    write_records,
)

if TYPE_CHECKING:
    import pandas


#: Untrained models of one condition.
MAX_CONTROLS = 3


@dataclass(frozen=True)
class StudyJob:
    """A study on one run, or on all runs of its role.

    Attributes:
        claims: those of the study.
        control: what is read in the place of these runs' checkpoints; empty: themselves.
    """

    study: Study
    claims: tuple[Claim, ...]
    on: tuple[PaperRun, ...]
    control: Control | None = None

    @property
    def key(self) -> Key:
        first = self.on[0]
        name = role_record_name(self.study.role, first.run.preset) if self.study.together else first.name
        return self.study.id, name, self.control or ""

    def run_identities(self) -> tuple[RunIdentity, ...]:
        """Returns the training runs that it is on."""
        return tuple(
            RunIdentity(each.name, each.seed, read_run_config(each.path)["train"]["steps"], each.config)
            for each in self.on
        )

    def is_recorded(self, stored: Mapping[Key, StudyRecord]) -> bool:
        """Returns whether there is a record of it, on exactly these runs."""
        record = stored.get(self.key)
        return record is not None and set(record.runs) == set(self.run_identities())

    def run_study(self, refs: Sequence[str]) -> pandas.DataFrame:
        """Returns the study's table on checkpoints or runs; ``{trained}`` in its settings is the trained run."""
        from interp_tasks import experiments

        settings = {
            name: value.replace("{trained}", self.on[0].base) if isinstance(value, str) else value
            for name, value in self.study.settings.items()
        }
        frame: pandas.DataFrame = getattr(experiments, self.study.experiment)(refs, **settings).frame
        return frame


def measure(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    file: str | Path,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[StudyRecord]:
    """Measures the runs at hand that have no record yet, and adds their records to a file.

    Args:
        paper: a name (``interp_tasks.published.paper_names()``), or a paper of your own.
        preset: the scale: ``cpu``, ``reference`` or ``paper``.
        file: where records are added (JSON Lines), each as it comes; what ships is not measured again.
        runs: where to look for runs that are not shipped, and for your own in place of those.
        rows: only studies of these experiments of the paper.

    Raises:
        UserError: for a folder that holds another run than the paper's.
    """
    paper, file = read_paper(paper) if isinstance(paper, str) else paper, Path(file)
    stored, own = read_own_and_shipped_records(paper, file), read_records_file(file)
    jobs = [job for job in all_jobs(paper, preset, runs, rows) if not job.is_recorded(stored)]

    def store_record(record: StudyRecord) -> None:
        own[record.key] = record
        write_records(file, own.values())

    return perform_jobs(jobs, Path(runs), progress, store_record)


def compare_records_with_runs(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    file: str | Path | None = None,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[str]:
    """Measures the runs at hand again, and returns a line for everything that their records have otherwise.

    A record of weights that are not at hand, such as those of a run that ships its log alone, is not checked.
    """
    paper = read_paper(paper) if isinstance(paper, str) else paper
    stored = read_own_and_shipped_records(paper, None if file is None else Path(file))
    jobs = {job.key: job for job in all_jobs(paper, preset, runs, rows) if job.is_recorded(stored)}
    without_weights = {
        key for key, job in jobs.items() if not all(stored_steps(each.path) for each in job.on)
    }
    return [
        line
        for record in perform_jobs([*jobs.values()], Path(runs), progress)
        if not (record.refused and record.key in without_weights)
        for line in record_differences(
            *(keep_rows_of_claims(each, jobs[record.key]) for each in (stored[record.key], record))
        )
    ]


def keep_rows_of_claims(record: StudyRecord, job: StudyJob) -> StudyRecord:
    """Returns a record with the rows that claims read alone, without those that say that a run was measured."""
    table: Rows = [{**dict.fromkeys(KEPT), **row} for row in record.row_dicts()]
    found = rows_of_claims(table, job.claims, job.control == "shuffled")
    columns, rows = record_columns_and_rows(found)
    return replace(record, columns=columns, rows=rows)


def all_jobs(paper: Paper, preset: str, runs_folder: str | Path, rows: Sequence[int]) -> list[StudyJob]:
    """Returns every study on every run at hand, and on every control that one of its claims asks for.

    Of each condition the first three runs have their untrained model: what they share is what is asked for.
    """
    stored = stored_runs(paper, preset, Path(runs_folder))
    jobs = []
    for study in paper.studies(rows):
        claims = tuple(claim for claim in paper.claim if claim.study == study.id)
        controls = {name for claim in claims for name in claim.control_names(study)}
        playing = [each for each in stored if each.run.role == study.role]
        shuffled = [each for each in stored if each.run.role == study.shuffled] if playing else []
        jobs += [StudyJob(study, claims, (each,), "shuffled") for each in shuffled if "shuffled" in controls]
        of_run: tuple[Control, ...] = ("untrained", "memorised")
        for control in (None, *(name for name in of_run if name in controls)):
            seen: Counter[str] = Counter()
            for on in [tuple(playing)] if study.together else [(each,) for each in playing]:
                seen[on[0].config if on else ""] += 1
                if on and (control is None or seen[on[0].config] <= MAX_CONTROLS):
                    jobs.append(StudyJob(study, claims, on, control))
    return jobs


def perform_jobs(
    jobs: Sequence[StudyJob],
    folder: Path,
    progress: Progress | None = None,
    on_record: Callable[[StudyRecord], None] = lambda record: None,
) -> list[StudyRecord]:
    """Runs all jobs, those of one run one after the other: what one study has found of it, the next one asks for.

    Args:
        on_record: called with each record as it comes, so that an interruption loses only what is under way.
    """
    records = []
    with TemporaryDirectory() as scratch:
        for at, job in enumerate(sorted(jobs, key=lambda job: job.key[1:]), 1):
            records.append(perform_job(job, Path(scratch), folder))
            on_record(records[-1])
            if progress is not None:
                progress(at, len(jobs), f"{job.study.id} on {job.key[1]}")
    return records


def perform_job(job: StudyJob, scratch: Path, folder: Path) -> StudyRecord:
    """Runs one job. Untrained models stay in ``scratch``."""
    from circuits import CircuitsError
    from tasks.errors import TaskError

    made = {
        "date": datetime.date.today().isoformat(),
        "device": "cpu",
        "dtype": "float32",
        **package_versions(),
    }
    record = StudyRecord(*job.key, job.run_identities(), study_digest(job.study), made)
    try:
        frame = run_study_at_every_mark(job) if job.control is None else run_study_on_control(job, scratch)
    except (UserError, TaskError, CircuitsError) as error:
        return replace(record, refused=strip_run_folder(str(error), folder))
    if any(claim.per == "variance" for claim in job.claims):
        frame = frame.assign(**{VARIANCE: [matrix_entry_variance(str(run)) for run in frame["run"]]})
    table: Rows = [
        {**row, "run": strip_run_folder(row["run"], folder), "ref": strip_run_folder(row["ref"], folder)}
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records")
    ]
    columns, rows = record_columns_and_rows(rows_to_record(table, job.claims, job.control == "shuffled"))
    return replace(record, columns=columns, rows=rows)


def rows_to_record(table: Rows, claims: Sequence[Claim], ignore_run_names: bool) -> Rows:
    """Returns what a record holds of a study's table: the rows of :func:`rows_of_claims`, and one of every run."""
    wanted = {id(row) for row in {row["run"]: row for row in reversed(table) if row["draw"] is None}.values()}
    wanted |= set(map(id, rows_of_claims(table, claims, ignore_run_names)))
    return [row for row in table if id(row) in wanted]


def rows_of_claims(table: Rows, claims: Sequence[Claim], ignore_run_names: bool) -> Rows:
    """Returns the rows of a study's table that its claims and their divisors name.

    Args:
        ignore_run_names: these runs stand for others, whose names claims ask for.
    """
    wanted: set[int] = set()
    for claim in claims:
        for where in (claim.where, *([claim.divisor()[1]] if isinstance(claim.per, dict) else [])):
            asked = {key: value for key, value in where.items() if key != "run" or not ignore_run_names}
            wanted |= set(map(id, filter_rows(table, asked)))
    return [row for row in table if id(row) in wanted]


def record_columns_and_rows(table: Rows) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Returns rows as a record holds them: columns that are not empty, ten digits a number."""
    from interp_tasks.measurement.result import json_value

    rows = [[json_value(row.get(name)) for name in KEPT] for row in table]
    filled = [at for at in range(len(KEPT)) if any(row[at] is not None for row in rows)]
    rows = [[float(f"{cell:.10g}") if isinstance(cell, float) else cell for cell in row] for row in rows]
    return tuple(KEPT[at] for at in filled), tuple(tuple(row[at] for at in filled) for row in rows)


def strip_run_folder(text: Any, folder: Path) -> Any:
    """Returns a text without where the runs that it names were."""
    return text.replace("zoo:", "").replace(f"{folder.as_posix()}/", "") if isinstance(text, str) else text


def run_study_at_every_mark(job: StudyJob) -> pandas.DataFrame:
    """Returns a job's table with the rows of a step under every mark of the study that means it.

    Experiments run a step once, under the first of its names: in a run that stores few, "onset" may be "pre" as well.
    Tables that name steps instead, as those of experiments over training do, stay as they are.
    """
    import pandas

    from interp_tasks.checkpoints import resolve

    asked = {each.base: [f"{each.base}@{mark}" for mark in job.study.at] for each in job.on}
    frame = job.run_study([ref for refs in asked.values() for ref in refs] or list(asked))
    tables, there = [frame], set(frame["ref"].dropna())
    for refs in asked.values():
        by_mark = frame[frame["ref"].isin(refs)]
        for ref in refs if len(by_mark) else ():
            if ref not in there:
                tables.append(by_mark[by_mark["step"] == resolve(ref)[0].step].assign(ref=ref))
    return pandas.concat(tables, ignore_index=True)


def run_study_on_control(job: StudyJob, scratch: Path) -> pandas.DataFrame:
    """Returns a study's table on models that should not pass, named as the runs and marks that they stand for."""
    import pandas

    # An untrained model has its first step alone, one trained on shuffled labels no drop to be named after.
    mark = {"untrained": "0", "memorised": str(job.study.memorised)}.get(str(job.control), "last")
    untrained = job.control == "untrained"
    stand_in = {untrained_run(each, scratch) if untrained else each.base: each.base for each in job.on}
    frame = job.run_study([f"{run}@{mark}" if job.study.at else run for run in stand_in])
    frame = frame.assign(run=frame["run"].replace(stand_in))

    def rename_run(ref: str, wanted: str | None) -> str:
        run, _, step = ref.rpartition("@")
        return ref if run not in stand_in else f"{stand_in[run]}@{wanted or step}"

    marks = job.study.at or (None,)
    copies = [frame.assign(ref=[rename_run(str(ref), wanted) for ref in frame["ref"]]) for wanted in marks]
    return pandas.concat(copies, ignore_index=True)


def untrained_run(run: PaperRun, scratch: Path) -> str:
    """Returns a folder with the model of a run before its first step: the same settings, no steps.

    It is made once and stays in ``scratch``, as nearly every study of a run asks for it.
    """
    from interp_tasks.training.train import train_resolved

    out = scratch / run.run.name / f"seed-{run.seed}"
    if not out.exists():
        train_resolved(config_of_run(run.run), out, seed=run.seed, steps=0)
    return out.as_posix()
