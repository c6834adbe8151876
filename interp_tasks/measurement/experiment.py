"""Registers functions as experiments, with their command group, header settings and files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from interp_tasks.errors import UserError

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
        metrics: the metrics that its rows can have, of a task; ``None``: only rows tell.
        says: settings that the head of its table names -> the value that goes without saying (``None``: none does).
    """

    name: str
    function: Callable[..., Any]
    place: str
    says: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    metrics: Callable[[Any], Sequence[str]] | None = None

    @property
    def compares_metrics(self) -> bool:
        """Whether its rows are metrics of a task, of which people see one if they do not ask for more."""
        return self.metrics is not None or self.defined("view_columns") is None

    def defined(self, name: str) -> Callable[..., Any] | None:
        """Returns a function that stands beside the experiment, such as ``view_rows``, where there is one."""
        found: Callable[..., Any] | None = getattr(sys.modules[self.function.__module__], name, None)
        return found


def metrics_of_task(task: Any) -> Sequence[str]:
    """Returns the names of a task's own metrics: those it says, else those its metrics give zeros on two examples.

    Nothing where they cannot be told without a model's output.
    """
    declared: Sequence[str] = task.metric_names
    if declared:
        return declared
    import torch

    try:
        batch = task.sample(2, seed=0)
        found = task.metrics(torch.zeros(len(batch), task.sequence_length, task.d_vocab_out), batch)
        return [str(name) for name in found]
    except Exception:
        # What is wrong with a task of the user's own, if anything is, its measurement says.
        return ()


def experiment(
    group: str = "Look",
    says: Mapping[str, Any] | None = None,
    samples: int | None = None,
    metrics: Callable[[Any], Sequence[str]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function, which it registers as an experiment."""

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.replace("_", "-")
        function = _answers_queries(function)
        EXPERIMENTS[name] = Experiment(name, function, group, says or {}, samples, metrics)
        return function

    return register


def _answers_queries(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function; one that takes positions answers ``queries=``, their name in 0.2, with that of now."""
    if "positions" not in signature(function).parameters:
        return function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "queries" in kwargs:
            raise UserError(f"{function.__name__}: no argument queries=; it is positions= now")
        return function(*args, **kwargs)

    return call
