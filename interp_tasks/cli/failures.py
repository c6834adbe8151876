"""Between the program and the terminal: mistakes become one line, and libraries keep quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

from circuits.errors import CircuitsError
from interp_tasks.cli.terminal import silence, to_stderr
from interp_tasks.errors import Stopped, UserError
from interp_tasks.texts import one_line
from tasks.errors import TaskError

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


@contextlib.contextmanager
def quiet_libraries(debug: bool) -> Iterator[None]:
    """Keeps warnings and log lines of libraries off the terminal, unless debugging."""
    if debug:
        yield
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def exit_code_of(command: Callable[[], Any], *, debug: bool) -> int:
    """Runs a command and returns its exit status; a user's mistake is one line on stderr, other errors propagate."""
    try:
        done = command()
        sys.stdout.flush()
        if done == INTERRUPTED:
            # Typer turns the interruption into this code; older ones into Abort.
            raise KeyboardInterrupt
        return done if isinstance(done, int) else 0
    except BaseException as error:
        told = outcome(error)
        if told is None:
            raise
        message, code = told
        if debug:
            to_stderr(traceback.format_exc().rstrip())
    if message:
        to_stderr(f"interp-run: {one_line(message)}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return code


def outcome(error: BaseException) -> tuple[str, int] | None:
    """Returns what is said of an error in one line, and the exit status; ``None`` for an error of the program."""
    # Click answers a closed pipe with sys.exit(1).
    closed = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(closed, BrokenPipeError):
        silence(sys.stdout)
        return "", CLOSED_PIPE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", INTERRUPTED
    if isinstance(error, Stopped):
        return str(error), error.code
    if isinstance(error, SystemExit):
        return foreign_exit(error), USAGE
    if isinstance(error, CLICK_ERROR):
        return usage_message(error), USAGE
    if isinstance(error, (UserError, TaskError, CircuitsError)):
        return str(error), USAGE
    message = expected(error)
    return (message, USAGE) if message else None


def expected(error: BaseException) -> str:
    """Returns in one line an error that a machine or an installation causes; nothing for any other."""
    if isinstance(error, UnicodeEncodeError):
        # A glob, or the folder we are in, may lead to a name that is no text.
        is_a_name = any("\ud800" <= one <= "\udfff" for one in error.object)
        return f"{error.object!r} is no text here: use a UTF-8 locale, or rename it" if is_a_name else ""
    if isinstance(error, ImportError):
        is_without = error.name == "transformer_lens" or "'HookedTransformer" in str(error)
        return WITHOUT_MODELS if is_without else ""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
        # A write to a stream names no file: its last flush would fail once more.
        silence(sys.stdout)
        return f"the system refuses: {error.strerror}" if error.errno is not None else ""
    # Torch's allocators raise RuntimeError.
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "not enough memory: ask for fewer --samples, a smaller batch or a smaller model"
    return ""


def foreign_exit(stop: SystemExit) -> str:
    """Describes in one line an exit of a task or a library, as commands return their status, with its place."""
    place = traceback.extract_tb(stop.__traceback__)[-1]
    reason = "" if stop.code is None else f": {stop.code}"
    return f"{place.filename}, line {place.lineno}, in {place.name}, ends the program (SystemExit{reason})"


def usage_message(error: Any) -> str:
    """Returns a complaint about the arguments themselves, with what would be valid and where to read on."""
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    commands = getattr(context.command, "commands", None)
    if commands:
        return f"{message}; {context.command_path} --help lists all {len(commands)} commands"
    return f"{message}; see {context.command_path} --help"
