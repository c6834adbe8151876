"""Registers functions as experiments, with their command group, header settings and files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: Every experiment that was imported, by the name that its command and its rows have.
EXPERIMENTS: dict[str, Experiment] = {}


@dataclass(frozen=True)
class Experiment:
    """A function that measures, with its registered name, group, settings and default samples.

    Attributes:
        name: of its command, its rows and its files: ``prime-order`` for ``prime_order``.
        place: the panel of ``interp-run --help`` that its command stands in, or the group it belongs to.
        says: settings that the head of its table names -> the value that goes without saying (``None``: none does).
        samples: how many examples it takes where nothing is said, if not as many as the others.
        judged_by_task: whether the metrics of its rows are those of the task.
    """

    name: str
    function: Callable[..., Any]
    place: str
    says: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    judged_by_task: bool = False

    @property
    def compares_metrics(self) -> bool:
        """Whether its rows are of several metrics, of which people see one if they do not ask for more."""
        return self.judged_by_task or self.defined("view_columns") is None

    def defined(self, name: str) -> Callable[..., Any] | None:
        """Returns a function that stands beside the experiment, ``NAME_view_rows`` or ``view_rows``, if any does."""
        beside = vars(sys.modules[self.function.__module__])
        found: Callable[..., Any] | None = beside.get(f"{self.function.__name__}_{name}", beside.get(name))
        return found


def experiment(place: str = "Look", says: Mapping[str, Any] | None = None, **more: Any) -> Callable[[F], F]:
    """Decorates a function, which it registers as an experiment; the arguments are those of :class:`Experiment`."""

    def register(function: F) -> F:
        name = function.__name__.replace("_", "-")
        EXPERIMENTS[name] = Experiment(name, function, place, says or {}, **more)
        return function

    return register
