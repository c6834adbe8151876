"""Ctrl-C and SIGTERM as a request: what runs stores where it is, and leaves. The second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from interp_tasks.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a signal has asked to stop.

    A :class:`Stopped` within gets the exit status that belongs to the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only there can signals be answered.
        yield lambda: False
        return
    # None: a handler that Python did not install, and cannot put back.
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}
    signals: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        # Whoever started us with a signal ignored (nohup, a shell's background) wants it so.
        if before[number] != signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield lambda: bool(signals)
    except Stopped as stopped:
        if signals:
            stopped.code = 128 + signals[0]
        raise
    finally:
        restore()
