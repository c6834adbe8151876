"""Plain JSON of what a run records, and digests of its files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError


def to_json(value: Any, where: str = "value") -> Any:
    """Returns plain JSON of nested mappings, sequences and numbers (numpy's and torch's scalars too).

    NaN and infinities become ``None``: JSON has no word for them.

    Raises:
        TypeError: naming the first value that JSON cannot hold.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [to_json(part, f"{where}[{index}]") for index, part in enumerate(parts)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
        if isinstance(value, (str, bool)):
            return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def json_bytes(value: Any) -> bytes:
    """Returns readable JSON with one trailing newline."""
    plain = to_json(value)
    try:
        return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:
        # Half a character, of a name that is no text: only as an escape.
        return (json.dumps(plain, indent=2, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check_digest(file: Path, content: bytes, expected: Any) -> None:
    """Refuses content that differs from what ``meta.json`` recorded.

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
