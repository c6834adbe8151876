"""Locks by which processes share a search; each dies with its holder. Kill one, and its trial is free again."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from interp_tasks.errors import file_locks

LOCKS = ".locks"


class Claim:
    """An exclusive flock on ``OUT/.locks/NAME``, held until it is released."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def claim(out: Path, name: str) -> Claim:
    """Takes a lock; waits while another process has it."""
    fcntl = file_locks()
    descriptor = _open(out, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return Claim(descriptor)


def claim_if_free(out: Path, name: str) -> Claim | None:
    """Takes a lock; returns ``None`` while another process has it."""
    fcntl = file_locks()
    descriptor = _open(out, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return Claim(descriptor)


def _open(out: Path, name: str) -> int:
    (out / LOCKS).mkdir(parents=True, exist_ok=True)
    # The file stays: removing it would race with another opener.
    return os.open(out / LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
