"""What is learned: data, tokens, model, loss, per-example metrics. ``tasks.get(name, **config)`` is the way in."""

from tasks import matrix_completion as matrix_completion
from tasks import modular_arithmetic as modular_arithmetic
from tasks.base import Batch, DropMetric, Metric, Split, Task, TaskError, derive_seed, generator, pool
from tasks.registry import get, register, task_class
from tasks.registry import names as list
from tasks.settings import ModelSettings

__all__ = [
    "Batch",
    "DropMetric",
    "Metric",
    "ModelSettings",
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
