"""Executors of a grid's units: anything with the interface of ``concurrent.futures.Executor``."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.settings import EXECUTORS

#: A name or a number of either version of IP, and a port.
HOST = r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]"
DASK = re.compile(rf"dask(?:://(?P<address>(?:{HOST}):(?P<port>\d{{1,5}})))?", re.ASCII)
#: Seconds for a scheduler to come back, and for workers that lost theirs to leave their runs.
PATIENCE = 60.0
#: Seconds for a machine to say whether something listens at a port of it.
ANSWER = 5.0


@dataclass
class Workplace:
    """An executor, and how to have a new one where it can break.

    Attributes:
        slots: units at a time; ``None``: the executor keeps what it has no room for.
        make: a new executor in place of a broken one; ``None``: there is no second.
    """

    executor: Executor
    slots: int | None
    make: Callable[[], Executor] | None = field(default=None, repr=False)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self.executor.submit(call, *arguments)

    def renew(self) -> bool:
        """Puts a new executor in the place of a broken one; whether there is one."""
        if self.make is None:
            return False
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor = self.make()
        return True


class Here(Executor):
    """One after the other, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def is_here(executor: str | Executor) -> bool:
    """Returns whether it is known that all work is done on this machine."""
    match = DASK.fullmatch(executor) if isinstance(executor, str) else None
    return executor in ("serial", "processes") or (match is not None and match["address"] is None)


def check_executor(name: str, jobs: int | None, threads: int) -> None:
    """Refuses a name that is none, and more work at a time than there are cores.

    Raises:
        UserError: in one line.
    """
    match = DASK.fullmatch(name)
    if match is not None and match["port"] is not None and not 0 < int(match["port"]) < 65536:
        raise UserError(f"--executor {name}: ports lie between 1 and 65535")
    if name not in ("serial", "processes") and match is None:
        raise UserError(f"--executor {name!r}: write {EXECUTORS}")
    cores = os.cpu_count() or 1
    if jobs is not None and (name == "serial" or not is_here(name)):
        raise UserError(f"--jobs is for executors on this machine, processes and dask, not {name}")
    if jobs is not None and (jobs < 1 or jobs * threads > max(cores, threads)):
        raise UserError(
            f"--jobs {jobs}: with {threads} thread(s) each, from 1 to {max(1, cores // threads)} fit on {cores} cores"
        )


@contextlib.contextmanager
def workplace(name: str, jobs: int | None, threads: int) -> Iterator[Workplace]:
    """Yields the executor of a name; whatever it started ends with it.

    Raises:
        UserError: for a cluster that does not answer, or where Dask is not installed.
    """
    check_executor(name, jobs, threads)
    if name == "serial":
        yield Workplace(Here(), 1)
        return
    slots = jobs or max(1, (os.cpu_count() or 1) // threads)
    if name == "processes":
        with processes(slots) as place:
            yield place
        return
    with dask(name, slots, threads) as place:
        yield place


@contextlib.contextmanager
def processes(slots: int) -> Iterator[Workplace]:
    """Yields a place to run units on processes of this machine, which are killed when it is left by an error."""
    from multiprocessing import get_context

    def make() -> Executor:
        # A process for each unit would import torch each time.
        return ProcessPoolExecutor(slots, mp_context=get_context("spawn"), initializer=quiet)

    place = Workplace(make(), slots, make)
    try:
        yield place
    except BaseException:
        # Not to wait for units that nobody will read; a run that trains goes on where it was stored.
        kill_all(place.executor)
        raise
    place.executor.shutdown()


def kill_all(executor: Executor) -> None:
    running = dict(getattr(executor, "_processes", None) or {})
    executor.shutdown(wait=False, cancel_futures=True)
    for process in running.values():
        process.terminate()


def quiet() -> None:
    """Silences warnings, leaves interruptions to the parent, and ends the process when the parent dies."""
    import signal
    import threading
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Ends this process when its parent dies: the run would stay locked, and no other grid could take it."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def dask(name: str, slots: int, threads: int) -> Iterator[Workplace]:
    """Yields a place to run units on Dask: a cluster of this machine, or the scheduler at an address."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UserError(f"--executor {name} needs Dask: pip install 'interp-tasks[cluster]'") from None
    match = DASK.fullmatch(name)
    address = match["address"] if match else None
    with contextlib.ExitStack() as stack:
        if address is None:
            cluster: Any = stack.enter_context(
                LocalCluster(n_workers=slots, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            )
        else:
            cluster = f"tcp://{address}"

        def connected(seconds: float, kept: str = "") -> Executor:
            try:
                return OnDask(Client(cluster, timeout=seconds))
            except (OSError, TimeoutError) as error:
                raise unanswered(name, error, kept) from None

        if address is not None:
            host, _, port = address.rpartition(":")
            try:
                # Dask would go on trying.
                socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
            except OSError as error:
                raise unanswered(name, error) from None
        place = Workplace(connected(10.0), None, lambda: connected(PATIENCE, "; what is done is kept"))
        try:
            yield place
        finally:
            place.executor.shutdown()


def unanswered(name: str, error: OSError, kept: str = "") -> UserError:
    return UserError(f"--executor {name}: no scheduler answers there ({type(error).__name__}){kept}")


class OnDask(Executor):
    """A client of a scheduler; when it loses the scheduler it is broken, and its work is cancelled."""

    def __init__(self, client: Any) -> None:
        self.client = client
        # A unit is not a pure function: it writes.
        self.executor = client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.client.status != "running":
            raise BrokenExecutor(f"no scheduler: {self.client.status}")
        future: Future[Any] = self.executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # What it has to say of a scheduler that is gone, nobody needs to know.
        with contextlib.suppress(OSError, TimeoutError):
            self.client.close(timeout=5)
