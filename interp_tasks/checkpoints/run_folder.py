"""A run folder as its one writer sees it: opened under a lock, resumed exactly, killed at any point without loss.

The order of writes carries the promise. Metrics are on disk before the checkpoint of the same step appears, so
cutting them back to that step on resume always finds them complete; a checkpoint appears by one rename; older
training states go only once a newer one is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.atomic import (
    is_temporary,
    json_bytes,
    remove_folder,
    replace_file,
    sync_folder,
    to_json,
    writing,
)
from interp_tasks.checkpoints.digest import digest
from interp_tasks.checkpoints.loading import fill_parameters, read_parameters
from interp_tasks.checkpoints.lock import LOCK_FILE, RunLock
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.run_config import run_json
from interp_tasks.checkpoints.run_files import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    RUN_FILE,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    checkpoint_folder,
    is_checkpoint,
    parse_metrics_line,
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
    """A run being written. ``with RunFolder.open(...) as run:`` resume, then log and save as training goes."""

    def __init__(self, path: Path, lock: RunLock, keep_states: int) -> None:
        self.path = path
        self._lock = lock
        self._keep_states = keep_states
        self._metrics: IO[bytes] | None = None

    @classmethod
    def open(
        cls, path: str | Path, config: Mapping[str, Any], info: Mapping[str, Any], *, keep_states: int = 2
    ) -> RunFolder:
        """Make the folder, or take over the one that the same config made.

        Args:
            config: resolved ``{"task": {"name": ..., ...}, "model": {...}, "train": {...}}``, compared in full.
            info: everything else worth keeping: seeds, versions, hardware, git state, command, ``drop_metric``,
                ``preset``. Not compared; what differs on a later opening is recorded under ``resumed``.
            keep_states: how many of the newest checkpoints keep their training state.

        Raises:
            UserError: if the folder cannot be written, is held by another writer, is something else than a run, or
                was made by another config (a larger ``train.steps`` alone extends the run).
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
                replace_file(folder / RUN_FILE, json_bytes(run_json(folder, config, info)))
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
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
        finally:
            self._lock.release()

    def resume(self) -> ResumePoint | None:
        """The newest checkpoint that training can go on from; ``None`` for a run that has none yet.

        Everything later is removed: checkpoints, and lines of the metrics log. Call it before the first ``log``.

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
                    f"{self.path} has checkpoints up to step {steps[-1]} but none with a training state to go on "
                    f"from{reason}: choose another --out"
                )
        last = -1 if point is None else point.step
        with writing(self.path):
            _cut_metrics(self.path / METRICS_FILE, last)
            for step in reversed(steps):
                if step > last:
                    remove_folder(checkpoint_folder(self.path, step))
        return point

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``; it needs an integer ``step``. NaN and infinities become null.

        Log what belongs to step s before saving the checkpoint of step s: on resume, lines up to the checkpoint's
        step are kept.
        """
        if type(line.get("step")) is not int:
            raise ValueError(f"a metrics line needs an integer step, got {line.get('step')!r}")
        content = json.dumps(to_json(line, "line"), ensure_ascii=False, allow_nan=False)
        with writing(self.path / METRICS_FILE):
            file = self._log_file()
            file.write(content.encode() + b"\n")
            file.flush()

    def save(
        self,
        step: int,
        model: HookedTransformer,
        task: Task | None,
        training_state: TrainingState,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        """Store the checkpoint of a step; a step that is stored already with the same weights is left as it is.

        Raises:
            UserError: if other weights are stored for that step, or the model or disk refuses.
        """
        folder = checkpoint_folder(self.path, step)
        if is_checkpoint(folder):
            if read_meta(folder)["weights"]["sha256"] != digest(weights_bytes(model, None))["sha256"]:
                raise UserError(f"{folder} holds other weights than those to be stored for step {step}")
            return folder
        with writing(self.path / METRICS_FILE):
            file = self._log_file()
            file.flush()
            sync_file(file)
        save_checkpoint(folder, model, task, step, metrics=metrics, training_state=training_state)
        self._prune(newest=step)
        return folder

    def _log_file(self) -> IO[bytes]:
        if self._metrics is None:
            self._metrics = open(self.path / METRICS_FILE, "ab")
        return self._metrics

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
        """Drop training states beyond the newest few; meta.json, signed at the save, tolerates their absence."""
        holding = [
            file
            for step in stored_steps(self.path)
            if step <= newest and (file := checkpoint_folder(self.path, step) / TRAINING_STATE_FILE).is_file()
        ]
        for file in holding[: -self._keep_states]:
            with writing(file):
                file.unlink()


def sync_file(file: IO[bytes]) -> None:
    """Wait until the disk has what was flushed."""
    os.fsync(file.fileno())


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


def _cut_metrics(file: Path, last: int) -> None:
    """Keep the lines up to a step. What was written after its checkpoint may be torn; what was before may not.

    Raises:
        UserError: if a line is mangled and a later one is still of a step to keep.
    """
    if not file.exists():
        return
    raw = file.read_bytes()
    lines = raw.split(b"\n")[:-1]  # what follows the last newline was never finished
    steps: list[int | None] = []
    for line in lines:
        try:
            steps.append(parse_metrics_line(line, file, len(steps) + 1)["step"])
        except UserError:
            steps.append(None)
    keep = max(
        (index + 1 for index, step in enumerate(steps) if step is not None and step <= last), default=0
    )
    if None in steps[:keep]:
        raise UserError(
            f"{file} is mangled: line {steps.index(None) + 1} is no JSON object with an integer step"
        )
    kept = [
        line
        for line, step in zip(lines[:keep], steps[:keep], strict=True)
        if step is not None and step <= last
    ]
    content = b"".join(line + b"\n" for line in kept)
    if content != raw:
        replace_file(file, content)
