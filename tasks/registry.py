"""Maps names to task classes: ours, installed packages' (entry points ``interp_tasks.tasks``), a user's own.

Lists tasks, their settings and presets without importing torch: ``--help`` and argument errors use it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.errors import TaskError

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
_MATRICES = (
    *("n", "m", "rank", "law", "distribution", "scale"),
    *("p_mask", "mask", "grid_max", "grid_step", "off_grid"),
)
_ONE_MODULUS = ("p", "train_fraction", "validation_size", "split_seed", "equals_class", "operator_token")
#: Task settings of each built-in task, as its class declares them (a test holds the two together).
TASK_KEYS = {
    "matrix-completion": _MATRICES,
    "matrix-completion-autoregressive": (*_MATRICES, "loss_on"),
    "matrix-completion-sizes": (*_MATRICES, "sizes"),
    "miiii": ("p", "train_fraction", "validation_size", "split_seed", "primes", "digits", "variant"),
    "modular-addition": _ONE_MODULUS,
    "modular-multiplication": _ONE_MODULUS,
}
#: Model settings that a built-in task has beyond those shared by all (``tasks.settings.ModelSettings``).
EXTRA_MODEL_KEYS = {
    "matrix-completion": ("mask_embedding",),
    "matrix-completion-sizes": ("mask_embedding",),
}
#: Task and model settings of built-in tasks that are lists.
LIST_KEYS = {
    "matrix-completion": ("task.mask",),
    "matrix-completion-autoregressive": ("task.mask",),
    "matrix-completion-sizes": ("task.mask", "task.sizes"),
    "miiii": ("task.primes",),
}

#: Classes by the names that they are registered under in this process.
_CLASSES: dict[str, type[Task]] = {}


def names() -> list[str]:
    """Returns every task name, sorted: built in, of installed packages, and registered in this process."""
    return sorted({*BUILT_IN, *_CLASSES, *(entry.name for entry in installed())})


def installed() -> list[Any]:
    """Returns the entry points of installed packages."""
    # Not above: importing it takes longer than all of this file, which every --help loads.
    from importlib.metadata import entry_points

    return [*entry_points(group="interp_tasks.tasks")]


def is_known(name: str) -> bool:
    """Says whether a task has this name; looks through the installed packages only where none of ours has."""
    return name in BUILT_IN or name in _CLASSES or name in names()


def unknown(name: str) -> str:
    """Returns the one-line message about a name that no task has."""
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    own = "" if close else "; import the file that registers one of your own (--import FILE.py)"
    return f"no task {name!r}: {hint}tasks are {', '.join(names())}{own}"


def built_in_keys(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the settings that a built-in task accepts, by section (task, model)."""
    from tasks.settings import ModelSettings

    shared = tuple(ModelSettings.model_fields)
    return {"task": TASK_KEYS[name], "model": (*shared, *EXTRA_MODEL_KEYS.get(name, ()))}


def built_in_presets(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns presets of a built-in task, from the TOML beside it: preset -> task, model or train -> key -> value."""
    folder = BUILT_IN[name].removeprefix("tasks.")
    text = resources.files("tasks").joinpath(folder).joinpath("presets.toml").read_text(encoding="utf-8")
    presets: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)[name]
    return presets


def register(name: str) -> Callable[[TaskClass], TaskClass]:
    """Decorates a class to make the :class:`Task` available under ``name``, on the command line too.

    Defining the same class again (a notebook cell run twice, a file that is imported and given to ``--import``)
    replaces it.

    Raises:
        TaskError: if another class has the name, a built-in one that is not loaded yet included.
    """

    def add(task_class: TaskClass) -> TaskClass:
        home = BUILT_IN.get(name)
        if home is not None and not task_class.__module__.startswith(home + "."):
            raise TaskError(f"the task name {name!r} is taken by {home}")
        known = _CLASSES.get(name)
        if known is not None and _path(known) != _path(task_class) and _place(known) != _place(task_class):
            raise TaskError(f"the task name {name!r} is taken by {_path(known)}")
        task_class.name = name
        _CLASSES[name] = task_class
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
    if name not in _CLASSES and name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name not in _CLASSES:
        for entry in installed():
            if entry.name == name:
                register(name)(entry.load())
    if name not in _CLASSES:
        raise TaskError(unknown(name))
    return _CLASSES[name]


def get(name: str, **config: Any) -> Task:
    """Returns a task by name, its config validated: ``get("matrix-completion", n=7, rank=2)``.

    Raises:
        TaskError: for an unknown name or a config the task refuses.
    """
    from pydantic import ValidationError

    from tasks.settings import one_line

    try:
        return task_class(name)(**config)
    except ValidationError as error:
        raise TaskError(one_line(error, "task", task_class(name).model_fields)) from None
