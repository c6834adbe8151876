"""A pool of processes that ends with the process that began it, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import active_children, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FrameType
from typing import Any

from interp_tasks.errors import Stopped

#: Signals that ask a process to end; a terminal's Ctrl-C raises an exception by itself.
ENDING = (signal.SIGTERM, signal.SIGHUP)


class NoSigintProcess(SpawnProcess):
    """A process that never sees Ctrl-C, not even while it starts: its parent answers that."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class NoSigintContext(SpawnContext):
    """Starts processes that never see Ctrl-C."""

    Process = NoSigintProcess


class SerialExecutor(Executor):
    """One call after the other, in this process; what one raises, ``submit`` raises."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def executor_for_jobs(jobs: int) -> Iterator[Executor]:
    """Yields what does so many calls at a time, which share the cores; one of them in this process."""
    if jobs == 1:
        yield SerialExecutor()
        return
    with worker_pool(jobs, threads=max(1, (os.cpu_count() or 1) // jobs)) as pool:
        yield pool


@contextlib.contextmanager
def worker_pool(processes: int, threads: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of so many processes, which are gone when the block ends or the process does.

    Args:
        threads: of torch in each; ``None``: torch's default.
    """
    # Not "fork", which would copy torch's threads in an unknown state.
    pool = ProcessPoolExecutor(processes, NoSigintContext(), init_worker, (threads,))
    try:
        with raise_on_signals():
            yield pool
    except BaseException:
        # Not to wait for work that nobody will read; a run that trains goes on where it was stored.
        for worker in active_children():
            if isinstance(worker, NoSigintProcess):
                worker.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raises :class:`Stopped` on SIGTERM and SIGHUP, where nobody else answers them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_stopped(number: int, frame: FrameType | None) -> None:
        stopped = Stopped(f"ended by {signal.Signals(number).name}")
        stopped.code = 128 + number
        raise stopped

    answered = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in answered:
        signal.signal(number, raise_stopped)
    try:
        yield
    finally:
        for number in answered:
            signal.signal(number, signal.SIG_DFL)


def init_worker(threads: int | None) -> None:
    """Silences warnings, and ends this process with its parent: what it writes would stay locked."""
    parent = parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
