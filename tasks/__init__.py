"""Tasks: data, tokens, model, loss, per-example metrics.

``tasks.get(name, **config)`` is the way in. Names load on first use, so that asking which tasks
exist does not cost an import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tasks.registry import task_names as list

if TYPE_CHECKING:
    from tasks.base import Batch, DropMetric, GridAxis, Metric, ProbeTarget, ProbeTargets, Split, Task, pool
    from tasks.errors import TaskError
    from tasks.model_settings import ModelSettings
    from tasks.registry import get, register, task_class
    from tasks.seeds_and_device_tensors import derive_seed, generator

__all__ = ["Batch", "DropMetric", "GridAxis", "Metric", "ModelSettings", "ProbeTarget", "ProbeTargets"]
__all__ += ["Split", "Task", "TaskError", "derive_seed", "generator", "get", "list", "pool", "register"]
__all__ += ["task_class"]


def __getattr__(name: str) -> Any:
    homes = ("errors", "registry", "model_settings", "seeds_and_device_tensors", "base")
    for home in homes if name in __all__ else ():
        module = importlib.import_module(f"tasks.{home}")
        if hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'tasks' has no attribute {name!r}")
