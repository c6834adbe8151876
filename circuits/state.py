"""What our hooks must know while they fire: whether a clean pass is under way, and which rows are running.

And what a clean pass must undo: the weights that blocks around it have replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclass
class State:
    """Of one model. Shared by nested blocks, so that a clean pass silences all of them."""

    suspended: bool = False
    rows: slice | Tensor | None = None
    total: int | None = None
    # Of each parameter that some block has replaced, the values it had outside all of them.
    originals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    # What each open block gives them, in the order of entry.
    replacing: list[dict[nn.Parameter, Tensor]] = field(default_factory=list)


_states: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(model: nn.Module) -> State:
    return _states.setdefault(model, State())


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Our hooks do nothing inside, and weights are the original ones; hooks of others work as ever."""
    state = state_of(model)
    if state.suspended:
        yield
        return
    with holding(state.originals.items()):
        state.suspended = True
        try:
            yield
        finally:
            state.suspended = False


@contextmanager
def running_rows(model: nn.Module, rows: slice | Tensor, total: int) -> Iterator[None]:
    """The forward inside runs `rows` of a batch of `total` examples; per-example tensors are cut to match."""
    state = state_of(model)
    before = state.rows, state.total
    state.rows, state.total = rows, total
    try:
        yield
    finally:
        state.rows, state.total = before


@contextmanager
def replaced(model: nn.Module, values: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Parameters hold other values inside, except in clean passes; a later value for one overrides an earlier.

    Blocks may end in any order: a parameter then holds what the latest block still open gives it.
    """
    state = state_of(model)
    layer = dict(values)
    try:
        for parameter in layer:
            state.originals.setdefault(parameter, parameter.detach().clone())
        state.replacing.append(layer)
        _copy(layer)
        yield
    finally:
        try:
            _end(state, layer)
        except BaseException:
            # Ctrl-C while a large model is copied back must not leave it half replaced.
            _end(state, layer)
            raise


def _end(state: State, layer: dict[nn.Parameter, Tensor]) -> None:
    # By identity: equal values of another block are another block's.
    state.replacing[:] = [other for other in state.replacing if other is not layer]
    left = {parameter: value for other in state.replacing for parameter, value in other.items()}
    held = {parameter: state.originals[parameter] for parameter in layer if parameter in state.originals}
    _copy({parameter: left.get(parameter, original) for parameter, original in held.items()})
    for parameter in held:
        if parameter not in left:
            state.originals.pop(parameter, None)


@contextmanager
def holding(values: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Copy values into parameters, and back what they held, bit for bit; gives what they held.

    In place, so that tied and viewed parameters stay what they are, and so that torch refuses a backward pass
    through values that are no longer there.
    """
    wanted = dict(values)
    before = {parameter: parameter.detach().clone() for parameter in wanted}
    try:
        _copy(wanted)
        yield before
    finally:
        try:
            _copy(before)
        except BaseException:
            # Ctrl-C while a large model is copied back must not leave it half replaced.
            _copy(before)
            raise


def _copy(values: dict[nn.Parameter, Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)


@contextmanager
def substituted(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors stand where the parameters of these names do, which keep their values: for a function transform,
    whose tensors cannot be copied into them. A model that reaches a parameter by another way sees the parameter.
    """
    slots: list[tuple[dict[str, Any], str, Any]] = []
    for name in values:
        path, _, leaf = name.rpartition(".")
        own = model.get_submodule(path)._parameters
        slots.append((own, leaf, own[leaf]))
    try:
        for (held, leaf, _), value in zip(slots, values.values(), strict=True):
            held[leaf] = value
        yield
    finally:
        try:
            _put_back(slots)
        except BaseException:
            _put_back(slots)
            raise


def _put_back(slots: list[tuple[dict[str, Any], str, Any]]) -> None:
    for held, leaf, parameter in slots:
        held[leaf] = parameter
