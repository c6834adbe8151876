"""Tasks: data, tokens, model, loss, per-example metrics.

``tasks.get(name, **config)`` is the way in. Names load on first use, so that asking which tasks
exist does not cost an import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tasks.registry import names as list

if TYPE_CHECKING:
    from tasks.base import Batch, DropMetric, GridAxis, Metric, ProbeTarget, ProbeTargets, Split, Task, pool
    from tasks.errors import TaskError
    from tasks.registry import get, register, task_class
    from tasks.seeds import derive_seed, generator
    from tasks.settings import ModelSettings

_HOMES = {
    "tasks.base": (
        "Batch",
        "DropMetric",
        "GridAxis",
        "Metric",
        "ProbeTarget",
        "ProbeTargets",
        "Split",
        "Task",
        "pool",
    ),
    "tasks.errors": ("TaskError",),
    "tasks.seeds": ("derive_seed", "generator"),
    "tasks.registry": ("get", "register", "task_class"),
    "tasks.settings": ("ModelSettings",),
}

__all__ = [
    "Batch",
    "DropMetric",
    "GridAxis",
    "Metric",
    "ModelSettings",
    "ProbeTarget",
    "ProbeTargets",
    "Split",
    "Task",
    "TaskError",
    "derive_seed",
    "generator",
    "get",
    "list",
    "pool",
    "register",
    "task_class",
]


def __getattr__(name: str) -> Any:
    for home, exported in _HOMES.items():
        if name in exported:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'tasks' has no attribute {name!r}")
