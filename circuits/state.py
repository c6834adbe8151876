"""What our hooks must know while they fire: whether a clean pass is under way, and which rows are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class State:
    """Of one model. Shared by nested blocks, so that a clean pass silences all of them."""

    suspended: bool = False
    rows: slice | None = None
    total: int | None = None


_states: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(model: nn.Module) -> State:
    return _states.setdefault(model, State())


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Our hooks do nothing inside; hooks of others work as ever."""
    state = state_of(model)
    before = state.suspended
    state.suspended = True
    try:
        yield
    finally:
        state.suspended = before


@contextmanager
def running_rows(model: nn.Module, rows: slice, total: int) -> Iterator[None]:
    """The forward inside runs `rows` of a batch of `total` examples; per-example tensors are cut to match."""
    state = state_of(model)
    before = state.rows, state.total
    state.rows, state.total = rows, total
    try:
        yield
    finally:
        state.rows, state.total = before
