"""The exception for a mistake of the user's: the command line prints its message, one line, and exits with 2."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class UserError(ValueError):
    """A user's mistake; the message says in one line what is wrong and what would be right."""


class Stopped(Exception):
    """A run that was asked to stop has stored where it is.

    Attributes:
        code: exit status of the command line.
    """

    code = 130


class Diverged(UserError):
    """Training diverged: a search goes on with other settings, anything else stops."""


def file_locks() -> Any:
    """Returns the module ``fcntl``, by whose locks processes share runs and searches.

    Raises:
        UserError: where there is none: on Windows.
    """
    try:
        return import_module("fcntl")
    except ImportError:
        raise UserError(
            "interp_tasks needs Linux or macOS, for their file locks: on Windows, install it in WSL"
        ) from None
