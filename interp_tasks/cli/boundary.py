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

from interp_tasks.errors import UserError

USAGE = 2
INTERRUPTED = 130
#: BadParameter -> UsageError -> ClickException, whether typer brings its own click or uses the installed one.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
#: Errors of packages that know nothing of the command line; looked up only where those are loaded already.
USER_ERRORS_ELSEWHERE = (("tasks.base", "TaskError"), ("circuits.errors", "CircuitsError"))


@contextlib.contextmanager
def quiet_libraries(debug: bool) -> Iterator[None]:
    """Keep warnings and log lines of libraries off the terminal, unless debugging."""
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
    """Run a command; a mistake of the user's is one line on stderr, anything else unexpected propagates."""
    try:
        code = command()
        sys.stdout.flush()
        if code == INTERRUPTED:
            # Typer turns the interruption into this code; older ones into Abort, below.
            say("interrupted", debug=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        # Click answers a closed pipe with sys.exit(1).
        return stop.code if isinstance(stop.code, int) else 1
    except BrokenPipeError:
        # The reader (head, say) has seen enough. Point stdout elsewhere, or the final flush would complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted", debug)
        return INTERRUPTED
    except CLICK_ERROR as error:
        say(usage_message(error), debug)
        return USAGE
    except user_errors() as error:
        say(str(error), debug)
        return USAGE
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say("not enough memory: ask for fewer --samples, a smaller batch or a smaller model", debug)
        return USAGE
    except OSError as error:
        # Any option that takes a path may meet this one, already when it asks whether the path exists.
        if error.errno != errno.ENAMETOOLONG:
            raise
        say(f"path too long: {str(error.filename)[:60]}...", debug)
        return USAGE


def is_out_of_memory(error: Exception) -> bool:
    """MemoryError, or what torch's CPU and CUDA allocators raise instead."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def user_errors() -> tuple[type[Exception], ...]:
    elsewhere = (
        getattr(sys.modules[module], name) for module, name in USER_ERRORS_ELSEWHERE if module in sys.modules
    )
    return (UserError, *elsewhere)


def say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"interp-run: {' '.join(message.split())}", file=sys.stderr)


def usage_message(error: Any) -> str:
    """A complaint about the arguments themselves, with what would be valid and where to read on."""
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    commands = getattr(context.command, "commands", None)
    if commands:
        return f"{message}; commands are {', '.join(commands)}"
    return f"{message}; see {context.command_path} --help"
