"""The terminal: safe standard streams, a line of progress that goes away, and signals that ask to stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from interp_tasks.errors import Stopped
from interp_tasks.texts import LAYOUT, printable


def write_data(text: str) -> None:
    """Writes JSON or CSV to stdout; characters that it cannot show are escaped as within JSON, never replaced."""
    text = printable(text, keep=LAYOUT, json=True)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = re.sub("[^\x00-\x7f]", lambda one: json.dumps(one[0])[1:-1], text)
    sys.stdout.write(text)


def write_line(text: str) -> None:
    """Writes a line for people to stdout."""
    sys.stdout.write(printable(text) + "\n")


def open_streams() -> None:
    """Puts usable streams in place of closed ones; what an encoding lacks is escaped on all of them."""
    for number in range(3):
        # The next file opened would take the place of a closed stream: what is printed would end up in a checkpoint.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for good)
        setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: Any) -> None:
    """Points a stream that failed at nowhere, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def to_stderr(text: str) -> None:
    """Writes a line or a traceback to stderr; a closed stderr is no failure."""
    try:
        print(printable(text, keep=LAYOUT), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yields a callback (done, total, text) that draws a bar, or ``None`` where nothing should be drawn."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # Where room is short, the text gives way; without it the numbers would.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.description}", markup=False, table_column=rest)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        line = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(
            line, completed=done, total=total, description=printable(what)
        )


def note(text: str, quiet: bool) -> None:
    """Writes a line for the person at the keyboard to stderr; it is never part of the result."""
    if not quiet:
        to_stderr(printable(text))


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C or SIGTERM has asked to stop: to store where it is, and leave.

    The second signal ends it at once.

    A :class:`Stopped` within gets the exit status that belongs to the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only there can signals be answered.
        yield lambda: False
        return
    # None: a handler that Python did not install, and cannot put back.
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}
    signals: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        # Whoever started us with a signal ignored (nohup, a shell's background) wants it so.
        if before[number] != signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield lambda: bool(signals)
    except Stopped as stopped:
        if signals:
            stopped.code = 128 + signals[0]
        raise
    finally:
        restore()
