"""Blocks that put something onto a model: one thread or task has the model meanwhile, and Ctrl-C leaves none half
entered or half left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from torch import nn

from circuits.errors import CircuitsError

Given = ParamSpec("Given")
Entered = TypeVar("Entered")


class _InterruptHandler:
    """The handler of SIGINT while a block is open: an interrupt that comes while one is entered or left waits.

    It looks at the stack, as a signal may come before the first statement of `__exit__`.
    """

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before: Any = before
        self.pending = False
        self.blocks = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _at_edge(frame):
            self.pending = True
        else:
            self.before(number, frame)

    def deliver(self) -> None:
        """Hands on what has waited, at the end of the `__enter__` or `__exit__` that calls this and of those around."""
        edge = sys._getframe(1)
        if self.pending and not _at_edge(edge.f_back):
            self.pending = False
            self.before(signal.SIGINT, edge)

    def end(self) -> None:
        """Ends one block; with the last, the handler of before is back."""
        self.blocks = max(0, self.blocks - 1)
        current: Any = signal.getsignal(signal.SIGINT)
        if not self.blocks and current is self:
            signal.signal(signal.SIGINT, self.before)


def _at_edge(frame: FrameType | None) -> bool:
    """Tells whether a block is being entered or left, other than by a run of the model in there."""
    while frame is not None and frame.f_code is not interruptible.__code__:
        if frame.f_code in _EDGES:
            return True
        frame = frame.f_back
    return False


def _install_interrupt_handler() -> _InterruptHandler | None:
    """Returns our handler, installed if it was not; None where no `KeyboardInterrupt` comes."""
    if threading.current_thread() is not threading.main_thread():
        return None
    current = signal.getsignal(signal.SIGINT)
    if isinstance(current, _InterruptHandler):
        return current
    if not callable(current):
        return None
    handler = _InterruptHandler(current)
    signal.signal(signal.SIGINT, handler)
    return handler


class UninterruptedBlock(Generic[Entered]):
    """A context manager whose entry and exit Ctrl-C waits for, so that what is put on is taken off again."""

    def __init__(self, manager: contextlib.AbstractContextManager[Entered, bool | None]) -> None:
        self._manager = manager
        self._entered = False

    def __enter__(self) -> Entered:
        if self._entered:
            raise CircuitsError("a block is entered once; call intervene (or splice) again for another")
        self._entered = True
        handler = _install_interrupt_handler()
        try:
            if handler is not None:
                handler.blocks += 1
            value = self._manager.__enter__()
        except BaseException:
            if handler is not None:
                handler.end()
                handler.deliver()
            raise
        if handler is not None and handler.pending:
            try:
                handler.deliver()
            except BaseException as error:
                # Nobody leaves a block whose entry raises.
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return value

    def __exit__(self, *error: Any) -> bool | None:
        handler = _install_interrupt_handler()
        try:
            return self._manager.__exit__(*error)
        finally:
            if handler is not None:
                handler.end()
                handler.deliver()


_EDGES = {UninterruptedBlock.__enter__.__code__, UninterruptedBlock.__exit__.__code__}


def model_block(function: Callable[Given, Iterator[Entered]]) -> Callable[Given, UninterruptedBlock[Entered]]:
    """As that of `contextlib`, for a block that puts something onto a model: Ctrl-C waits while it is entered or left.

    What takes long in there, a run of the model, is called by `interruptible`.
    """
    make = contextlib.contextmanager(function)

    @wraps(function)
    def manager(*args: Given.args, **kwargs: Given.kwargs) -> UninterruptedBlock[Entered]:
        return UninterruptedBlock(make(*args, **kwargs))

    return manager


def interruptible(function: Callable[Given, Entered], *args: Given.args, **kwargs: Given.kwargs) -> Entered:
    """Returns what a function does, which Ctrl-C ends at once, also while a block is entered."""
    return function(*args, **kwargs)


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

    def check_owner(self) -> None:
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
                        ids.update((id(parameter), parameter.data_ptr()))
        return frozenset(ids - {0})


_holds: list[_Hold] = []


def in_use(model: nn.Module) -> bool:
    """Tells whether a block holds the model."""
    return any(hold.model is model for hold in _holds)


@model_block
def holding_alone(model: nn.Module) -> Iterator[None]:
    """Holds a model, and all that shares a module or the memory of a parameter with it, for this thread and task alone.

    Raises `CircuitsError` where another has it.
    """
    hold = _Hold(model)
    # First put down, then looked at, so that of two that come at once the later one is refused.
    _holds.append(hold)
    try:
        for other in _holds[: _holds.index(hold)]:
            if not other.user.here() and not other.parts.isdisjoint(hold.parts):
                other.user.check_owner()
        yield
    finally:
        _holds.remove(hold)
