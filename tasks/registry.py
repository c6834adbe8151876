"""Names -> task classes: ours, those of installed packages (entry points ``interp_tasks.tasks``), and a user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

from tasks import catalog
from tasks.base import Task, TaskError
from tasks.messages import one_line

TaskClass = TypeVar("TaskClass", bound=type[Task])

_CLASSES: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[TaskClass], TaskClass]:
    """Class decorator: make a :class:`Task` available under ``name`` everywhere, the command line included."""

    def add(task_class: TaskClass) -> TaskClass:
        known = _CLASSES.get(name)
        if known is not None and known.__qualname__ != task_class.__qualname__:
            raise TaskError(f"the task name {name!r} is taken by {known.__module__}.{known.__qualname__}")
        task_class.name = name
        _CLASSES[name] = task_class
        catalog.registered.add(name)
        return task_class

    return add


def task_class(name: str) -> type[Task]:
    """The class registered under a name.

    Raises:
        TaskError: for an unknown name, naming the closest and all valid ones.
    """
    if name not in _CLASSES and name in catalog.BUILT_IN:
        importlib.import_module(catalog.BUILT_IN[name])
    if name not in _CLASSES:
        for entry in entry_points(group="interp_tasks.tasks", name=name):
            register(name)(entry.load())
    if name not in _CLASSES:
        raise TaskError(catalog.unknown(name))
    return _CLASSES[name]


def get(name: str, **config: Any) -> Task:
    """A task by name, its config validated: ``get("matrix-completion", n=7, rank=2)``.

    Raises:
        TaskError: for an unknown name or a config the task refuses.
    """
    try:
        return task_class(name)(**config)
    except ValidationError as error:
        valid = ", ".join(task_class(name).model_fields)
        raise TaskError(f"{one_line(error, 'task')} (task {name!r} has {valid})") from None
