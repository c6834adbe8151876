"""The terminal: safe standard streams, a line of progress that goes away, and signals that ask to stop."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from interp_tasks.errors import Stopped
from interp_tasks.texts import LAYOUT, printable

#: Error handler of codecs: characters that an encoding lacks become JSON's own escapes, in tables too.
ESCAPED = "interp-run"


def escape(error: UnicodeError) -> tuple[str, int]:
    r"""Replaces characters that an encoding lacks by ``\uXXXX``, as within a JSON string."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[offset : offset + 2], "big") for offset in range(0, len(units), 2))
    return "".join(f"\\u{code:04x}" for code in codes), error.end


codecs.register_error(ESCAPED, escape)


def write_data(text: str) -> None:
    """Writes JSON or CSV to stdout; characters that it cannot show are escaped, never replaced."""
    sys.stdout.write(printable(text, keep=LAYOUT, json=True))


def write_line(text: str) -> None:
    """Writes a line for people to stdout."""
    sys.stdout.write(printable(text) + "\n")


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Puts usable streams in place of closed ones, and restores stdout and stderr afterwards."""
    before = sys.stdout, sys.stderr
    for number in range(3):
        # The next file opened would take the place of a closed stream: what is printed would end up in a checkpoint.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
        streams: list[Any] = [each for each in (sys.stdout, sys.stderr) if hasattr(each, "reconfigure")]
        handlers = [stream.errors for stream in streams]
        try:
            for stream in streams:
                stream.reconfigure(errors=ESCAPED)
            yield
        finally:
            for stream, handler in zip(streams, handlers, strict=True):
                # It writes out what is left.
                with contextlib.suppress(OSError, ValueError):
                    stream.reconfigure(errors=handler)
            sys.stdout, sys.stderr = before


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
