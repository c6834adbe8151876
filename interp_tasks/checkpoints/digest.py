"""Size and sha256 of a file's content: what tells a truncated or altered file from a whole one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError


def digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check_digest(file: Path, content: bytes, expected: Any) -> None:
    """Refuse content that differs from what ``meta.json`` recorded.

    Raises:
        UserError: naming the file and both sizes, or that bytes in it have changed.
    """
    if not isinstance(expected, dict) or not {"bytes", "sha256"} <= set(expected):
        raise UserError(f"{file.parent / 'meta.json'} records no bytes and sha256 of {file.name}")
    if type(expected["bytes"]) is not int or len(content) != expected["bytes"]:
        longer = type(expected["bytes"]) is int and len(content) > expected["bytes"]
        fault = "is too long" if longer else "is truncated"
        raise UserError(
            f"{file} {fault}: {len(content)} bytes where meta.json says {expected['bytes']}; "
            "restore it from a copy"
        )
    if digest(content)["sha256"] != expected["sha256"]:
        raise UserError(
            f"{file} has been altered: its sha256 is not the one in meta.json; restore it from a copy"
        )
