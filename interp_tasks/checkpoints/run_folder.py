"""A run folder as its one writer sees it: locked, resumed exactly, killed at any point without harm.

The order of writes carries the promise. Metrics are on disk before the checkpoint of the same step appears,
so cutting them back to that step on resume always finds them complete; a checkpoint appears by one rename;
older training states go only once a newer one is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.content import digest, json_bytes
from interp_tasks.checkpoints.load import fill_parameters, read_parameters
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.metrics_log import MetricsLog
from interp_tasks.checkpoints.run_config import Schedule, run_json
from interp_tasks.checkpoints.run_files import (
    CHECKPOINTS_FOLDER,
    CLOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    STOPPED_FOLDER,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    checkpoint_folder,
    is_checkpoint,
    read_clock,
    read_run,
    stored_steps,
)
from interp_tasks.checkpoints.save import save_checkpoint, weights_bytes
from interp_tasks.checkpoints.training_state import TrainingState, read_training_state
from interp_tasks.disk import (
    LOCK_FILE,
    atomic_write,
    is_temporary,
    lock_folder,
    remove_folder,
    sync_folder,
    writing,
)
from interp_tasks.errors import UserError
from tasks.base import Task

if TYPE_CHECKING:
    from filelock import BaseFileLock


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run goes on: after ``step`` updates, with the tensors and data its trainer saved there."""

    step: int
    path: Path
    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]
    parameters: Mapping[str, Tensor]

    def restore(self, model: HookedTransformer) -> None:
        """Copies the stored parameters into a model built by the same task, in place."""
        fill_parameters(model, self.parameters, self.path / WEIGHTS_FILE)


class RunFolder:
    """A run being written: ``with RunFolder.open(...) as run:`` resume, then log and save."""

    def __init__(self, path: Path, lock: BaseFileLock, keep_states: int) -> None:
        self.path = path
        self._lock = lock
        self._keep_states = keep_states
        self._metrics = MetricsLog(path / METRICS_FILE)
        # Apart from the metrics, which are the same whenever a run is repeated.
        self._clock = MetricsLog(path / CLOCK_FILE)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        info: Mapping[str, Any],
        *,
        keep_states: int = 2,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: Schedule | None = None,
    ) -> RunFolder:
        """Makes the folder, or takes over the one that the same config made.

        Args:
            config: resolved ``{"task": {"name": ..., ...}, "model": {...}, "train": {...}}``, compared whole.
            info: whatever else to keep: seeds, versions, hardware, git state, command, ``drop_metric``,
                ``preset``. Not compared; what differs on a later opening is recorded under ``resumed``, and so is
                what that opening changed in the config.
            keep_states: how many of the newest checkpoints keep their training state.
            defaults: section -> setting -> value; a setting that a run does not know had its default there.
            schedule: says whether another learning rate schedule leaves the steps taken as they were.

        Raises:
            UserError: if the folder cannot be written, is held by another writer, is no run folder, or was
                made by another config (a larger ``train.steps`` extends the run, and a schedule that changes only
                steps to come may be given with it or by itself).
        """
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, not a run folder: choose another --out")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(folder)
            lock = lock_folder(folder)
        try:
            with writing(folder):
                _remove_unfinished(folder)
                atomic_write(
                    folder / RUN_FILE, json_bytes(run_json(folder, config, info, defaults, schedule))
                )
                (folder / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
                sync_folder(folder)
        except BaseException:
            lock.release()
            raise
        return cls(folder, lock, keep_states)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flushes the log and lets the next writer in."""
        try:
            self._metrics.close()
            self._clock.close()
        finally:
            self._lock.release()

    def resume(self, at: int | None = None) -> ResumePoint | None:
        """Returns the newest state that training can go on from; ``None`` for a run that has none.

        What is later is removed: checkpoints, and lines of the metrics log. Call it before the first ``log``. Where the
        log has lost the line of a checkpoint, it goes on from before that one, so that the log is whole again.

        Args:
            at: no later state than that of this step.

        Raises:
            UserError: if there are checkpoints but none that can be resumed from (nothing is removed then).
        """
        steps = stored_steps(self.path)
        faults: list[str] = []
        point = next(_points(self.path, at, faults), None)
        if point is None and steps:
            reason = f" ({faults[0]})" if faults else ""
            raise UserError(
                f"{self.path} has checkpoints up to step {steps[-1]} but no training state to go on from"
                f"{reason}: choose another --out"
            )
        last = -1 if point is None else point.step
        with writing(self.path):
            self._metrics.cut(last)
            self._clock.cut(last)
            for step in reversed(steps):
                if step > last:
                    remove_folder(checkpoint_folder(self.path, step))
            if point is None or point.path != self._stopped:
                self._forget_stop()
        return point

    def log(self, line: Mapping[str, Any]) -> None:
        """Appends a line to ``metrics.jsonl``; it needs an integer ``step``. NaN and infinities become null.

        Log what belongs to step s before saving the checkpoint of step s: on resume, lines up to that of the
        checkpoint are kept.
        """
        self._metrics.append(line)

    def log_time(self, step: int, seconds: float) -> None:
        """Appends a line to ``clock.jsonl``."""
        self._clock.append({"step": step, "seconds": round(seconds, 6)})

    def time_at(self, step: int) -> float | None:
        """Returns the time that ``clock.jsonl`` has for a step."""
        return read_clock(self.path).get(step)

    def finish(self, peaks: Mapping[str, int]) -> None:
        """Notes in ``run.json`` the peaks of memory in bytes; of several openings the largest."""
        run = read_run(self.path)
        before = run.get("peak_memory") or {}
        highest = {name: max(peak, before.get(name, 0)) for name, peak in peaks.items()}
        with writing(self.path):
            atomic_write(self.path / RUN_FILE, json_bytes({**run, "peak_memory": {**before, **highest}}))

    def save(
        self,
        step: int,
        model: HookedTransformer,
        task: Task | None,
        training_state: TrainingState,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        """Stores the checkpoint of a step; a step that is stored with the same weights is not written again.

        Raises:
            UserError: if other weights are stored for that step, or the model or disk refuses.
        """
        folder = checkpoint_folder(self.path, step)
        if is_checkpoint(folder):
            if read_meta(folder)["weights"]["sha256"] != digest(weights_bytes(model, None))["sha256"]:
                raise UserError(f"{folder} holds other weights than those to be stored for step {step}")
            return folder
        self._metrics.sync()
        save_checkpoint(folder, model, task, step, metrics=metrics, training_state=training_state)
        self._prune(newest=step)
        with writing(self._stopped):
            self._forget_stop()
        return folder

    def save_stop(
        self, step: int, model: HookedTransformer, task: Task | None, training_state: TrainingState
    ) -> None:
        """Stores the state at a stop between two checkpoints; the next checkpoint replaces it.

        Raises:
            UserError: if the model or disk refuses.
        """
        self._metrics.sync()
        with writing(self._stopped):
            self._forget_stop()
        save_checkpoint(self._stopped, model, task, step, training_state=training_state)

    @property
    def _stopped(self) -> Path:
        return self.path / STOPPED_FOLDER

    def _forget_stop(self) -> None:
        if self._stopped.is_dir():
            remove_folder(self._stopped)

    def _prune(self, newest: int) -> None:
        """Drops training states beyond the newest few; a checkpoint without its one still loads."""
        holding = [
            file
            for step in stored_steps(self.path)
            if step <= newest and (file := checkpoint_folder(self.path, step) / TRAINING_STATE_FILE).is_file()
        ]
        for file in holding[: -self._keep_states]:
            with writing(file):
                file.unlink()


def resumable(run: Path) -> Iterator[int]:
    """Yields the steps that training can go on from, the last first; 0 alone of a run that has stored nothing yet."""
    if not stored_steps(run) and not (run / STOPPED_FOLDER).exists():
        yield 0
    else:
        yield from (point.step for point in _points(run, None, []))


def _points(run: Path, at: int | None, faults: list[str]) -> Iterator[ResumePoint]:
    """Yields the points that training can go on from, the last first, none after step ``at``."""
    steps = stored_steps(run)
    # A line is on disk before the checkpoint of its step: where one is missing, the log was damaged.
    lost = MetricsLog(run / METRICS_FILE).lacks(steps)
    if lost is not None:
        faults.append(lost[1])
    end = min(inf if at is None else at, inf if lost is None else lost[0] - 1)
    stopped = _resume_point(run / STOPPED_FOLDER, None, faults) if (run / STOPPED_FOLDER).exists() else None
    if stopped is not None and stopped.step > end:
        stopped = None
    for step in reversed([step for step in steps if step <= end]):
        if stopped is not None and stopped.step > step:
            yield stopped
            stopped = None
        point = _resume_point(checkpoint_folder(run, step), step, faults)
        if point is not None:
            yield point
    if stopped is not None:
        yield stopped


def _resume_point(folder: Path, step: int | None, faults: list[str]) -> ResumePoint | None:
    """Reads the point in a checkpoint folder; it must be of ``step``, or with ``None`` of any step."""
    try:
        meta = read_meta(folder)
        state = read_training_state(folder, meta)
        if state is None or step not in (None, meta["step"]):
            return None
        return ResumePoint(meta["step"], folder, state.tensors, state.data, read_parameters(folder, meta))
    except UserError as error:
        faults.append(str(error))
        return None


def _refuse_foreign(folder: Path) -> None:
    if (folder / RUN_FILE).exists():
        return
    # A writer killed before its first run.json leaves a lock and perhaps a temporary file.
    foreign = [
        entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE and not is_temporary(entry)
    ]
    if foreign:
        raise UserError(
            f"{folder} is not a run folder and holds {sorted(foreign)[0]!r}: choose another --out"
        )


def _remove_unfinished(folder: Path) -> None:
    """Removes files that a killed writer left half-written."""
    for parent in (folder, folder / CHECKPOINTS_FOLDER):
        for entry in parent.iterdir() if parent.is_dir() else ():
            if is_temporary(entry):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
