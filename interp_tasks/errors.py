"""The exception for a mistake of the user's: the command line prints its message, one line, and exits with 2."""

from __future__ import annotations

import sys


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


def check_not_windows() -> None:
    """Refuses Windows, which lacks what long runs are measured and locked by."""
    if sys.platform == "win32":
        raise UserError("interp_tasks needs Linux or macOS: on Windows, install it in WSL")
