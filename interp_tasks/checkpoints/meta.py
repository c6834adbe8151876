"""``meta.json``: what a checkpoint says of itself, signed: a changed byte is noticed. Knows no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.run_files import META_FILE, read_json
from interp_tasks.errors import UserError

FORMAT = 1
_META_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "task": (dict, type(None)),
    "model": dict,
    "frozen": list,
    "weights": dict,
    "training_state": (dict, type(None)),
}


def signed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta data with a sha256 over all of it: a changed byte is noticed here as in the weights."""
    return {**meta, "sha256": meta_sha256(meta)}


def meta_sha256(meta: Mapping[str, Any]) -> str:
    unsigned = {name: value for name, value in meta.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``meta.json``, checked.

    Raises:
        UserError: for a foreign folder, a mangled file, or a format of another version.
    """
    file = folder / META_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no checkpoint: it has no {META_FILE}")
    meta = read_json(file, "a checkpoint's description")
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{file} has format version {meta.get('format')!r}, this interp-tasks reads {FORMAT}: "
            "use the version that wrote it, or save the model again"
        )
    for name, kind in _META_TYPES.items():
        if name not in meta or not isinstance(meta[name], kind):
            raise UserError(f"{file} is mangled: {name!r} is missing or of the wrong kind")
    if meta.get("sha256") != meta_sha256(meta):
        raise UserError(
            f"{file} has been altered: its sha256 does not match its content; restore it from a copy"
        )
    return meta
