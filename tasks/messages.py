"""Mistakes in settings, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

#: Characters of a value, and of a list of keys, that are shown.
SHOWN, LISTED = 80, 150


def one_line(
    error: ValidationError,
    section: str,
    valid: Iterable[str],
    inner: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Each complaint headed by the key a user would type, joined by semicolons.

    Args:
        valid: the section's keys.
        inner: the keys of what lies under a key of the section.
    """
    complaints = []
    for complaint in error.errors():
        key = ".".join([section, *map(str, complaint["loc"])])
        if complaint["type"] == "extra_forbidden":
            first, *rest = map(str, complaint["loc"])
            where, last = key.rpartition(".")[::2]
            known = (inner or {}).get(first, ()) if rest else valid
            complaints.append(unknown_key(where, last, known) if known else f"no setting {key}")
            continue
        message = complaint["msg"].removeprefix("Value error, ")
        shown = f", got {given(complaint['input'])}" if complaint["loc"] else ""
        complaints.append(f"{key}: {message[:1].lower()}{message[1:]}{shown}")
    return "; ".join(complaints)


def given(value: object) -> str:
    """A value as it was given, or the two ends of a long one."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no whole number of so many digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 28]}...{text[-25:]}"


def unknown_key(section: str, key: str, valid: Iterable[str]) -> str:
    """What to say about a key that a section does not have: the closest one, and all of them."""
    keys = list(valid)
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {section}.{close[0]}? " if close else ""
    listed = ", ".join(keys)
    if len(listed) > LISTED:
        listed = f"{listed[: listed.rindex(', ', 0, LISTED)]} and others, {len(keys)} in all"
    return f"no setting {section}.{key}: {hint}{section} has {listed}"
