"""Lists tasks and presets without importing torch (``--help`` and argument errors use it)."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Preset = Mapping[str, Mapping[str, Any]]

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

#: Names registered by code that ran in this process.
registered: set[str] = set()


def names() -> list[str]:
    """Returns every task name, sorted: built in, of installed packages, and registered in this process."""
    # Not above: importing it takes longer than all of this file, which every --help loads.
    from importlib.metadata import entry_points

    installed = (entry.name for entry in entry_points(group="interp_tasks.tasks"))
    return sorted({*BUILT_IN, *registered, *installed})


def is_known(name: str) -> bool:
    """Says whether a task has this name; looks through the installed packages only where none of ours has."""
    return name in BUILT_IN or name in registered or name in names()


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
