"""Between the program and the terminal: mistakes become one line, and libraries keep quiet."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

from interp_tasks.cli.terminal import silence, to_stderr
from interp_tasks.errors import Stopped, UserError
from interp_tasks.texts import one_line

USAGE = 2
INTERRUPTED = 130
#: 128 + SIGPIPE.
CLOSED_PIPE = 141
NOT_TEXT = "a name that is no text in the encoding of this locale; use a UTF-8 locale, or rename it"
WITHOUT_MODELS = (
    "checkpoints and training need transformer-lens>=3.9,<4 (HookedTransformer), which is not installed here; "
    "circuits alone works without it, also beside transformer-lens 4"
)
#: BadParameter -> UsageError -> ClickException, whether typer brings its own click or uses the installed one.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
#: Errors of packages that know nothing of the command line; looked up only where those are loaded already.
USER_ERRORS_ELSEWHERE = (("tasks.base", "TaskError"), ("circuits.errors", "CircuitsError"))


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

    def say(message: str) -> None:
        refuse(message, debug)

    try:
        code = command()
        sys.stdout.flush()
        if code == INTERRUPTED:
            # Typer turns the interruption into this code; older ones into Abort, below.
            refuse("interrupted", debug=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            # Click answers a closed pipe with sys.exit(1).
            return closed_pipe()
        # Commands return their status: this is a task, or another library, that ends the program.
        say(foreign_exit(stop))
    except BrokenPipeError:
        return closed_pipe()
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED
    except Stopped as stop:
        say(str(stop))
        return stop.code
    except CLICK_ERROR as error:
        say(usage_message(error))
    except user_errors() as error:
        say(str(error))
    except (MemoryError, RuntimeError, ImportError, OSError, UnicodeEncodeError) as error:
        message = expected(error)
        if message is None:
            raise
        say(message)
    # One line was said already.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return USAGE


def expected(error: Exception) -> str | None:
    """Returns in one line an error that a machine or an installation causes; ``None`` for any other."""
    if isinstance(error, UnicodeEncodeError):
        # A glob, or the folder we are in, may lead to a name that is no text.
        return f"{error.object!r}: {NOT_TEXT}" if not_text(error.object) else None
    if isinstance(error, ImportError):
        return WITHOUT_MODELS if is_without_models(error) else None
    if isinstance(error, OSError):
        return refusal(error)
    # Torch's allocators raise RuntimeError.
    text = str(error).lower()
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "not enough memory: ask for fewer --samples, a smaller batch or a smaller model"
    return None


def foreign_exit(stop: SystemExit) -> str:
    """Describes in one line an exit that is not ours, with the place that asked for it."""
    place = traceback.extract_tb(stop.__traceback__)[-1]
    reason = "" if stop.code is None else f": {stop.code}"
    return f"{place.filename}, line {place.lineno}, in {place.name}, ends the program (SystemExit{reason})"


def closed_pipe() -> int:
    """Returns the exit status for a reader (``head``, say) that has closed the pipe, and silences stdout."""
    silence(sys.stdout)
    return CLOSED_PIPE


def refusal(error: OSError) -> str | None:
    """Describes in one line a refusal of the operating system; ``None`` where it gave no reason."""
    if error.errno == errno.ENAMETOOLONG:
        return f"path too long: {os.fsdecode(error.filename)}" if error.filename else "path too long"
    if error.filename is not None:
        return f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
    if error.errno is not None:
        # A write to a stream names no file: its last flush would fail once more.
        silence(sys.stdout)
        return f"the system refuses: {error.strerror}"
    return None


def not_text(name: str) -> bool:
    """Tells whether a name holds bytes that Python could not decode, which no table and no JSON can hold."""
    return any("\ud800" <= character <= "\udfff" for character in name)


def is_without_models(error: ImportError) -> bool:
    """Tells whether transformer-lens is missing, or a release without ``HookedTransformer``."""
    return error.name == "transformer_lens" or "'HookedTransformer" in str(error)


def user_errors() -> tuple[type[Exception], ...]:
    elsewhere = (
        getattr(sys.modules[module], name) for module, name in USER_ERRORS_ELSEWHERE if module in sys.modules
    )
    return (UserError, *elsewhere)


def refuse(message: str, debug: bool) -> None:
    """Prints one line on stderr."""
    if debug:
        to_stderr(traceback.format_exc().rstrip())
    to_stderr(f"interp-run: {one_line(message)}")


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
