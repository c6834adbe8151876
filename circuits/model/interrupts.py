"""Context managers that Ctrl-C does not leave half entered or half left."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Entered = TypeVar("Entered")


class _Handler:
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


def _installed() -> _Handler | None:
    """Returns our handler, installed if it was not; None where no `KeyboardInterrupt` comes."""
    if threading.current_thread() is not threading.main_thread():
        return None
    current = signal.getsignal(signal.SIGINT)
    if isinstance(current, _Handler):
        return current
    if not callable(current):
        return None
    handler = _Handler(current)
    signal.signal(signal.SIGINT, handler)
    return handler


class Undisturbed(ABC, Generic[Entered]):
    """A context manager whose entry and exit Ctrl-C waits for, so that what is put on is taken off again."""

    @abstractmethod
    def _enter(self) -> Entered: ...

    @abstractmethod
    def _leave(self, *error: Any) -> bool | None: ...

    def __enter__(self) -> Entered:
        handler = _installed()
        try:
            if handler is not None:
                handler.blocks += 1
            value = self._enter()
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
        handler = _installed()
        try:
            return self._leave(*error)
        finally:
            if handler is not None:
                handler.end()
                handler.deliver()


_EDGES = {Undisturbed.__enter__.__code__, Undisturbed.__exit__.__code__}


class _Generated(Undisturbed[Entered]):
    def __init__(self, manager: contextlib.AbstractContextManager[Entered, bool | None]) -> None:
        self._manager = manager

    def _enter(self) -> Entered:
        return self._manager.__enter__()

    def _leave(self, *error: Any) -> bool | None:
        return self._manager.__exit__(*error)


def contextmanager(function: Callable[Given, Iterator[Entered]]) -> Callable[Given, Undisturbed[Entered]]:
    """As that of `contextlib`, for a block that puts something onto a model: Ctrl-C waits while it is entered or left.

    What takes long in there, a run of the model, is called by `interruptible`.
    """
    make = contextlib.contextmanager(function)

    @wraps(function)
    def manager(*args: Given.args, **kwargs: Given.kwargs) -> Undisturbed[Entered]:
        return _Generated(make(*args, **kwargs))

    return manager


def interruptible(function: Callable[Given, Entered], *args: Given.args, **kwargs: Given.kwargs) -> Entered:
    """Returns what a function does, which Ctrl-C ends at once, also while a block is entered."""
    return function(*args, **kwargs)
