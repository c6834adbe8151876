"""The terminal: safe standard streams, progress, signals that ask to stop, and mistakes in one line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer

from circuits.errors import CircuitsError
from interp_tasks.errors import Stopped, UserError
from interp_tasks.text_formatting import LAYOUT, escape_control_characters, one_line
from tasks.errors import TaskError


def write_data(text: str) -> None:
    """Writes JSON or CSV to stdout; characters that it cannot show are escaped as within JSON, never replaced."""
    text = escape_control_characters(text, keep=LAYOUT, as_json=True)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = re.sub("[^\x00-\x7f]", lambda one: json.dumps(one[0])[1:-1], text)
    sys.stdout.write(text)


def write_line(text: str) -> None:
    """Writes a line for people to stdout."""
    sys.stdout.write(escape_control_characters(text) + "\n")


def repair_streams() -> None:
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


def silence_stream(stream: Any) -> None:
    """Points a stream that failed at nowhere, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_to_stderr(text: str) -> None:
    """Writes a line or a traceback to stderr; a closed stderr is no failure."""
    try:
        print(escape_control_characters(text, keep=LAYOUT), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence_stream(sys.stderr)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds between two lines of progress in a log.
MINUTE = 60.0


@contextlib.contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yields a callback (done, total, text) that draws a bar, or writes a line a minute where stderr is no terminal;
    ``None`` where nothing should be said.
    """
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        latest = time.monotonic()

        def write_each_minute(done: int, total: int, what: str) -> None:
            nonlocal latest
            if time.monotonic() - latest >= MINUTE:
                latest = time.monotonic()
                write_to_stderr(escape_control_characters(f"{done} of {total}: {what}"))

        yield write_each_minute
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
            line, completed=done, total=total, description=escape_control_characters(what)
        )


def print_note(text: str, quiet: bool) -> None:
    """Writes a line for the person at the keyboard to stderr; it is never part of the result."""
    if not quiet:
        write_to_stderr(escape_control_characters(text))


@contextlib.contextmanager
def watch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C or SIGTERM has asked to stop: to store where it is, and leave.

    The second signal ends it at once.

    A :class:`Stopped` within gets the exit status that belongs to the signal.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signals: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        restore_handlers()

    def restore_handlers() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        # Whoever started us with a signal ignored (nohup, a shell's background) wants it so.
        if before[number] != signal.SIG_IGN:
            signal.signal(number, record_signal)
    try:
        yield lambda: bool(signals)
    except Stopped as stopped:
        if signals:
            stopped.code = 128 + signals[0]
        raise
    finally:
        restore_handlers()


USAGE = 2
INTERRUPTED = 130
#: 128 + SIGPIPE.
CLOSED_PIPE = 141
WITHOUT_MODELS = (
    "checkpoints and training need transformer-lens>=3.9,<4 (HookedTransformer), which is not installed here; "
    "circuits alone works without it, also beside transformer-lens 4"
)
#: BadParameter -> UsageError -> ClickException, whether typer brings its own click or uses the installed one.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def run_for_exit_code(command: Callable[[], Any], *, debug: bool) -> int:
    """Runs a command and returns its exit status; a user's mistake is one line on stderr, other errors propagate.

    Warnings and log lines of libraries stay off the terminal, unless debugging.
    """
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            if not debug:
                logging.disable(logging.WARNING)
                warnings.simplefilter("ignore")
            command()
        sys.stdout.flush()
        return 0
    except typer.Exit as done:
        return done.exit_code
    except BaseException as error:
        told = message_and_exit_code(error)
        if told is None:
            raise
        message, code = told
        if debug:
            write_to_stderr(traceback.format_exc().rstrip())
    finally:
        logging.disable(disabled)
    if message:
        write_to_stderr(f"interp-run: {one_line(message)}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return code


def message_and_exit_code(error: BaseException) -> tuple[str, int] | None:
    """Returns what is said of an error in one line, and the exit status; ``None`` for an error of the program."""
    # Rich answers a closed pipe with sys.exit(1).
    closed = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(closed, BrokenPipeError):
        silence_stream(sys.stdout)
        return "", CLOSED_PIPE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", INTERRUPTED
    if isinstance(error, Stopped):
        return str(error), error.code
    if isinstance(error, SystemExit):
        return "the code of a task or of a library ends the program (SystemExit)", USAGE
    if isinstance(error, CLICK_ERROR):
        return usage_message(error), USAGE
    if isinstance(error, (UserError, TaskError, CircuitsError)):
        return str(error), USAGE
    message = environment_message(error)
    return (message, USAGE) if message else None


def environment_message(error: BaseException) -> str:
    """Returns in one line an error that a machine or an installation causes; nothing for any other."""
    if isinstance(error, ImportError):
        is_without = error.name == "transformer_lens" or "'HookedTransformer" in str(error)
        return WITHOUT_MODELS if is_without else ""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
        # A write to a stream names no file: its last flush would fail once more.
        silence_stream(sys.stdout)
        return f"the system refuses: {error.strerror}" if error.errno is not None else ""
    # Torch's allocators raise RuntimeError.
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "not enough memory: ask for fewer --samples, a smaller batch or a smaller model"
    return ""


def usage_message(error: Any) -> str:
    """Returns a complaint about the arguments themselves, with what would be valid and where to read on."""
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    return f"{message}; see {context.command_path} --help"
