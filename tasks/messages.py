"""Validation errors, said in one line."""

from __future__ import annotations

from pydantic import ValidationError


def one_line(error: ValidationError, section: str) -> str:
    """Each complaint headed by the key a user would type, joined by semicolons."""
    complaints = []
    for complaint in error.errors():
        key = ".".join([section, *map(str, complaint["loc"])])
        message = complaint["msg"].removeprefix("Value error, ")
        if complaint["type"] == "extra_forbidden":
            complaints.append(f"no setting {key}")
            continue
        shown = f", got {complaint['input']!r}" if complaint["loc"] else ""
        complaints.append(f"{key}: {message[:1].lower()}{message[1:]}{shown}")
    return "; ".join(complaints)
