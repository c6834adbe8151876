"""One writer per run, by a lock that dies with its holder: a killed process never blocks the next."""

from __future__ import annotations

import os
from pathlib import Path

from interp_tasks.errors import UserError, file_locks

LOCK_FILE = ".lock"


class RunLock:
    """An exclusive flock on ``RUN/.lock``; the file stays: removing it would race with another opener."""

    def __init__(self, run: Path, instead: str = "choose another --out") -> None:
        """Takes the lock; `instead` is what else a user can do where it is held.

        Raises:
            UserError: naming the holder, if it is held; where the system has no such locks.
        """
        fcntl = file_locks()
        self._descriptor = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise UserError(
                f"{run} is being written by another process (pid {holder}): wait for it, or {instead}"
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
