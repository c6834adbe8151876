"""Maps names to task classes, ours and a user's own.

Lists tasks, their settings and presets without importing torch: ``--help`` and argument errors use it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.errors import TaskError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from tasks.base import Task

TaskClass = TypeVar("TaskClass", bound="type[Task]")

#: Built-in task name -> the package that registers it when imported, and holds its presets.toml.
BUILT_IN = {
    "matrix-completion": "tasks.matrix_completion",
    "matrix-completion-autoregressive": "tasks.matrix_completion",
    "matrix-completion-sizes": "tasks.matrix_completion",
    "miiii": "tasks.modular_arithmetic",
    "modular-addition": "tasks.modular_arithmetic",
    "modular-multiplication": "tasks.modular_arithmetic",
}
#: Task and model settings of built-in tasks that are lists, as their classes declare them (a test holds the two
#: together): to read a command line, no task need be imported.
LIST_KEYS = {
    "matrix-completion": ("task.mask",),
    "matrix-completion-autoregressive": ("task.mask",),
    "matrix-completion-sizes": ("task.mask", "task.sizes"),
    "miiii": ("task.primes",),
}

#: Classes by the names that they are registered under in this process.
_CLASSES: dict[str, type[Task]] = {}


def task_names() -> list[str]:
    """Returns every task name, sorted: built in, and registered in this process."""
    return sorted({*BUILT_IN, *_CLASSES})


def unknown_task_message(name: str) -> str:
    """Returns the one-line message about a name that no task has."""
    hint = did_you_mean(name, task_names())
    own = "" if hint else "; import the file that registers one of your own (--import FILE.py)"
    return f"no task {name!r}: {hint}tasks are {', '.join(task_names())}{own}"


def built_in_presets(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns presets of a built-in task, from the TOML beside it: preset -> task, model or train -> key -> value."""
    folder = BUILT_IN[name].removeprefix("tasks.")
    text = resources.files("tasks").joinpath(folder).joinpath("presets.toml").read_text(encoding="utf-8")
    presets: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)[name]
    return presets


def register(name: str) -> Callable[[TaskClass], TaskClass]:
    """Decorates a class to make the :class:`Task` available under ``name``, on the command line too.

    Defining one of the name again (a notebook cell run twice, a file that is imported and given to ``--import``)
    replaces it.

    Raises:
        TaskError: if a built-in task has the name, one that is not loaded yet included.
    """

    def register_class(task_class: TaskClass) -> TaskClass:
        home = BUILT_IN.get(name)
        if home is not None and not task_class.__module__.startswith(home + "."):
            raise TaskError(f"the task name {name!r} is taken by {home}")
        task_class.name = name
        _CLASSES[name] = task_class
        return task_class

    return register_class


def task_class(name: str) -> type[Task]:
    """Returns the class registered under a name; an unknown one is refused with the closest and all that there are."""
    if name not in _CLASSES and name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name not in _CLASSES:
        raise TaskError(unknown_task_message(name))
    return _CLASSES[name]


def get(name: str, **config: Any) -> Task:
    """Returns a task by name, its config validated: ``get("matrix-completion", n=7, rank=2)``."""
    from pydantic import ValidationError

    from tasks.model_settings import validation_error_line

    try:
        return task_class(name)(**config)
    except ValidationError as error:
        raise TaskError(validation_error_line(error, "task", task_class(name).model_fields)) from None
