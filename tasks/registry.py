"""Maps names to task classes: ours, installed packages' (entry points ``interp_tasks.tasks``), a user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

from tasks import catalog
from tasks.base import Task
from tasks.errors import TaskError
from tasks.settings import one_line

TaskClass = TypeVar("TaskClass", bound=type[Task])

_CLASSES: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[TaskClass], TaskClass]:
    """Decorates a class to make the :class:`Task` available under ``name``, on the command line too.

    Defining the same class again (a notebook cell run twice, a file that is imported and given to ``--import``)
    replaces it.

    Raises:
        TaskError: if another class has the name, a built-in one that is not loaded yet included.
    """

    def add(task_class: TaskClass) -> TaskClass:
        home = catalog.BUILT_IN.get(name)
        if home is not None and not task_class.__module__.startswith(home + "."):
            raise TaskError(f"the task name {name!r} is taken by {home}")
        known = _CLASSES.get(name)
        if known is not None and _path(known) != _path(task_class) and _place(known) != _place(task_class):
            raise TaskError(f"the task name {name!r} is taken by {_path(known)}")
        task_class.name = name
        _CLASSES[name] = task_class
        catalog.registered.add(name)
        return task_class

    return add


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _place(cls: type) -> tuple[str, str]:
    """Returns where a class is defined: its file, if its module has one, and its name there."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return (cls.__module__ if file is None else os.path.realpath(file)), cls.__qualname__


def task_class(name: str) -> type[Task]:
    """Returns the class registered under a name.

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
    """Returns a task by name, its config validated: ``get("matrix-completion", n=7, rank=2)``.

    Raises:
        TaskError: for an unknown name or a config the task refuses.
    """
    try:
        return task_class(name)(**config)
    except ValidationError as error:
        raise TaskError(one_line(error, "task", task_class(name).model_fields)) from None
