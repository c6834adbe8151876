"""A run folder as its one writer sees it: locked, resumed exactly, killed at any point without harm.

The order of writes carries the promise. Metrics are on disk before the checkpoint of the same step appears,
so cutting them back to that step on resume always finds them complete; a checkpoint appears by one rename;
older training states go only once a newer one is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.checkpoint import read_checked_tensors, save_checkpoint
from interp_tasks.checkpoints.run_reader import (
    CHECKPOINTS_FOLDER,
    CLOCK_FILE,
    FORMAT,
    LOGGED,
    METRICS_FILE,
    RUN_FILE,
    STOPPED_FOLDER,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    checkpoint_folder,
    checkpoints_and_stop_by_step,
    json_bytes,
    parse_metrics_line,
    read_checkpoint_meta,
    read_run,
    stored_steps,
    to_plain_json,
)
from interp_tasks.errors import UserError
from interp_tasks.file_io import (
    LOCK_FILE,
    acquire_folder_lock,
    atomic_write,
    explain_write_errors,
    is_temporary_name,
    read_file_bytes,
    remove_folder,
    sync_folder,
)
from tasks.base import Task

_MISSING = "(not set)"


@dataclass(frozen=True)
class LearningRateFromSettings:
    """A learning-rate schedule: a run may go on by another only if no step taken had another learning rate.

    Attributes:
        settings: the names of those train settings that may change so.
        rates: from train settings, the learning rate of every update, which is counted from 0.
    """

    settings: tuple[str, ...]
    rates: Callable[[Mapping[str, Any]], Callable[[int], float]]


def new_or_resumed_run_json(
    run: Path,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: LearningRateFromSettings | None = None,
) -> dict[str, Any]:
    """Returns the content ``run.json`` should have now: fresh, or the existing one with this opening recorded.

    One that another config made is refused, with the differing keys, or the first step that another schedule changes.

    Args:
        defaults: section -> setting -> what it is where nothing is said.
        schedule: of the learning rate; ``None``: no setting of it may change.
    """
    config, info = to_plain_json(config, "config"), to_plain_json(info, "info")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if not (run / RUN_FILE).exists():
        return {"format": FORMAT, "config": config, **info, "created_at": now, "resumed": []}
    existing = read_run(run)
    if existing.get("format") != FORMAT or not isinstance(existing.get("config"), dict):
        raise UserError(f"{run / RUN_FILE} is not a run of this version (format {existing.get('format')!r})")
    old = dict(existing["config"])
    for section, known in to_plain_json(defaults or {}, "defaults").items():
        if isinstance(old.get(section), dict) and isinstance(config.get(section), dict):
            # Settings that are newer than the run had their defaults when it began.
            old[section] = {name: known[name] for name in config[section] if name in known} | old[section]
    changed = {
        key: (before, after)
        for key, (before, after) in config_differences(old, config).items()
        if before != _MISSING or after
    }
    scheduled = {f"train.{name}" for name in schedule.settings} if schedule else set()
    other = {key: pair for key, pair in changed.items() if key in scheduled}
    refused = {
        key: pair for key, pair in changed.items() if key not in other and not _is_longer_training(key, *pair)
    }
    if refused:
        raise UserError(
            f"{run} was made by another config ({format_differences(refused)}): choose another --out"
        )
    if schedule and other:
        before, after = schedule.rates(old["train"]), schedule.rates(config["train"])
        taken = max((step for step, _ in checkpoints_and_stop_by_step(run)), default=0)
        for update in range(taken):
            if before(update) != after(update):
                raise UserError(
                    f"{run} was made by another schedule ({format_differences(other)}): of the {taken:,} steps taken, "
                    f"step {update + 1:,} had a learning rate of {before(update):.6g} and would have "
                    f"{after(update):.6g}; choose another --out"
                )
    opening: dict[str, Any] = {key: value for key, value in info.items() if existing.get(key) != value}
    if changed:
        opening["config"] = changed
    resumed = [*existing.get("resumed", []), {"at": now, **opening}]
    return {**existing, "config": config, "resumed": resumed}


def declared_drop(task: Task) -> dict[str, Any]:
    """Returns a task's drop metric and theoretical plateau (``None``: it has none) as plain JSON."""
    metric = task.drop_metric
    plateau = task.plateau_levels().get(metric.name)
    return {"name": metric.name, "direction": metric.direction, "plateau": plateau}


def format_differences(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}: {old!r} there, {new!r} asked for" for key, (old, new) in pairs.items())


def config_differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys at which two nested mappings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        differing: dict[str, tuple[Any, Any]] = {}
        for name in {**old, **new}:
            dotted = f"{key}.{name}" if key else name
            differing |= config_differences(old.get(name, _MISSING), new.get(name, _MISSING), dotted)
        return differing
    return {} if old == new and type(old) is type(new) else {key: (old, new)}


def _is_longer_training(key: str, old: Any, new: Any) -> bool:
    return key == "train.steps" and type(old) is int and type(new) is int and new > old


#: So many of the newest checkpoints keep optimiser and filter, from which training goes on.
KEPT_STATES = 2


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run goes on: after ``step`` updates, with the tensors that its trainer saved there."""

    step: int
    path: Path
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


class RunFolder:
    """A run being written: ``with RunFolder.open(...) as run:`` resume, then log and save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = JsonLinesLog(path / METRICS_FILE)
        # Apart from the metrics, which are the same whenever a run is repeated.
        self._clock = JsonLinesLog(path / CLOCK_FILE)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        info: Mapping[str, Any],
        *,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
        schedule: LearningRateFromSettings | None = None,
    ) -> Iterator[RunFolder]:
        """Makes the folder, or takes over the one that the same config made, and is its one writer in the block.

        Args:
            config: resolved ``{"task": {"name": ..., ...}, "model": {...}, "train": {...}}``, compared whole.
            info: whatever else to keep: seeds, versions, hardware, git state, command, ``drop_metric``,
                ``preset``. Not compared; what differs on a later opening is recorded under ``resumed``, and so is
                what that opening changed in the config.
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
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A writer killed before its first run.json leaves a lock and perhaps a temporary file.
            entries = sorted(each.name for each in folder.iterdir() if not is_temporary_name(each))
            foreign = [name for name in entries if name != LOCK_FILE]
            if foreign and RUN_FILE not in entries:
                raise UserError(
                    f"{folder} is not a run folder and holds {foreign[0]!r}: choose another --out"
                )
            lock = acquire_folder_lock(folder)
        try:
            with explain_write_errors(folder):
                # What a killed writer left half-written.
                for entry in (*folder.iterdir(), *(folder / CHECKPOINTS_FOLDER).glob(".*")):
                    if is_temporary_name(entry):
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                described = new_or_resumed_run_json(folder, config, info, defaults, schedule)
                atomic_write(folder / RUN_FILE, json_bytes(described))
                (folder / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
                sync_folder(folder)
            run = cls(folder)
            with contextlib.closing(run._metrics), contextlib.closing(run._clock):
                yield run
        finally:
            lock.release()

    def resume(self) -> ResumePoint | None:
        """Returns the newest state that training can go on from; ``None`` for a run that has none.

        What is later is removed: checkpoints, and lines of the metrics log. Call it before the first ``log``.

        Raises:
            UserError: if there are checkpoints but none that can be resumed from (nothing is removed then).
        """
        steps = stored_steps(self.path)
        point, fault = newest_resume_point_or_fault(self.path)
        if point is None and steps:
            reason = f" ({fault})" if fault else ""
            raise UserError(
                f"{self.path} has checkpoints up to step {steps[-1]} but no training state to go on from"
                f"{reason}: choose another --out"
            )
        last = -1 if point is None else point.step
        with explain_write_errors(self.path):
            for log in (self._metrics, self._clock):
                log.truncate_after(last)
            for step in reversed(steps):
                if step > last:
                    remove_folder(checkpoint_folder(self.path, step))
            if point is None or point.path != self._stop_folder:
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

    def record_peak_memory(self, peaks: Mapping[str, int]) -> None:
        """Notes in ``run.json`` the peaks of memory in bytes; of several openings the largest."""
        run = read_run(self.path)
        before = run.get("peak_memory") or {}
        highest = {name: max(peak, before.get(name, 0)) for name, peak in peaks.items()}
        with explain_write_errors(self.path):
            atomic_write(self.path / RUN_FILE, json_bytes({**run, "peak_memory": {**before, **highest}}))

    def save(
        self,
        step: int,
        model: HookedTransformer,
        task: Task | None,
        training_state: Mapping[str, Tensor],
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        """Stores the checkpoint of a step.

        Raises:
            UserError: if one is stored for that step, or the model or disk refuses.
        """
        folder = checkpoint_folder(self.path, step)
        self._metrics.sync()
        save_checkpoint(folder, model, task, step, metrics=metrics, training_state=training_state)
        # A checkpoint without its training state still loads.
        states = [
            file
            for each in stored_steps(self.path)
            if each <= step and (file := checkpoint_folder(self.path, each) / TRAINING_STATE_FILE).is_file()
        ]
        with explain_write_errors(folder):
            for file in states[:-KEPT_STATES]:
                file.unlink()
            self._forget_stop()
        return folder

    def save_stop(
        self, step: int, model: HookedTransformer, task: Task | None, training_state: Mapping[str, Tensor]
    ) -> None:
        """Stores the state at a stop between two checkpoints; the next checkpoint replaces it.

        Raises:
            UserError: if the model or disk refuses.
        """
        self._metrics.sync()
        with explain_write_errors(self._stop_folder):
            self._forget_stop()
        save_checkpoint(self._stop_folder, model, task, step, training_state=training_state)

    @property
    def _stop_folder(self) -> Path:
        return self.path / STOPPED_FOLDER

    def _forget_stop(self) -> None:
        if self._stop_folder.is_dir():
            remove_folder(self._stop_folder)


def newest_resume_point_or_fault(run: Path) -> tuple[ResumePoint | None, str]:
    """Returns the last point that training can go on from, or why the newest cannot be read."""
    fault = ""
    for step, folder in reversed(checkpoints_and_stop_by_step(run)):
        try:
            meta = read_checkpoint_meta(folder)
            state = folder / TRAINING_STATE_FILE
            if meta["training_state"] is not None and state.is_file() and meta["step"] == step:
                tensors = [read_checked_tensors(file, meta) for file in (state, folder / WEIGHTS_FILE)]
                return ResumePoint(step, folder, *tensors), ""
        except UserError as error:
            fault = fault or str(error)
    return None, fault


class JsonLinesLog:
    """An append-only log, opened by its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends one JSON line and hands it to the system at once, so that a killed process loses none."""
        if type(line.get("step")) is not int:
            raise ValueError(f"a metrics line needs an integer step, got {line.get('step')!r}")
        content = json.dumps(to_plain_json(line, "line"), ensure_ascii=False, allow_nan=False)
        with explain_write_errors(self.path):
            file = self._open_file()
            file.write(content.encode() + b"\n")
            file.flush()

    def sync(self) -> None:
        """Waits until the disk has every line."""
        with explain_write_errors(self.path):
            os.fsync(self._open_file().fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def truncate_after(self, last: int) -> None:
        """Keeps only the lines of steps up to ``last``.

        What was written after the checkpoint of that step may be torn; what was before it may not.
        """
        self.close()
        if not self.path.exists():
            return
        raw, kept, torn = read_file_bytes(self.path, LOGGED), [], None
        # What follows the last newline was never finished.
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                step = parse_metrics_line(line, self.path, number)["step"]
            except UserError as error:
                torn = torn or error
                continue
            if step <= last:
                if torn is not None:
                    raise torn
                kept.append(line + b"\n")
        if b"".join(kept) != raw:
            atomic_write(self.path, b"".join(kept))

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            self._file = self.path.open("ab")
        return self._file
