"""The task that a checkpoint names in its ``meta.json``, made without its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks import Task


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
        return UserError(f"{ref} names no task: give --task NAME, or --tokens FILE.npy")
    return UserError(
        f"{ref} is of task {named.get('name')!r}, which is not registered here: "
        f"import it (--import FILE.py), or give --task NAME; tasks are {', '.join(tasks.list())}"
    )
