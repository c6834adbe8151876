"""A run's lives: each is a fork of a process that has imported everything, and gives ``interp-run train`` or the like.

Starting an interpreter and importing torch takes seconds, a fork milliseconds; what runs in it is the same code.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 120.0


def preload() -> None:
    """Import what lives share. Nothing may compute here: autograd's threads do not survive a fork."""
    import torch
    import transformer_lens  # noqa: F401

    import interp_tasks.checkpoints.load
    import interp_tasks.cli.app
    import interp_tasks.training.trainer  # noqa: F401
    import tasks

    torch.set_num_threads(1)
    for name in ("modular-addition", "matrix-completion"):
        tasks.get(name)


class Life:
    """A forked child that does one thing; its output goes to a file."""

    def __init__(self, act: Callable[[], Any], output: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.output = output
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for number in (1, 2):
                    os.dup2(descriptor, number)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                warnings.simplefilter("ignore")
                status = int(act() or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def wait(self, seconds: float = LIMIT) -> int | None:
        """Exit status (of a signal, minus its number); ``None`` if it lives on after so many seconds."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.0005)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> int:
        """Wait for it; one that hangs is killed, and that is no exit status of a program."""
        status = self.wait()
        if status is None:
            self.kill()
            return -1000
        return status

    def said(self) -> str:
        return self.output.read_text(errors="replace").strip()


def train_command(out: Path, settings: dict[str, Any], task: str = "modular-addition") -> Sequence[str]:
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["train", task, *sets, "--out", str(out), "--quiet"]


def interp_run(arguments: Sequence[str]) -> int:
    from interp_tasks.cli import main

    return main(arguments)


#: What changes names or waits for the disk. The content of files is written in between.
OPERATIONS = ("open", "rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "ftruncate")


def at_operation(
    number: int = -1, after: bool = False, act: Callable[[], Any] = lambda: None
) -> Callable[[], int]:
    """Call ``act`` before (or after) the disk operation of that number, counted from 0, in this process.

    Returns:
        How many there have been.
    """
    count = 0

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            due = count == number
            count += 1
            if due and not after:
                act()
            found = operation(*arguments, **options)
            if due and after:
                act()
            return found

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))
    return lambda: count


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
