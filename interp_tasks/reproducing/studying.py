"""The calls of experiments that a paper's claims are read off, one after the other or on several processes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.published import Paper, Study
from interp_tasks.reproducing.locating import Located

if TYPE_CHECKING:
    from interp_tasks.experiments import Result


@dataclass(frozen=True)
class Job:
    """A study on one run, or on all runs of its role."""

    study: Study
    on: tuple[Located, ...]

    @property
    def name(self) -> str:
        """What the outcome calls what it was measured on."""
        return self.on[0].run.name if len(self.on) == 1 else self.study.role

    @property
    def count(self) -> int:
        """How many training runs it reads."""
        return sum(located.count for located in self.on)

    @property
    def missing(self) -> tuple[Located, ...]:
        return tuple(located for located in self.on if located.base is None)

    def refs(self) -> list[str]:
        there = [located.base for located in self.on if located.base is not None]
        return [f"{base}@{mark}" for base in there for mark in self.study.at] or there

    def settings(self) -> dict[str, Any]:
        """The keyword arguments, ``{run}`` filled in."""
        return {key: filled(value, self.on[0].base or "") for key, value in self.study.settings.items()}


def filled(value: Any, run: str) -> Any:
    if isinstance(value, str):
        return value.replace("{run}", run)
    if isinstance(value, list):
        return [filled(item, run) for item in value]
    return {key: filled(item, run) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class Done:
    """A job's result, or the line that says why there is none; ``crashed`` where that is a fault of ours."""

    job: Job
    result: Result | None
    reason: str = ""
    crashed: bool = False


def jobs_of(paper: Paper, located: Sequence[Located], rows: Sequence[int] = ()) -> list[Job]:
    """Every study, on every run of its role; ``rows`` limits them to studies of these rows."""
    found = []
    for study in paper.study:
        if rows and not set(rows) & set(study.rows):
            continue
        playing = [each for each in located if each.run.role == study.role]
        if study.together:
            found += [Job(study, tuple(playing))] if playing else []
        else:
            found += [Job(study, (each,)) for each in playing]
    return found


def perform(job: Job) -> Done:
    """Run one job. What goes wrong in it does not stop the others."""
    from circuits import CircuitsError
    from interp_tasks import experiments
    from interp_tasks.errors import UserError
    from tasks.base import TaskError

    if not job.refs():
        return Done(job, None, "not trained")
    try:
        call = getattr(experiments, job.study.experiment)
        return Done(job, call(job.refs(), **job.settings()))
    except (UserError, TaskError, CircuitsError) as error:
        return Done(job, None, str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        return Done(job, None, " ".join(reason.split()), crashed=True)


def perform_all(jobs: Sequence[Job], processes: int) -> Iterator[Done]:
    """Each job's result as it comes.

    With one process here; otherwise in fresh ones, of one thread each: small tensors gain nothing from a second.
    """
    if processes == 1 or len(jobs) < 2:
        yield from map(perform, jobs)
        return
    cut_off: list[Job] = []
    yield from together(jobs, processes, cut_off)
    # Where a process died, those beside it were cut off too: one by one it is known in which it does.
    for job in cut_off:
        died: list[Job] = []
        yield from together([job], 1, died)
        if died:
            yield Done(job, None, "its process died twice: it was killed, or memory ran out", crashed=True)


def together(jobs: Sequence[Job], processes: int, cut_off: list[Job]) -> Iterator[Done]:
    """Each job's result as it comes; jobs whose process died are added to ``cut_off``."""
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        futures = {}
        try:
            for job in jobs:
                try:
                    futures[pool.submit(perform, job)] = job
                except BrokenExecutor:
                    cut_off.append(job)
            for future in as_completed(futures):
                try:
                    yield future.result()
                except BrokenExecutor:
                    cut_off.append(futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def one_thread() -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    # As the command line does for its own process.
    warnings.simplefilter("ignore")
