"""The error for invalid tasks, models and batches, and the hint in messages about names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TaskError(ValueError):
    """An invalid task, model or batch; the message is one line that says what would be valid."""


def did_you_mean(given: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns the closest name, after the prefix, as a question with a blank behind it; nothing where none is close."""
    return "".join(f"did you mean {prefix}{name}? " for name in get_close_matches(given, names, 1))
