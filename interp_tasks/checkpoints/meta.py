"""Reads and writes ``meta.json``, the signed description of a checkpoint. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_files import (
    META_FILE,
    STOPPED_FOLDER,
    WEIGHTS_FILE,
    is_step,
    read_json,
    stored_steps,
)
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks import Task

FORMAT = 1


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _task(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("config"), dict)
    )


_FORM: dict[str, Callable[[Any], bool]] = {
    "step": is_step,
    "task": _task,
    "model": lambda value: isinstance(value, dict),
    "frozen": _names,
    "weights": lambda value: isinstance(value, dict) and isinstance(value.get("dtype"), str),
    "training_state": lambda value: value is None or isinstance(value, dict),
    "metrics": lambda value: value is None or isinstance(value, dict),
    "saved_at": lambda value: isinstance(value, str),
}


def signed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta data with a sha256 over all of it: a changed byte is noticed here as in the weights."""
    return {**meta, "sha256": meta_sha256(meta)}


def meta_sha256(meta: Mapping[str, Any]) -> str:
    unsigned = {name: value for name, value in meta.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's ``meta.json``, checked.

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
    for name, fits in _FORM.items():
        if name not in meta or not fits(meta[name]):
            raise UserError(f"{file} is mangled: {name!r} is missing or of the wrong kind")
    if meta.get("sha256") != meta_sha256(meta):
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


def reached(run: Path) -> int | None:
    """Returns the step that a run would go on from: of its last checkpoint, or of a stop after it."""
    last_steps = stored_steps(run)[-1:]
    with contextlib.suppress(UserError):
        last_steps.append(read_meta(run / STOPPED_FOLDER)["step"])
    return max(last_steps, default=None)


def stored_task(meta: Mapping[str, Any], file: Path) -> Task | None:
    """Returns the task; ``None`` for a checkpoint that names none, or one that is not registered here.

    Raises:
        UserError: naming ``file``, for a configuration that the task refuses.
    """
    import tasks
    from tasks.errors import TaskError

    named = meta["task"]
    if named is None or named.get("name") not in tasks.list():
        return None
    try:
        return tasks.get(named["name"], **named.get("config", {}))
    except TaskError as error:
        raise UserError(f"{file}: {error}") from None


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
