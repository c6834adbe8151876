"""A run folder as its one writer sees it: locked, resumed exactly, killed at any point without harm.

The order of writes carries the promise. Metrics are on disk before the checkpoint of the same step appears,
so cutting them back to that step on resume always finds them complete; a checkpoint appears by one rename;
older training states go only once a newer one is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.atomic import (
    is_temporary,
    json_bytes,
    remove_folder,
    replace_file,
    sync_folder,
    writing,
)
from interp_tasks.checkpoints.digest import digest
from interp_tasks.checkpoints.loading import fill_parameters, read_parameters
from interp_tasks.checkpoints.lock import LOCK_FILE, RunLock
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.metrics_log import MetricsLog
from interp_tasks.checkpoints.run_config import run_json
from interp_tasks.checkpoints.run_files import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    RUN_FILE,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    checkpoint_folder,
    is_checkpoint,
    stored_steps,
)
from interp_tasks.checkpoints.saving import save_checkpoint, weights_bytes
from interp_tasks.checkpoints.training_state import TrainingState, read_training_state
from interp_tasks.errors import UserError
from tasks.base import Task


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: after ``step`` updates, with the tensors and data its trainer saved there."""

    step: int
    path: Path
    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]
    parameters: Mapping[str, Tensor]

    def restore(self, model: HookedTransformer) -> None:
        """Copy the stored parameters into a model built by the same task, in place."""
        fill_parameters(model, self.parameters, self.path / WEIGHTS_FILE)


class RunFolder:
    """A run being written: ``with RunFolder.open(...) as run:`` resume, then log and save."""

    def __init__(self, path: Path, lock: RunLock, keep_states: int) -> None:
        self.path = path
        self._lock = lock
        self._keep_states = keep_states
        self._metrics = MetricsLog(path / METRICS_FILE)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        info: Mapping[str, Any],
        *,
        keep_states: int = 2,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> RunFolder:
        """Make the folder, or take over the one that the same config made.

        Args:
            config: resolved ``{"task": {"name": ..., ...}, "model": {...}, "train": {...}}``, compared whole.
            info: whatever else to keep: seeds, versions, hardware, git state, command, ``drop_metric``,
                ``preset``. Not compared; what differs on a later opening is recorded under ``resumed``.
            keep_states: how many of the newest checkpoints keep their training state.
            defaults: section -> setting -> value; a setting that a run does not know had its default there.

        Raises:
            UserError: if the folder cannot be written, is held by another writer, is no run folder, or was
                made by another config (a larger ``train.steps`` alone extends the run).
        """
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, not a run folder: choose another --out")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(folder)
            lock = RunLock(folder)
        try:
            with writing(folder):
                _sweep(folder)
                replace_file(folder / RUN_FILE, json_bytes(run_json(folder, config, info, defaults)))
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
        """Flush the log and let the next writer in."""
        try:
            self._metrics.close()
        finally:
            self._lock.release()

    def resume(self) -> ResumePoint | None:
        """The newest checkpoint that training can go on from; ``None`` for a run that has none yet.

        What is later is removed: checkpoints, and lines of the metrics log. Call it before the first ``log``.

        Raises:
            UserError: if there are checkpoints but none that can be resumed from (nothing is removed then).
        """
        steps = stored_steps(self.path)
        faults: list[str] = []
        for step in reversed(steps):
            point = self._resume_point(step, faults)
            if point is not None:
                break
        else:
            point = None
            if steps:
                reason = f" ({faults[0]})" if faults else ""
                raise UserError(
                    f"{self.path} has checkpoints up to step {steps[-1]} but no training state to go on from"
                    f"{reason}: choose another --out"
                )
        last = -1 if point is None else point.step
        with writing(self.path):
            self._metrics.cut(last)
            for step in reversed(steps):
                if step > last:
                    remove_folder(checkpoint_folder(self.path, step))
        return point

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``; it needs an integer ``step``. NaN and infinities become null.

        Log what belongs to step s before saving the checkpoint of step s: on resume, lines up to that of the
        checkpoint are kept.
        """
        self._metrics.append(line)

    def save(
        self,
        step: int,
        model: HookedTransformer,
        task: Task | None,
        training_state: TrainingState,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        """Store the checkpoint of a step; a step stored already with the same weights is left as it is.

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
        return folder

    def _resume_point(self, step: int, faults: list[str]) -> ResumePoint | None:
        folder = checkpoint_folder(self.path, step)
        try:
            meta = read_meta(folder)
            state = read_training_state(folder, meta)
            if state is None or meta["step"] != step:
                return None
            return ResumePoint(step, folder, state.tensors, state.data, read_parameters(folder, meta))
        except UserError as error:
            faults.append(str(error))
            return None

    def _prune(self, newest: int) -> None:
        """Drop training states beyond the newest few; a checkpoint without its one still loads."""
        holding = [
            file
            for step in stored_steps(self.path)
            if step <= newest and (file := checkpoint_folder(self.path, step) / TRAINING_STATE_FILE).is_file()
        ]
        for file in holding[: -self._keep_states]:
            with writing(file):
                file.unlink()


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


def _sweep(folder: Path) -> None:
    """Remove what a killed writer left half-written."""
    for place in (folder, folder / CHECKPOINTS_FOLDER):
        for entry in place.iterdir() if place.is_dir() else ():
            if is_temporary(entry):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
