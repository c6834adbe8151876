"""Grids whose workers die and whose scheduler goes: they end with the table of one process.

A grid of a few runs is trained and measured by processes, by Dask on this machine, and by a scheduler and workers that
are programs of their own. In the middle of a run, at a random line of its log, the worker is killed, or the worker with
what would start it anew, or the scheduler; where nobody starts another, the trial does, as whoever runs a cluster
would.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaigns.frame import Campaign, Skipped, Trials, expect

REPOSITORY = Path(__file__).parents[2]
SECONDS = 240
STEPS = 400
SPEC = {
    "train": {
        "task": "modular-addition",
        "seeds": "0:3",
        "set": {
            "task.p": 11,
            "train.steps": STEPS,
            "train.eval_samples": 16,
            "train.log_every": 5,
            "train.checkpoint_every": 50,
            "model.d_model": 16,
            "model.n_heads": 2,
        },
    },
    "experiment": [{"name": "ablation", "at": "last", "settings": {"samples": 16, "heads": "0.0"}}],
}


class Cluster:
    """A scheduler and one worker, each a program of its own."""

    def __init__(self, scratch: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.scratch = scratch
        self.programs: list[subprocess.Popen[bytes]] = []
        self.scheduler = self.start_scheduler()
        self.worker = self.start_worker()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
        with open(self.scratch / f"{arguments[1].rpartition('.')[2]}.log", "ab") as log:
            program = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                cwd=self.scratch,
                env=environment,
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        return self.start(
            *("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(self.port)),
            "--no-dashboard",
        )

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self.start(
            *("-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{self.port}", "--nthreads", "1"),
            *("--no-dashboard", "--death-timeout", str(SECONDS), "--local-directory", str(self.scratch)),
        )

    def end(self) -> None:
        for program in self.programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def in_the_middle(folder: Path, chance: random.Random, done: Future[Any]) -> int:
    """Wait until a run is in the middle of its training; the process that trains it."""
    line = chance.randrange(1, STEPS // 5 - 10)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if done.done():
            done.result()
            raise Skipped("the grid was done before anything could be killed")
        for log in folder.glob("runs/*/seed-*/metrics.jsonl"):
            lines = log.read_bytes().count(b"\n")
            if line <= lines < STEPS // 5 - 5:
                with contextlib.suppress(ValueError):
                    return int((log.parent / ".lock").read_text())
        time.sleep(0.01)
    raise AssertionError("nothing was trained")


def worker_of_processes(folder: Path, chance: random.Random, scratch: Path) -> Any:
    with started(folder, "processes", 1) as done:
        os.kill(in_the_middle(folder, chance, done), signal.SIGKILL)
        return done.result(SECONDS)


def worker_of_dask_here(folder: Path, chance: random.Random, scratch: Path) -> Any:
    with started(folder, "dask", 1) as done:
        os.kill(in_the_middle(folder, chance, done), signal.SIGKILL)
        return done.result(SECONDS)


def on_a_cluster(kill: Callable[[Cluster, int], None]) -> Callable[[Path, random.Random, Path], Any]:
    def act(folder: Path, chance: random.Random, scratch: Path) -> Any:
        cluster = Cluster(scratch)
        try:
            with started(folder, f"dask://127.0.0.1:{cluster.port}", None) as done:
                kill(cluster, in_the_middle(folder, chance, done))
                return done.result(SECONDS)
        finally:
            cluster.end()

    return act


def worker(cluster: Cluster, process: int) -> None:
    os.kill(process, signal.SIGKILL)


def worker_and_nanny(cluster: Cluster, process: int) -> None:
    os.killpg(cluster.worker.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    cluster.start_worker()


def scheduler(cluster: Cluster, process: int) -> None:
    os.killpg(cluster.scheduler.pid, signal.SIGKILL)
    cluster.scheduler.wait()
    cluster.start_scheduler()
    cluster.start_worker()


@contextmanager
def started(folder: Path, executor: str, jobs: int | None) -> Iterator[Future[Any]]:
    from interp_tasks.grids import grid

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(grid, SPEC, folder, executor=executor, jobs=jobs)


KINDS: dict[str, Callable[[Path, random.Random, Path], Any]] = {
    "a worker of processes killed": worker_of_processes,
    "the scheduler killed and started again": on_a_cluster(scheduler),
    "a worker of Dask killed": on_a_cluster(worker),
    "a worker of Dask killed with its nanny, and another started": on_a_cluster(worker_and_nanny),
    "a worker of Dask on this machine killed": worker_of_dask_here,
}


def trial(number: int, expected: Any, scratch: Path) -> list[str]:
    import pandas

    from interp_tasks.grids.table import table

    kind = list(KINDS)[number % len(KINDS)]
    if "processes" not in kind:
        try:
            import distributed  # noqa: F401
        except ImportError:
            raise Skipped("Dask is not installed") from None
    folder = scratch / f"grid-{number}"
    try:
        found = KINDS[kind](folder, random.Random(number), scratch)
        expect(not found.failed, f"{kind}: failed: {[record.error for record in found.failed]}")
        expect(not found.waiting, f"{kind}: {len(found.waiting)} units were not tried")
        try:
            pandas.testing.assert_frame_equal(table(found), expected)
        except AssertionError as error:
            expect(False, f"{kind}: another table: {' '.join(str(error).split())[:200]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [kind]


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    import torch

    from interp_tasks.grids import grid
    from interp_tasks.grids.table import table

    torch.set_num_threads(1)
    expected = table(grid(SPEC, scratch / "serial", executor="serial"))
    yield Trials(lambda number: trial(number, expected, scratch))


CAMPAIGN = Campaign("grid", "grids whose workers and scheduler die", prepare, usual=20)
