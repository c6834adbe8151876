"""Tells of two sweeps of a model whether they take the same memory, so that it is measured once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from circuits.engine.memory import forward_sizes
from circuits.interventions.apply import wanted
from circuits.interventions.base import Cut, Step, WeightEdit
from circuits.model.surface import Surface
from circuits.sweeps.inputs import SweepInputs, Variant


def sizes_of(surface: Surface, variants: Sequence[Variant], inputs: SweepInputs, asked: str) -> Hashable:
    """Returns what decides how much memory a sweep of one model takes, but for the engines that run it."""
    places = Counter(tuple(map(_place, one.plan)) for one in variants)
    passes = Counter(
        (one.prompts.shape, one.hook, type(one.reduction))
        for one in dict.fromkeys(wanted(step for each in variants for step in each.plan))
    )
    metric, prompts = inputs.metric, inputs.prompts
    division = (prompts.shape, prompts.padded, inputs.step, inputs.chunk, inputs.outputs, inputs.per_pass)
    read = (metric.name, _code_of(metric.function), metric.positions)
    return (
        asked,
        forward_sizes(surface),
        frozenset(places.items()),
        frozenset(passes.items()),
        read,
        division,
    )


def _place(step: Step) -> Hashable:
    """Returns what decides how much memory one step takes."""
    if isinstance(step, WeightEdit):
        return step.name
    if isinstance(step, Cut):
        return _place(step.sender), step.receiver.hook, step.through
    return step.hook, type(step.replacement), _code_of(getattr(step.replacement, "function", None))


def _code_of(function: Any) -> Hashable:
    """Returns the code of a function, which unlike the function keeps nothing alive that it works on."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code: Any = getattr(function, "__code__", None)
    return type(function).__qualname__ if code is None else code
