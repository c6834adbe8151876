"""The calls of experiments that a paper's claims are read off, one after the other or on several processes."""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Drawn, Figure
from interp_tasks.published import Paper, Study, TrainingRun
from interp_tasks.published.paper import Control, as_typed
from interp_tasks.reproduction.runs import Located

if TYPE_CHECKING:
    import pandas

    from interp_tasks.experiments import Result

#: Untrained models of one condition.
MAX_CONTROLS = 3
#: Controls that are an earlier checkpoint of the run itself.
OF_THE_RUN: tuple[Control, ...] = ("untrained", "memorised")


@dataclass(frozen=True)
class Job:
    """A study on one run, or on all runs of its role.

    Attributes:
        control: what is read in the place of these runs' checkpoints; empty: themselves.
    """

    study: Study
    on: tuple[Located, ...]
    control: Control | None = None

    @property
    def name(self) -> str:
        """Returns the name of the run, or runs, for an outcome."""
        if self.study.together:
            return self.on[0].run.name if len(self.on) == 1 else self.study.role
        (one,) = self.on
        alone = one.run.seeds is None or one.base is None
        return one.run.name if alone else f"{one.run.name}/{str(one.base).rpartition('/')[2]}"

    @property
    def condition(self) -> str:
        """Returns the condition that its run shares with others that a claim is decided on together with it."""
        return "" if self.study.together else self.on[0].condition

    @property
    def missing(self) -> tuple[Located, ...]:
        return tuple(located for located in self.on if located.base is None)

    def refs(self) -> list[str]:
        bases = [located.base for located in self.on if located.base is not None]
        return [f"{base}@{mark}" for base in bases for mark in self.study.at] or bases

    def settings(self) -> dict[str, Any]:
        """Returns the keyword arguments, ``{run}`` and ``{trained}`` filled in."""
        base = self.on[0].base or ""
        return {key: filled(value, base, base) for key, value in self.study.settings.items()}


def filled(value: Any, run: str, trained: str) -> Any:
    """Returns a setting with ``{run}`` and ``{trained}`` filled in: they differ where a control stands for the run."""
    if isinstance(value, str):
        return value.replace("{run}", run).replace("{trained}", trained)
    if isinstance(value, list):
        return [filled(item, run, trained) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, run, trained) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Done:
    """A job's result, or the line that says why there is none; ``crashed`` where that is a fault of ours.

    Attributes:
        drawn: its figure, where a process of its own has run the job.
    """

    job: Job
    result: Result | None
    reason: str = ""
    crashed: bool = False
    drawn: Drawn | None = None


def jobs_of(paper: Paper, located: Sequence[Located], rows: Sequence[int] = ()) -> list[Job]:
    """Returns every study, on every run of its role; ``rows`` limits them to studies of these rows."""
    jobs = []
    for study in studies_of(paper, rows):
        playing = [each for each in located if each.run.role == study.role]
        if study.together:
            jobs += [Job(study, tuple(playing))] if playing else []
        else:
            jobs += [Job(study, (one,)) for one in each_alone(playing)]
    return jobs


def untestable(job: Job) -> str:
    """Returns the reason why no claim is decided on a run by itself; empty where there is none."""
    return "" if job.study.together else job.on[0].run.untestable


def studies_of(paper: Paper, rows: Sequence[int]) -> list[Study]:
    return [study for study in paper.study if not rows or set(rows) & set(study.rows)]


def each_alone(several: Sequence[Located]) -> list[Located]:
    """Returns every seed by itself."""
    return [
        one
        for each in several
        for one in ([each] if each.base is None else [each.alone(seed) for seed in each.bases])
    ]


def control_jobs(paper: Paper, located: Sequence[Located], rows: Sequence[int] = ()) -> list[Job]:
    """Returns every study that a claim asks a control of, on that control.

    Of each condition the first three runs have their untrained model: what they share is what is asked for.
    """
    jobs = []
    for study in studies_of(paper, rows):
        claims = [
            claim for claim in paper.claim if claim.study == study.id and (not rows or claim.row in rows)
        ]
        controls = {name for claim in claims for name in claim.control_names(study)}
        playing = [each for each in located if each.run.role == study.role and each.base is not None]
        for control in (name for name in OF_THE_RUN if name in controls and playing):
            if study.together:
                jobs.append(Job(study, tuple(playing), control))
            else:
                seen: Counter[str] = Counter()
                for one in each_alone(playing):
                    seen[one.condition] += 1
                    if seen[one.condition] <= MAX_CONTROLS:
                        jobs.append(Job(study, (one,), control))
        if "shuffled" in controls and playing:
            others = [each for each in located if each.run.role == study.shuffled and each.base is not None]
            jobs += [Job(study, (one,), "shuffled") for one in each_alone(others)]
    return jobs


def perform(job: Job, scratch: Path) -> Done:
    """Run one job. What goes wrong in it does not stop the others; untrained models are left in ``scratch``."""
    from circuits import CircuitsError
    from interp_tasks import experiments
    from interp_tasks.errors import UserError
    from tasks.errors import TaskError

    if not job.refs():
        return Done(job, None, "not trained")
    try:
        call = getattr(experiments, job.study.experiment)
        if job.control is not None:
            return Done(job, on_control(job, scratch))
        return Done(job, call(job.refs(), **job.settings()))
    except (UserError, TaskError, CircuitsError) as error:
        return Done(job, None, str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        return Done(job, None, " ".join(reason.split()), crashed=True)


def under_every_mark(job: Job, frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a job's table with the rows of a step under every mark of the study that means it.

    Experiments run a step once, under the first of its names: in a run that stores few, "onset" may be "pre" as well.
    Tables that name steps instead, as those of experiments over training do, stay as they are.
    """
    import pandas

    from interp_tasks.checkpoints import resolve

    tables, there = [frame], set(frame["ref"].dropna())
    bases = [base for located in job.on for base in located.bases.values()]
    for base in bases:
        asked = [f"{base}@{mark}" for mark in job.study.at]
        by_mark = frame[frame["ref"].isin(asked)]
        for ref in asked:
            if ref not in there and not by_mark.empty:
                tables.append(by_mark[by_mark["step"] == resolve(ref)[0].step].assign(ref=ref))
    return tables[0] if len(tables) == 1 else pandas.concat(tables, ignore_index=True)


def perform_and_draw(job: Job, scratch: Path) -> Done:
    """Runs one job and draws its figure, which no other process then has to do for all of them."""
    done = perform(job, scratch)
    if done.result is None or job.control is not None:
        return done
    return replace(done, drawn=Drawn.of(figure_of(job, done.result)))


def figure_of(job: Job, result: Result) -> Figure:
    """Returns the figure of a job's result, as the page shows it."""
    name = f"{job.study.id}, {job.name}"
    return Figure(result.plot(), caption=f"{name}. {result.caption()}", alt=name)


def perform_all(jobs: Sequence[Job], processes: int) -> Iterator[Done]:
    """Yields each job's result as it comes.

    With one process here; otherwise in fresh ones, of one thread each: small tensors gain nothing from a second.
    """
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        if processes == 1 or len(jobs) < 2:
            yield from (perform(job, scratch) for lot in lots_of(jobs) for job in lot)
            return
        cut_off: list[Job] = []
        yield from together(jobs, processes, scratch, cut_off)
        # Whoever dies is tried once more, when nothing else needs memory.
        for job in cut_off:
            died: list[Job] = []
            yield from together([job], 1, scratch, died)
            if died:
                reason = "its process died twice: it was killed, or memory ran out"
                yield Done(job, None, reason, crashed=True)


def lots_of(jobs: Sequence[Job]) -> list[deque[Job]]:
    """Groups jobs by the model that they are on: what one has found of it, such as classes of heads, others ask for."""
    lots: dict[tuple[str, str], deque[Job]] = {}
    for job in jobs:
        lots.setdefault((job.name, job.control or ""), deque()).append(job)
    return list(lots.values())


def longest_first(lots: Sequence[deque[Job]]) -> list[deque[Job]]:
    """Sorts lots by the number of checkpoints that their jobs read, which says about how long they take."""
    return sorted(lots, key=lambda lot: sum(len(job.refs()) for job in lot), reverse=True)


def together(jobs: Sequence[Job], processes: int, scratch: Path, cut_off: list[Job]) -> Iterator[Done]:
    """Yields each job's result as it comes; jobs whose process died are added to ``cut_off``.

    Jobs on one model run one after the other in one process, the longest lots first: what is left to the end, where
    processes wait for the last one, is short.
    """
    from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
    from multiprocessing import get_all_start_methods, get_context

    # A fork server imports once for all processes, and for those that take the place of one that died.
    served = "forkserver" in get_all_start_methods()
    context: Any = get_context("forkserver" if served else "spawn")
    if served:
        context.set_forkserver_preload([__name__, "transformer_lens"])

    def started() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=context, initializer=one_thread)

    waiting = deque(longest_first(lots_of(jobs)))
    pools = [started() for _ in range(min(processes, len(waiting)))]
    running: dict[Future[Done], tuple[ProcessPoolExecutor, Job, deque[Job]]] = {}

    def go_on(pool: ProcessPoolExecutor, lot: deque[Job]) -> None:
        if not lot and waiting:
            lot = waiting.popleft()
        if lot:
            job = lot.popleft()
            running[pool.submit(perform_and_draw, job, scratch)] = pool, job, lot

    try:
        for pool in pools:
            go_on(pool, deque())
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, job, lot = running.pop(future)
                try:
                    yield future.result()
                except BrokenExecutor:
                    cut_off.append(job)
                    pool = started()
                    pools.append(pool)
                go_on(pool, lot)
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def one_thread() -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    # As the command line does for its own process.
    warnings.simplefilter("ignore")


def on_control(job: Job, scratch: Path) -> Result:
    """Returns a study's table on models that should not pass, named as the runs and marks that they stand for."""
    import pandas

    # An untrained model has its first step alone, one trained on shuffled labels no drop to be named after.
    marks = {"untrained": "0", "memorised": str(job.study.memorised)}
    mark = marks.get(str(job.control), "last")
    named = {}
    for each in job.on:
        for seed, base in each.bases.items():
            named[base] = untrained(each.run, seed, scratch) if job.control == "untrained" else base
    stand_in = dict(zip(named.values(), named, strict=True))
    (trained, first), *_ = named.items()
    settings = {key: filled(marked(value, mark), first, trained) for key, value in job.study.settings.items()}
    refs = tuple(f"{run}@{mark}" if job.study.at else run for run in named.values())
    result = called(job.study.experiment, refs, json.dumps(settings))
    frame = result.frame.assign(run=result.frame["run"].replace(stand_in))
    copies = []
    for wanted in job.study.at or ("",):
        refs = frame["ref"].map(
            lambda ref, wanted=wanted: renamed(str(ref), stand_in, wanted if job.study.at else None)
        )
        copies.append(frame.assign(ref=refs))
    joined = copies[0] if len(copies) == 1 else pandas.concat(copies, ignore_index=True)
    return replace(result, frame=joined)


@lru_cache(maxsize=1)
def called(experiment: str, refs: tuple[str, ...], settings: str) -> Result:
    """Returns an experiment's table; of two studies of different steps, one after the other, which ask the same of the
    same untrained model, the second finds it there.
    """
    from interp_tasks import experiments

    call: Callable[..., Result] = getattr(experiments, experiment)
    return call(list(refs), **json.loads(settings))


def marked(value: Any, mark: str) -> Any:
    """Replaces, in settings, a checkpoint of the run itself by that of the control."""
    if isinstance(value, str):
        return re.sub(r"\{run\}@[^@\s]+", f"{{run}}@{mark}", value)
    if isinstance(value, list):
        return [marked(item, mark) for item in value]
    return {key: marked(item, mark) for key, item in value.items()} if isinstance(value, dict) else value


def renamed(ref: str, stand_in: Mapping[str, str], mark: str | None) -> str:
    run, _, step = ref.rpartition("@")
    return ref if run not in stand_in else f"{stand_in[run]}@{step if mark is None else mark}"


def untrained(run: TrainingRun, seed: int, scratch: Path) -> str:
    """Returns a folder with the model of a run before its first step: the same settings, no steps.

    It is made once and stays in ``scratch``, as nearly every study of a run asks for it.
    """
    from interp_tasks.training.config import resolve_config
    from interp_tasks.training.trainer import train_resolved

    out = scratch / run.name / f"seed-{seed}"
    if not out.exists():
        settings = {key: as_typed(value) for key, value in run.settings.items()}
        resolved = resolve_config(run.task, run.train_preset, settings)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Another process may make the same one: what stands at its place is whole, whoever is first.
        made = Path(mkdtemp(dir=scratch)) / "run"
        train_resolved(resolved, made, seed=seed, steps=0)
        try:
            made.rename(out)
        except OSError:
            if not out.exists():
                raise
    return out.as_posix()
