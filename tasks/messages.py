"""Mistakes in settings, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def one_line(error: ValidationError, section: str, valid: Iterable[str]) -> str:
    """Each complaint headed by the key a user would type, joined by semicolons; ``valid`` are the section's keys."""
    complaints = []
    for complaint in error.errors():
        key = ".".join([section, *map(str, complaint["loc"])])
        if complaint["type"] == "extra_forbidden":
            complaints.append(unknown_key(section, str(complaint["loc"][0]), valid))
            continue
        message = complaint["msg"].removeprefix("Value error, ")
        shown = f", got {complaint['input']!r}" if complaint["loc"] else ""
        complaints.append(f"{key}: {message[:1].lower()}{message[1:]}{shown}")
    return "; ".join(complaints)


def unknown_key(section: str, key: str, valid: Iterable[str]) -> str:
    """What to say about a key that a section does not have: the closest one, and all of them."""
    keys = list(valid)
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {section}.{close[0]}? " if close else ""
    return f"no setting {section}.{key}: {hint}{section} has {', '.join(keys)}"
