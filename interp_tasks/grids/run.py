"""Runs a grid: skips finished units, and a unit that fails stops only those that need it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.atomic import folder_of, writing
from interp_tasks.checkpoints.lock import RunLock
from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.grids.executors import PATIENCE, Workplace, is_here, workplace
from interp_tasks.grids.unit import (
    Record,
    is_trained,
    perform,
    read_record,
    record_file,
    write_record,
)
from interp_tasks.grids.units import MeasureUnit, Plan, TrainUnit, Unit, check, naming_experiment, plan
from interp_tasks.measurement.subjects import Progress
from interp_tasks.recipes.spec import Spec, naming_file, read_spec, spec_of


@dataclass(frozen=True)
class Grid:
    """A grid that was run: its plan, and the record of each unit.

    Attributes:
        folder: where it is.
        records: of each unit, by key; units that wait for one that failed have none.
        done_before: how many were done when it began.
    """

    folder: Path
    spec: Spec
    plan: Plan = field(repr=False)
    records: Mapping[str, Record] = field(repr=False)
    done_before: int = 0

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records.values() if record.status == "failed")

    @property
    def waiting(self) -> tuple[MeasureUnit, ...]:
        """Units that were not tried, because a unit that they need failed."""
        return tuple(unit for unit in self.plan.measure if unit.key not in self.records)


def grid(
    spec: Spec | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    executor: str | Executor = "processes",
    jobs: int | None = None,
    device: str = "cpu",
    retry: bool = False,
    imports: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> Grid:
    """Train and measure what a grid asks for, but for what is done already.

    Args:
        spec: a file, its content as a dict, or a :class:`Spec`.
        out: the grid's folder. With workers on other machines: on a file system that all share.
        executor: ``"serial"``, ``"processes"``, ``"dask"``, ``"dask://HOST:PORT"``, or one of your own with the
            interface of ``concurrent.futures.Executor``, whose workers can import this package.
        jobs: units at a time on this machine (default: as many as its cores carry).
        retry: try units again that failed.
        imports: files that register tasks.

    Returns:
        A :class:`Grid`; units that failed are in it, with their errors.

    Raises:
        UserError: for a grid that cannot be, another one at work in the folder, an executor that is not there.
    """
    out = folder_of(out)
    root = out.resolve()
    check_free(root, "grid")
    name = "grid" if isinstance(spec, (Mapping, Spec)) else str(spec)
    spec = spec_of(spec) if isinstance(spec, Mapping) else spec
    spec = spec if isinstance(spec, Spec) else read_spec(spec)
    files = [str(Path(file).resolve()) for file in imports]
    if files:
        from interp_tasks.grids.unit import import_all

        import_all(files)
    with naming_file(name):
        check(spec)
        planned = plan(spec)
    check_devices(planned, root, executor, device, retry, name)
    # Of an executor that is not there nothing is left behind.
    with place_of_work(executor, jobs, spec.threads) as place, locked(root):
        known = standing(planned, root, retry)
        for unit in planned.units:
            if unit.key not in known:
                # What it says does not hold, or is to be tried again.
                with writing(record_file(root, unit.key)):
                    record_file(root, unit.key).unlink(missing_ok=True)
        before = sum(record.status == "done" for record in known.values())
        run = _Run(planned, root, device, files, known, progress)
        run.all(place)
    return Grid(out, spec, planned, run.records, before)


def standing(planned: Plan, root: Path, retry: bool) -> dict[str, Record]:
    """Returns the records of units that need not be done, by key."""
    records = ((unit.key, read_record(root, unit)) for unit in planned.units)
    return {
        key: record
        for key, record in records
        if record is not None and not (retry and record.status == "failed")
    }


def check_devices(
    planned: Plan, root: Path, executor: str | Executor, device: str, retry: bool, name: str
) -> None:
    """Refuses a device that is not there, or has not the precision that is asked for, before a unit waits for it.

    Only where the work is done on this machine: workers elsewhere may have it.

    Args:
        name: of the grid's file, for errors about what it holds.

    Raises:
        UserError: in one line.
    """
    if not is_here(executor):
        return
    known = standing(planned, root, retry)
    units = [unit for unit in planned.units if unit.key not in known]
    if units:
        check_device(device)
    for unit in units:
        with naming_file(name):
            if isinstance(unit, TrainUnit):
                from interp_tasks.training.trainer import check_precision

                check_precision(unit.resolved.train, device)
            if isinstance(unit, MeasureUnit) and "device" in unit.asked.settings:
                with naming_experiment(unit.asked):
                    check_device(unit.asked.settings["device"])


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the lock of a folder, so that only one grid runs in it."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = RunLock(root)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def place_of_work(executor: str | Executor, jobs: int | None, threads: int) -> Iterator[Workplace]:
    if isinstance(executor, str):
        with workplace(executor, jobs, threads) as place:
            yield place
    else:
        context = getattr(executor, "_mp_context", None)
        if context is not None and context.get_start_method() == "fork":
            raise UserError(
                "grid: an executor that forks hangs where torch has started threads; give "
                'ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))'
            )
        yield Workplace(executor, jobs)


class _Run:
    """Hands out the remaining units, each when the units that it needs are done."""

    def __init__(
        self,
        planned: Plan,
        root: Path,
        device: str,
        imports: list[str],
        records: dict[str, Record],
        progress: Progress | None,
    ) -> None:
        self.whole, self.root, self.device, self.imports = planned, root, device, imports
        self.records, self.progress = records, progress
        #: Units beside which a process died, or in which.
        self.suspects: set[str] = set()

    def all(self, place: Workplace) -> None:
        """Runs every unit that is not done, as many at a time as there are slots, until none can begin.

        A unit that was running when the executor broke runs again.

        Raises:
            UserError: for an executor that broke and cannot be renewed.
        """
        waiting: list[Unit] = [unit for unit in self.whole.units if unit.key not in self.records]
        running: dict[Future[Any], Unit] = {}
        while waiting or running:
            broken = False
            cut_off: list[Unit] = []
            for unit in self.next(waiting, list(running.values()), place.slots):
                try:
                    future = place.submit(perform, unit, str(self.root), self.device, self.imports)
                except BrokenExecutor:
                    broken = True
                    break
                running[future] = unit
                waiting.remove(unit)
            if not running and not broken:
                return  # what is left needs what failed
            finished = wait(running, return_when=FIRST_COMPLETED).done if running else set()
            # In the order in which they began: a set has another one in every process.
            for future in [each for each in running if each in finished]:
                unit = running.pop(future)
                if future.cancelled():
                    broken = True
                    cut_off.append(unit)
                    continue
                error = future.exception()
                if error is None:
                    self.finish(self.checked(unit, future.result()))
                elif isinstance(error, BrokenExecutor):
                    broken = True
                    self.lost(unit, waiting)
                else:
                    self.finish(self.written(unit, f"{type(error).__name__}: {' '.join(str(error).split())}"))
            if broken:
                for future, unit in running.items():
                    # Where one was cancelled, the others are about to be: by a scheduler that is gone.
                    if cut_off or future.cancelled():
                        cut_off.append(unit)
                    else:
                        self.lost(unit, waiting)
                running.clear()
                if not place.renew():
                    raise UserError(
                        "the executor broke down; what is done is kept: the same command goes on from there"
                    )
                self.take_back(cut_off, waiting)

    def next(
        self,
        waiting: Sequence[Unit],
        running: Sequence[Unit],
        slots: int | None,
    ) -> list[Unit]:
        """Returns the units that can begin.

        Suspects go last and one by one, so that it is known in which of them a process dies.
        """
        if any(unit.key in self.suspects for unit in running):
            return []
        ready = [unit for unit in waiting if self.is_ready(unit)]
        others = [unit for unit in ready if unit.key not in self.suspects]
        if others or running:
            return others[: None if slots is None else max(0, slots - len(running))]
        return ready[:1]

    def is_ready(self, unit: Unit) -> bool:
        if isinstance(unit, TrainUnit):
            return True
        return all(key in self.records and self.records[key].status == "done" for key in unit.needs)

    def lost(self, unit: Unit, waiting: list[Unit]) -> None:
        """Puts a unit back whose process, or a sibling's, died; one that dies a second time has failed."""
        record = read_record(self.root, unit)
        if record is not None:
            self.finish(record)
        elif unit.key in self.suspects:
            self.finish(self.written(unit, "its process died twice: it was killed, or memory ran out"))
        else:
            self.suspects.add(unit.key)
            waiting.append(unit)

    def take_back(self, units: Sequence[Unit], waiting: list[Unit]) -> None:
        """Puts units whose executor is lost back on the list, unless they turn out to be finished."""
        end = time.monotonic() + PATIENCE
        for unit in units:
            while isinstance(unit, TrainUnit) and is_written(self.root / unit.folder):
                if time.monotonic() > end:
                    break
                time.sleep(0.1)
            record = read_record(self.root, unit)
            if record is None:
                waiting.append(unit)
            else:
                self.finish(self.checked(unit, record))

    def checked(self, unit: Unit, record: Record) -> Record:
        """Returns the record, or a failed one where a run it measured has disappeared meanwhile."""
        needs = unit.needs if isinstance(unit, MeasureUnit) else ()
        gone = [
            each.folder for each in self.whole.train if each.key in needs and not is_trained(self.root, each)
        ]
        if not gone:
            return record
        return self.written(unit, f"{gone[0]} is no longer there to its last step: retry trains it again")

    def written(self, unit: Unit, error: str) -> Record:
        record = Record(unit.key, unit.what, "failed", 0.0, error)
        write_record(self.root, record)
        return record

    def finish(self, record: Record) -> None:
        self.records[record.key] = record
        if self.progress is not None:
            self.progress(len(self.records), len(self.whole), f"{record.status}: {record.what}")


def is_written(run: Path) -> bool:
    """Returns whether somebody holds the run."""
    if not run.is_dir():
        return False
    try:
        RunLock(run).release()
    except UserError:
        return True
    return False
