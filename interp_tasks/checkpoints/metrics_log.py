"""``metrics.jsonl`` as its writer sees it: appended line by line, cut back on resume. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from interp_tasks.checkpoints.content import to_json
from interp_tasks.checkpoints.run_files import parse_metrics_line
from interp_tasks.disk import atomic_write, writing
from interp_tasks.errors import UserError
from interp_tasks.files import read_file


class MetricsLog:
    """An append-only log, opened by its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends one JSON line and hands it to the system at once, so that a killed process loses none."""
        if type(line.get("step")) is not int:
            raise ValueError(f"a metrics line needs an integer step, got {line.get('step')!r}")
        content = json.dumps(to_json(line, "line"), ensure_ascii=False, allow_nan=False)
        with writing(self.path):
            file = self._opened()
            file.write(content.encode() + b"\n")
            file.flush()

    def sync(self) -> None:
        """Waits until the disk has every line."""
        with writing(self.path):
            os.fsync(self._opened().fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut(self, last: int) -> None:
        """Keeps only the lines of steps up to ``last``.

        What was written after the checkpoint of that step may be torn; what was before it may not.

        Raises:
            UserError: if a line is mangled and a later one is still of a step to keep.
        """
        self.close()
        if not self.path.exists():
            return
        raw = read_file(self.path, "what the run has logged")
        lines = raw.split(b"\n")[:-1]  # what follows the last newline was never finished
        steps = [self._step(line) for line in lines]
        wanted = [index for index, step in enumerate(steps) if step is not None and step <= last]
        for index, step in enumerate(steps[: max(wanted, default=0)]):
            if step is None:
                parse_metrics_line(lines[index], self.path, index + 1)
        content = b"".join(lines[index] + b"\n" for index in wanted)
        if content != raw:
            atomic_write(self.path, content)

    def lacks(self, stored: Iterable[int]) -> tuple[int, str] | None:
        """Returns the first of these steps, ascending, that has no line, and what to say of it; None: all have one."""
        raw = read_file(self.path, "what the run has logged") if self.path.exists() else b""
        logged, mangled = set[int](), ""
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                logged.add(parse_metrics_line(line, self.path, number)["step"])
            except UserError as error:
                mangled = mangled or str(error)
        for step in stored:
            if step not in logged:
                return step, mangled or f"{self.path} has no line of step {step}"
        return None

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self.path.open("ab")
        return self._file

    def _step(self, line: bytes) -> int | None:
        """Returns the step of a line, ``None`` if it is mangled."""
        try:
            step: int = parse_metrics_line(line, self.path, 0)["step"]
        except UserError:
            return None
        return step
