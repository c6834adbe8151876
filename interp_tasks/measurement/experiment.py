"""Registers functions as experiments, with their command group, header settings and files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from interp_tasks.measurement.argument_types import checked

P = ParamSpec("P")
R = TypeVar("R")

#: Every experiment that was imported, by the name that its command and its rows have.
EXPERIMENTS: dict[str, Experiment] = {}


@dataclass(frozen=True)
class Experiment:
    """A function that measures, with its registered name, group, settings and default samples.

    Attributes:
        name: of its command, its rows and its files: ``prime-order`` for ``prime_order``.
        place: the panel of ``interp-run --help`` that its command stands in, or the group it belongs to.
        samples: how many examples it takes where nothing is said, if not as many as the others.
        says: settings that the head of its table names -> the value that goes without saying (``None``: none does).
    """

    name: str
    function: Callable[..., Any]
    place: str
    says: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None

    def part(self, kind: str) -> ModuleType | None:
        """Imports ``table`` or ``figure`` of the experiment's folder; ``None`` where there is none."""
        folder, _, file = self.function.__module__.rpartition(".")
        if file != "measure" or find_spec(f"{folder}.{kind}") is None:
            return None
        return importlib.import_module(f"{folder}.{kind}")


def experiment(
    group: str = "Look", says: Mapping[str, Any] | None = None, samples: int | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: checks the types of its arguments, and registers it as an experiment."""

    def register(function: Callable[P, R]) -> Callable[P, R]:
        call = checked(function)
        name = function.__name__.replace("_", "-")
        EXPERIMENTS[name] = Experiment(name, call, group, says or {}, samples)
        return call

    return register
