"""Measures: calls the experiments of a paper's studies on runs, and keeps what claims read as records."""

from __future__ import annotations

import datetime
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_files import stored_steps
from interp_tasks.measurement.subjects import Progress
from interp_tasks.pages import versions
from interp_tasks.published import Claim, Paper, Study, read_paper
from interp_tasks.published.paper import Control
from interp_tasks.reproduction.numbers import Rows
from interp_tasks.reproduction.records import (
    VARIANCE,
    Key,
    MeasuredRun,
    Record,
    columns_and_rows,
    differences,
    method_of,
    read_by_claims,
    read_file,
    read_records,
    table_rows,
    together_name,
    write_records,
)
from interp_tasks.reproduction.runs import StoredRun, config_of_run, config_there, entry_variance, locate_all

if TYPE_CHECKING:
    import pandas


#: Untrained models of one condition.
MAX_CONTROLS = 3
#: Controls that are a checkpoint of the run itself, or of its model before training.
OF_THE_RUN: tuple[Control, ...] = ("untrained", "memorised")


@dataclass(frozen=True)
class Job:
    """A study on one run, or on all runs of its role.

    Attributes:
        claims: those of the study.
        control: what is read in the place of these runs' checkpoints; empty: themselves.
    """

    study: Study
    claims: tuple[Claim, ...]
    on: tuple[StoredRun, ...]
    control: Control | None = None

    @property
    def name(self) -> str:
        """Returns the name of the run, or of all runs of a role, as records have it."""
        first = self.on[0]
        return together_name(self.study.role, first.run.preset) if self.study.together else first.name

    @property
    def key(self) -> Key:
        return self.study.id, self.name, self.control or ""

    def runs(self) -> tuple[MeasuredRun, ...]:
        """Returns the training runs that it is on."""
        return tuple(
            MeasuredRun(each.name, each.seed, config_there(each.path)["train"]["steps"], each.config)
            for each in self.on
        )

    def table(self, refs: Sequence[str]) -> pandas.DataFrame:
        """Returns the study's table on checkpoints or runs; ``{trained}`` in its settings is the trained run."""
        from interp_tasks import experiments

        settings = {
            name: value.replace("{trained}", self.on[0].base) if isinstance(value, str) else value
            for name, value in self.study.settings.items()
        }
        frame: pandas.DataFrame = getattr(experiments, self.study.experiment)(refs, **settings).frame
        return frame


@dataclass(frozen=True)
class Measured:
    """The records of all that was measured, and a line for each study that failed by a fault of ours."""

    records: tuple[Record, ...]
    crashes: tuple[str, ...] = ()


def measure(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    file: str | Path,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    progress: Progress | None = None,
) -> Measured:
    """Measures the runs at hand that have no record yet, and adds their records to a file.

    Args:
        paper: a name (``interp_tasks.published.papers()``), or a paper of your own.
        preset: the scale: ``cpu``, ``reference`` or ``paper``.
        file: where records are added (JSON Lines); what ships is not measured again.
        runs: where to look for runs that are not shipped, and for your own in place of those.
        rows: only studies of these experiments of the paper.

    Raises:
        UserError: for a folder that holds another run than the paper's.
    """
    paper, file = read_paper(paper) if isinstance(paper, str) else paper, Path(file)
    stored = read_records(paper, file)
    jobs = [job for job in all_jobs(paper, preset, runs, rows) if not is_recorded(job, stored)]
    own = read_file(file)

    def keep(record: Record) -> None:
        own[record.key] = record
        write_records(file, own.values())

    return perform_all(jobs, Path(runs), progress, keep)


def check_records(
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
    stored = read_records(paper, None if file is None else Path(file))
    jobs = [job for job in all_jobs(paper, preset, runs, rows) if is_recorded(job, stored)]
    measured = perform_all(jobs, Path(runs), progress)
    without_weights = {job.key for job in jobs if not all(stored_steps(each.path) for each in job.on)}
    found = [
        line
        for record in measured.records
        if not (record.refused and record.key in without_weights)
        for line in differences(stored[record.key], record)
    ]
    return [*found, *measured.crashes]


def all_jobs(paper: Paper, preset: str, runs: str | Path, rows: Sequence[int]) -> list[Job]:
    """Returns every study on every run at hand, and on every control that one of its claims asks for.

    Of each condition the first three runs have their untrained model: what they share is what is asked for.

    Args:
        rows: experiments of the paper whose studies these are; none: all.
    """
    stored = locate_all(paper, preset, Path(runs))
    jobs = []
    for study in paper.study:
        claims = tuple(claim for claim in paper.claim if claim.study == study.id)
        playing = [each for each in stored if each.run.role == study.role]
        if not study.together:
            playing = [each for each in playing if not each.run.untestable]
        if not playing or (rows and not set(rows) & set(study.rows)):
            continue
        controls = {name for claim in claims for name in claim.control_names(study)}
        for control in (None, *(name for name in OF_THE_RUN if name in controls)):
            if study.together:
                jobs.append(Job(study, claims, tuple(playing), control))
                continue
            seen: Counter[str] = Counter()
            for each in playing:
                seen[each.config] += 1
                if control is None or seen[each.config] <= MAX_CONTROLS:
                    jobs.append(Job(study, claims, (each,), control))
        if "shuffled" in controls:
            shuffled = [each for each in stored if each.run.role == study.shuffled]
            jobs += [Job(study, claims, (each,), "shuffled") for each in shuffled]
    return jobs


def is_recorded(job: Job, stored: Mapping[Key, Record]) -> bool:
    """Returns whether there is a record of this job, on exactly these runs."""
    record = stored.get(job.key)
    return record is not None and set(record.runs) == set(job.runs())


def perform_all(
    jobs: Sequence[Job],
    folder: Path,
    progress: Progress | None = None,
    keep: Callable[[Record], None] | None = None,
) -> Measured:
    """Runs all jobs, those of one run one after the other: what one study has found of it, the next one asks for.

    Args:
        keep: called with each record as it comes, so that an interruption loses only what is under way.
    """
    records: list[Record] = []
    crashes: list[str] = []
    with TemporaryDirectory() as scratch:
        for at, job in enumerate(sorted(jobs, key=lambda job: (job.name, job.control or "")), 1):
            one = perform(job, Path(scratch), folder)
            if isinstance(one, str):
                crashes.append(one)
            else:
                records.append(one)
                if keep is not None:
                    keep(one)
            if progress is not None:
                progress(at, len(jobs), f"{job.study.id} on {job.name}")
    return Measured(tuple(records), tuple(crashes))


def perform(job: Job, scratch: Path, folder: Path) -> Record | str:
    """Runs one job; returns a line for a fault of ours, which stops no other. Untrained models stay in ``scratch``."""
    from circuits import CircuitsError
    from interp_tasks.errors import UserError
    from tasks.errors import TaskError

    made = {"date": datetime.date.today().isoformat(), "device": "cpu", "dtype": "float32", **versions()}
    record = Record(job.study.id, job.name, job.control or "", job.runs(), method_of(job.study), made)
    try:
        frame = under_every_mark(job) if job.control is None else on_control(job, scratch)
    except (UserError, TaskError, CircuitsError) as error:
        return replace(record, refused=plain(str(error), folder))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        return " ".join(f"study {job.study.id} on {job.name}: {reason}".split())
    if any(claim.per == "variance" for claim in job.claims):
        frame = frame.assign(**{VARIANCE: [entry_variance(str(run)) for run in frame["run"]]})
    table: Rows = [
        {**row, "run": plain(row["run"], folder), "ref": plain(row["ref"], folder)}
        for row in table_rows(frame)
    ]
    columns, rows = columns_and_rows(read_by_claims(table, job.claims, job.control == "shuffled"))
    return replace(record, columns=columns, rows=rows)


def plain(text: Any, folder: Path) -> Any:
    """Returns a text without where the runs that it names were."""
    return text.replace("zoo:", "").replace(f"{folder.as_posix()}/", "") if isinstance(text, str) else text


def under_every_mark(job: Job) -> pandas.DataFrame:
    """Returns a job's table with the rows of a step under every mark of the study that means it.

    Experiments run a step once, under the first of its names: in a run that stores few, "onset" may be "pre" as well.
    Tables that name steps instead, as those of experiments over training do, stay as they are.
    """
    import pandas

    from interp_tasks.checkpoints import resolve

    asked = {each.base: [f"{each.base}@{mark}" for mark in job.study.at] for each in job.on}
    frame = job.table([ref for refs in asked.values() for ref in refs] or list(asked))
    tables, there = [frame], set(frame["ref"].dropna())
    for refs in asked.values():
        by_mark = frame[frame["ref"].isin(refs)]
        for ref in refs if len(by_mark) else ():
            if ref not in there:
                tables.append(by_mark[by_mark["step"] == resolve(ref)[0].step].assign(ref=ref))
    return pandas.concat(tables, ignore_index=True)


def on_control(job: Job, scratch: Path) -> pandas.DataFrame:
    """Returns a study's table on models that should not pass, named as the runs and marks that they stand for."""
    import pandas

    # An untrained model has its first step alone, one trained on shuffled labels no drop to be named after.
    mark = {"untrained": "0", "memorised": str(job.study.memorised)}.get(str(job.control), "last")
    stand_in = {
        untrained(each, scratch) if job.control == "untrained" else each.base: each.base for each in job.on
    }
    frame = job.table([f"{run}@{mark}" if job.study.at else run for run in stand_in])
    frame = frame.assign(run=frame["run"].replace(stand_in))

    def renamed(ref: str, wanted: str | None) -> str:
        run, _, step = ref.rpartition("@")
        return ref if run not in stand_in else f"{stand_in[run]}@{wanted or step}"

    copies = [
        frame.assign(ref=[renamed(str(ref), wanted) for ref in frame["ref"]])
        for wanted in job.study.at or (None,)
    ]
    return pandas.concat(copies, ignore_index=True)


def untrained(of: StoredRun, scratch: Path) -> str:
    """Returns a folder with the model of a run before its first step: the same settings, no steps.

    It is made once and stays in ``scratch``, as nearly every study of a run asks for it.
    """
    from interp_tasks.training.trainer import train_resolved

    out = scratch / of.run.name / f"seed-{of.seed}"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        # Another process may make the same one: what stands at its place is whole, whoever is first.
        made = Path(mkdtemp(dir=scratch)) / "run"
        train_resolved(config_of_run(of.run), made, seed=of.seed, steps=0)
        try:
            made.rename(out)
        except OSError:
            if not out.exists():
                raise
    return out.as_posix()
