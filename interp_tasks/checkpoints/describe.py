"""Lists the checkpoints of run folders as rows of a table. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.marks import MARKS, find_marks
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import find_run
from interp_tasks.checkpoints.run_files import TRAINING_STATE_FILE, checkpoint_folder, stored_steps
from interp_tasks.errors import UserError


def describe_run(path: str | Path) -> list[dict[str, Any]]:
    """Returns a row per checkpoint: ``step, marks, bytes, dtype, training_state, task, metrics, saved_at, path``.

    ``marks`` lists those of pre, onset, end and post that fall on the step: none where the run shows no drop.

    ``path`` is a run folder or ``zoo:NAME``.

    Raises:
        UserError: if the folder holds no checkpoints, or one whose meta.json is mangled.
    """
    run = find_run(str(path))
    steps = stored_steps(run)
    if not steps:
        raise UserError(f"{run} holds no checkpoints: it is no run folder, or the run has just begun")
    try:
        marks = find_marks(run, needed=())
    except UserError:
        marks = {}
    return [
        _row(checkpoint_folder(run, step), [mark for mark in MARKS if marks.get(mark) == step])
        for step in steps
    ]


def _row(folder: Path, marks: list[str]) -> dict[str, Any]:
    meta = read_meta(folder)
    return {
        "step": meta["step"],
        "marks": marks,
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        "dtype": meta["weights"]["dtype"],
        "training_state": (folder / TRAINING_STATE_FILE).is_file(),
        "task": meta["task"]["name"] if meta["task"] else None,
        "metrics": meta["metrics"],
        "saved_at": meta["saved_at"],
        "path": str(folder),
    }
