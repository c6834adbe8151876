"""Trains, stores and loads models, and runs experiments on them. The command line is ``interp-run``.

Names load on first use, so that ``import interp_tasks`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import check_not_windows

if TYPE_CHECKING:
    from interp_tasks import experiments
    from interp_tasks.checkpoints import (
        Checkpoint,
        import_checkpoint,
        load_checkpoint,
        load_checkpoints,
        save_checkpoint,
    )
    from interp_tasks.errors import UserError
    from interp_tasks.training.config import TrainConfig
    from interp_tasks.training.train import train

_HOMES = {
    **dict.fromkeys(("Checkpoint", "import_checkpoint", "load_checkpoint"), "interp_tasks.checkpoints"),
    **dict.fromkeys(("load_checkpoints", "save_checkpoint"), "interp_tasks.checkpoints"),
    "TrainConfig": "interp_tasks.training.config",
    "UserError": "interp_tasks.errors",
    "train": "interp_tasks.training.train",
}

__all__ = ["Checkpoint", "TrainConfig", "UserError", "experiments", "import_checkpoint"]
__all__ += ["load_checkpoint", "load_checkpoints", "save_checkpoint", "train"]


def __getattr__(name: str) -> Any:
    if name == "experiments" or name in _HOMES:
        check_not_windows()
    if name == "experiments":
        return importlib.import_module("interp_tasks.experiments")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
