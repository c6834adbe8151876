"""Mistakes in settings, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError


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
        shown = f", got {complaint['input']!r}" if complaint["loc"] else ""
        complaints.append(f"{key}: {message[:1].lower()}{message[1:]}{shown}")
    return "; ".join(complaints)


def unknown_key(section: str, key: str, valid: Iterable[str]) -> str:
    """What to say about a key that a section does not have: the closest one, and all of them."""
    keys = list(valid)
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {section}.{close[0]}? " if close else ""
    return f"no setting {section}.{key}: {hint}{section} has {', '.join(keys)}"
