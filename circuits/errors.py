"""The one exception that users of `circuits` are meant to catch, and what it says of a value."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CircuitsError(ValueError):
    """An error in a request; its message says in one line what was requested and what would be valid."""

    def __init__(self, message: str) -> None:
        # What was asked may be anything, a large tensor too.
        line, half = " ".join(message.split()), _LONGEST // 2
        super().__init__(line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}")


_LONGEST = 800


def format_value(value: Any) -> str:
    """Returns what an error says of a value: its text where that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


@contextmanager
def prefix_circuits_errors(label: str) -> Iterator[None]:
    """Puts what was asked before the message of an error raised inside the block."""
    try:
        yield
    except CircuitsError as error:
        raise CircuitsError(f"{label}: {error}") from error
