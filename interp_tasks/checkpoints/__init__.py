"""Runs and checkpoints on disk: written atomically, read without ever unpickling, named by REFs.

What needs torch is imported on first use, so that the command line can check a REF before it pays for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.checkpoint_refs import ResolvedCheckpoint, resolve, zoo_names
from interp_tasks.checkpoints.drop_detection import Drop, detect_drop
from interp_tasks.checkpoints.run_reader import read_metrics, read_run, stored_steps
from interp_tasks.checkpoints.steps_around_drop import MARKS, find_marks

if TYPE_CHECKING:
    from interp_tasks.checkpoints.checkpoint import (
        Checkpoint,
        load_checkpoint,
        load_checkpoints,
        save_checkpoint,
    )
    from interp_tasks.checkpoints.foreign_weights import import_checkpoint
    from interp_tasks.checkpoints.run_writer import RunFolder

_NEEDS_TORCH = {
    "Checkpoint": "checkpoint",
    "RunFolder": "run_writer",
    "import_checkpoint": "foreign_weights",
    "load_checkpoint": "checkpoint",
    "load_checkpoints": "checkpoint",
    "save_checkpoint": "checkpoint",
}

__all__ = ["MARKS", "Checkpoint", "Drop", "ResolvedCheckpoint", "RunFolder", "detect_drop", "find_marks"]
__all__ += ["import_checkpoint", "load_checkpoint", "load_checkpoints", "read_metrics", "read_run", "resolve"]
__all__ += ["save_checkpoint", "stored_steps", "zoo_names"]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    globals()[name] = value
    return value
