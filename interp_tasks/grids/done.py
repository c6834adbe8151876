"""Keeps what the units of one large sweep have measured in a folder, so that a sweep that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

from interp_tasks.checkpoints.atomic import folder_of, sync_folder, writing
from interp_tasks.checkpoints.lock import RunLock
from interp_tasks.errors import UserError

FILE = "units.jsonl"


class Done(MutableMapping[str, Any]):
    """Holds measured units for `circuits.sweep(done=...)`, one JSON line each in FOLDER/units.jsonl.

        with Done("sweeps/all-heads") as done:
            result = sweep(load, tokens, variants, metric, batch, executor=pool, done=done)

    A unit is on the disk when the sweep goes on to the next. What a killed process has left of a line is cut off when
    the folder is opened again. One process at a time has the folder open; workers send their results to it. Of what is
    kept only the places in the file are in memory.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Opens a folder, or makes it.

        Raises:
            UserError: if another process has it open, if it cannot be written, or if a line of its file is damaged.
        """
        self.path = folder_of(folder) / FILE
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.path.parent, "give another folder")
        self._descriptor = -1
        try:
            with writing(self.path):
                self._descriptor = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
                sync_folder(self.path.parent)
            self._places: dict[str, tuple[int, int]] = {}
            self._end = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> int:
        """Finds the lines, and cuts off what follows the last; returns the length of the file."""
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # never finished
                try:
                    key = json.loads(line)["key"]
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{self.path}, line {number}: damaged; take the line out, and its unit is measured again"
                    ) from None
                self._places[key] = (end, len(line))
                end += len(line)
        with writing(self.path):
            os.ftruncate(self._descriptor, end)
        return end

    def __getitem__(self, key: str) -> Any:
        start, length = self._places[key]
        return json.loads(os.pread(self._descriptor, length, start))["measured"]

    def __setitem__(self, key: str, measured: Any) -> None:
        # Of NaN too, which a metric may have given: Python reads it.
        line = json.dumps({"key": key, "measured": measured}).encode() + b"\n"
        with writing(self.path):
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
                os.fsync(self._descriptor)
            except BaseException:
                os.ftruncate(self._descriptor, self._end)
                raise
        self._places[key] = (self._end, len(line))
        self._end += len(line)

    def __delitem__(self, key: str) -> None:
        raise UserError(f"{self.path.parent}: what is measured stays; to begin anew, remove the folder")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Closes the folder, for other processes to open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()

    def __enter__(self) -> Done:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Done({str(Path(self.path.parent))!r}): {len(self)} units"
