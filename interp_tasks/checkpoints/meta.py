"""Reads and writes ``meta.json``, the signed description of a checkpoint. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.run_files import (
    META_FILE,
    STOPPED_FOLDER,
    WEIGHTS_FILE,
    checkpoint_folder,
    is_step,
    read_json,
    stored_steps,
)
from interp_tasks.errors import UserError

FORMAT = 1
#: Field -> its kinds.
KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "task": (dict, type(None)),
    "model": (dict,),
    "frozen": (list,),
    "weights": (dict,),
    "training_state": (dict, type(None)),
    "metrics": (dict, type(None)),
    "saved_at": (str,),
}


def signed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta data with a sha256 over all of it: a changed byte is noticed here as in the weights."""
    unsigned = {name: value for name, value in meta.items() if name != "sha256"}
    return {**meta, "sha256": hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()}


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's ``meta.json``, checked."""
    file = folder / META_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no checkpoint: it has no {META_FILE}")
    meta = read_json(file, "a checkpoint's description")
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{file} has format version {meta.get('format')!r}, this interp-tasks reads {FORMAT}: "
            "use the version that wrote it, or save the model again"
        )
    for name, kinds in KINDS.items():
        value: Any = meta.get(name)
        fits = name in meta and isinstance(value, kinds)
        if fits and name == "step":
            fits = is_step(value)
        elif fits and name == "frozen":
            fits = all(isinstance(each, str) for each in value)
        elif fits and name == "weights":
            fits = isinstance(value.get("dtype"), str)
        elif fits and name == "task" and value is not None:
            fits = isinstance(value.get("name"), str) and isinstance(value.get("config"), dict)
        if not fits:
            raise UserError(f"{file} is mangled: {name!r} is missing or of the wrong kind")
    if meta.get("sha256") != signed(meta)["sha256"]:
        raise UserError(
            f"{file} has been altered: its sha256 does not match its content; restore it from a copy"
        )
    return meta


def is_whole(folder: Path) -> bool:
    """Tells whether a checkpoint's description is valid and its weights have the size stated there."""
    try:
        return (folder / WEIGHTS_FILE).stat().st_size == read_meta(folder)["weights"].get("bytes")
    except (UserError, OSError):
        return False


def stored_points(run: Path) -> list[tuple[int, Path]]:
    """Returns the steps and folders of a run's checkpoints, and of a stop between two of them, by step."""
    points = [(step, checkpoint_folder(run, step)) for step in stored_steps(run)]
    with contextlib.suppress(UserError):
        points.append((read_meta(run / STOPPED_FOLDER)["step"], run / STOPPED_FOLDER))
    return sorted(points)


def no_task(meta: Mapping[str, Any], ref: str) -> UserError:
    """Returns what to say of a checkpoint of which there is no task."""
    import tasks

    named = meta["task"]
    if named is None:
        return UserError(f"{ref} names no task: give --task NAME, --prompts FILE or --tokens FILE.npy")
    return UserError(
        f"{ref} is of task {named.get('name')!r}, which is not registered here: "
        f"import it (--import FILE.py), or give --task NAME; tasks are {', '.join(tasks.list())}"
    )
