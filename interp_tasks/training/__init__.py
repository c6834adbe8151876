"""The shared trainer: :func:`train`, and :class:`TrainConfig` for every setting of it.

Both load on first use; configuring a run needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_tasks.training.config import Resolved, TrainConfig, resolve_config
    from interp_tasks.training.trainer import train

_HOMES = {
    "Resolved": "interp_tasks.training.config",
    "TrainConfig": "interp_tasks.training.config",
    "resolve_config": "interp_tasks.training.config",
    "train": "interp_tasks.training.trainer",
}

__all__ = ["Resolved", "TrainConfig", "resolve_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
