"""The owner of a model while a block is open on it: one thread, and in it one task of asyncio. Others are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.interrupts import contextmanager


def _task() -> asyncio.Task[Any] | None:
    loop = asyncio._get_running_loop()
    return None if loop is None else asyncio.current_task(loop)


@dataclass(frozen=True)
class User:
    """A thread, and the task that runs in it, as a user of models."""

    # Thread ids do not serve, as the operating system reuses them.
    thread: threading.Thread = field(default_factory=threading.current_thread)
    task: asyncio.Task[Any] | None = field(default_factory=_task)

    def here(self) -> bool:
        """Tells whether what runs now is this user; tasks count as that which started their loop, or has ended."""
        return self.thread is threading.current_thread() and (
            self.task is None or self.task is _task() or self.task.done()
        )

    def __str__(self) -> str:
        thread = f"thread {self.thread.name!r}" + (" (ended)" if not self.thread.is_alive() else "")
        return thread if self.task is None else f"task {self.task.get_name()!r} of {thread}"

    def refuse_others(self) -> None:
        """Refuses what runs now where it is not this user."""
        if not self.here():
            raise CircuitsError(
                f"the model is in use by {self}, and {User()} runs it; leave the block there first, or take a copy"
            )


@dataclass(eq=False)
class _Hold:
    """A model that is in use. It keeps the modules alive, so that their ids are not reused."""

    model: nn.Module
    user: User = field(default_factory=User)

    @cached_property
    def parts(self) -> frozenset[int]:
        """The ids of its modules and the addresses of its parameters: a model that shares one is edited with it."""
        inner = self.model.__dict__.get("original_model")  # a bridge does not register the model it wraps
        ids: set[int] = set()
        for root in (self.model, inner):
            for module in root.modules() if isinstance(root, nn.Module) else ():
                ids.add(id(module))
                for parameter in module._parameters.values():
                    if parameter is not None:
                        ids.update((id(parameter), _address(parameter)))
        return frozenset(ids - {0})


_holds: list[_Hold] = []


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Holds a model, and all that shares a module or the memory of a parameter with it, for this thread and task alone.

    Raises `CircuitsError` where another has it.
    """
    hold = _Hold(model)
    # First put down, then looked at, so that of two that come at once the later one is refused.
    _holds.append(hold)
    try:
        for other in _holds[: _holds.index(hold)]:
            if not other.user.here() and not other.parts.isdisjoint(hold.parts):
                other.user.refuse_others()
        yield
    finally:
        _holds.remove(hold)


def _address(parameter: Tensor) -> int:
    """Returns the address of a parameter; 0 while another thread traces it (its module's id identifies it then)."""
    try:
        return parameter.data_ptr()
    except RuntimeError:
        return 0
