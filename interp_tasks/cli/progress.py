"""What runs long: its progress, a line on stderr that goes away, and signals that ask it to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from interp_tasks.cli.streams import to_stderr
from interp_tasks.errors import Stopped
from interp_tasks.texts import printable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yields a callback (done, total, text) that draws a bar, or ``None`` where nothing should be drawn."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # Where room is short, the text gives way; without it the numbers would.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        line = bar.add_task("starting", total=None, count="")

        def show(done: int, total: int, text: str) -> None:
            bar.update(
                line, completed=done, total=total, description=printable(text), count=f"{done:,}/{total:,}"
            )

        yield show


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
