"""Disks full, read-only, or changed by others; a loss that turns NaN: a clear word, the last good state kept.

Each disk operation of a run fails once with "No space left on device". The run is trained on a real file system of so
few pages that it is full in the middle of some file, one page more each time. It is trained as a user who may not
write there. Two writers want one run. A checkpoint goes while a grid measures it. The loss turns NaN at some step.
Whatever happens is said in one line with exit status 2; all that can be read afterwards is what the run left alone has;
and once the fault is gone, the same command ends with the same bytes.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.campaigns.alone import (
    WHOLE,
    Known,
    Scenario,
    check_disk,
    check_end,
    ended,
    fingerprint,
    left_alone,
    live,
)
from tests.campaigns.frame import Campaign, Skipped, Trials, expect
from tests.campaigns.lives import Life, at_operation, preload

SETTINGS: dict[str, Any] = {**WHOLE, "train.steps": 24, "train.checkpoint_every": 8}
PAGE = os.sysconf("SC_PAGESIZE")
#: "nobody" on every Unix that has a name for it.
NOBODY = 65534
NOT_ALLOWED = ("Permission denied", "no permission")
Case = Callable[[Path, Known], str]


def refused(life: Life, *words: str) -> None:
    """It ended with one line that says why, in one of these words."""
    status, said = life.end(), life.said()
    expect(status == 2, f"exit status {status}: {said[-300:]}")
    clear = said.count("\n") == 0 and said.startswith("interp-run: ") and any(word in said for word in words)
    expect(clear, f"said: {said[-300:]}")


def goes_on(run: Path, known: Known, output: Path | None = None) -> None:
    """With the fault gone the same command ends as the run left alone did."""
    ended(live(run, SETTINGS, output=output))
    check_disk(run, known)
    check_end(run, known, [])


# ---- No space left


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def operation_fails(number: int, run: Path, known: Known) -> str:
    life = live(run, SETTINGS, lambda: at_operation(number, False, no_space))
    status, said = life.end(), life.said()
    check = partial(check_disk, run, known)
    if status == 0:
        # Not all of them are the run's: nobody minds where git or a log of seconds cannot be.
        check()
        check_end(run, known, [])
        return "an operation that the run can do without"
    refused_line = said.count("\n") == 0 and "No space left on device" in said
    expect(status == 2 and refused_line, f"exit status {status}: {said[-300:]}")
    if run.exists():
        check()
    goes_on(run, known)
    return "no space left at an operation"


def disk_of(pages: int, run: Path, known: Known) -> str:
    run.mkdir()
    with mounted(run, f"size={pages * PAGE},mode=755"):
        inside = run / "run"
        life = live(inside, SETTINGS, output=run.with_suffix(".out"))
        status, said = life.end(), life.said()
        if status == 0:
            check_end(inside, known, [])
            return "a disk that is large enough"
        expect(
            status == 2 and "No space left on device" in said and said.count("\n") == 0,
            f"{pages} pages: exit status {status}: {said[-300:]}",
        )
        if inside.exists():
            check_disk(inside, known)
        mount(run, f"remount,size={100 * known.operations * PAGE}")
        goes_on(inside, known, run.with_suffix(".out"))
    return "a full disk"


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise Skipped(f"no file system can be mounted: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Skipped("only root on Linux can mount a small file system")
    mount(folder, options)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


# ---- Not allowed


def not_allowed(where: str, run: Path, known: Known) -> str:
    """``where``: the folder in which nothing may be written, of a run with half its steps."""
    if os.geteuid() == 0 and not readable_by_others():
        raise Skipped("Python, its packages or this repository lie where no other user may read")
    if where != "..":
        ended(live(run, {**SETTINGS, "train.steps": 8}))
    before = {} if where == ".." else fingerprint(run)
    before.pop("metrics.jsonl", None)  # lines that no checkpoint follows are cut by the next life
    place = (run / where).resolve() if where != ".." else run.parent / "closed"
    place.mkdir(exist_ok=True)
    place.chmod(0o555)
    target = place / "run" if where == ".." else run

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)

    if where == "checkpoints" and os.geteuid() == 0:
        for path in (run, *(path for path in run.rglob("*") if where not in path.parts)):
            os.chown(path, NOBODY, NOBODY)
    refused(live(target, SETTINGS, as_nobody, run.with_suffix(".out")), *NOT_ALLOWED)
    place.chmod(0o755)
    expect(fingerprint(run).items() >= before.items(), "something was changed although it was refused")
    if where == "..":
        shutil.rmtree(place)
    else:
        goes_on(run, known)
    return "a read-only folder"


def readable_by_others() -> bool:
    """Whether a user without rights could import what a run imports."""

    def look() -> int:
        os.setuid(NOBODY)
        for module in ("os", "torch", "transformer_lens", "interp_tasks", "tasks"):
            Path(str(sys.modules[module].__file__)).read_bytes()
        return 0

    return Life(look, Path(os.devnull)).end() == 0


# ---- Others at work


def two_writers(run: Path, known: Known) -> str:
    first = live(run, SETTINGS)
    while first.wait(0.001) is None and not (run / "checkpoints" / "00000000" / "meta.json").exists():
        pass
    first.signal(signal.SIGSTOP)  # it holds its lock for as long as the second one tries
    other = Life(lambda: _train(run), run.with_suffix(".other"))
    refused(other, f"is being written by another process (pid {first.pid})")
    first.signal(signal.SIGCONT)
    ended(first)
    check_end(run, known, [])
    return "two writers"


def _train(run: Path) -> int:
    from tests.campaigns.lives import interp_run, train_command

    return interp_run(train_command(run, SETTINGS))


def deleted_under_a_grid(what: str, run: Path, known: Known) -> str:
    """``what`` of a run goes when it is trained and not yet measured."""
    life = Life(partial(grid_without, what, run), run.with_suffix(".out"))
    ended(life)
    return f"{what} deleted under a grid"


def grid_without(what: str, folder: Path) -> int:
    from concurrent.futures import Future

    from interp_tasks.grids import grid
    from interp_tasks.grids.executors import Here
    from interp_tasks.grids.table import table
    from interp_tasks.grids.units import MeasureUnit

    spec = {
        "train": {
            "task": "modular-addition",
            "seeds": "0:2",
            "set": {"task.p": 5, "train.steps": 2, "train.eval_samples": 8, "model.d_model": 8},
        },
        "experiment": [{"name": "ablation", "at": "last", "settings": {"samples": 8, "heads": "0.0"}}],
    }

    class Careless(Here):
        """What it deletes, it deletes of the first run."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if isinstance(args[0], MeasureUnit) and args[0].runs[0].endswith("seed-0"):
                gone = folder / args[0].runs[0] / what
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
            return super().submit(fn, *args, **kwargs)

    whole = grid(spec, folder.with_name("whole"), executor="serial")
    found = grid(spec, folder, executor=Careless())
    texts = [record.error for record in found.failed]
    expect(len(texts) == 1, f"failed: {texts}")
    expect("seed-0" in texts[0] and "Error" not in texts[0].split()[0], f"said: {texts[0]}")
    expect(len(table(found)) > 0, "the other run is not measured")
    again = grid(spec, folder, executor="serial", retry=True)
    expect(not again.failed, f"tried again: {[record.error for record in again.failed]}")
    import pandas

    pandas.testing.assert_frame_equal(table(again), table(whole))
    shutil.rmtree(folder.with_name("whole"))
    return 0


# ---- NaN


def loss_turns_nan(step: int, run: Path, known: Known) -> str:
    def first() -> None:
        from interp_tasks.training.loop import Loop

        update = Loop.update

        def spoilt(self: Any, at: int) -> Any:
            if at == step:
                with torch.no_grad():
                    next(iter(self.updater.parameters.values())).fill_(float("nan"))
            return update(self, at)

        import torch

        Loop.update = spoilt  # type: ignore[method-assign]

    refused(live(run, SETTINGS, first), "training diverged: weights are not finite")
    check_disk(run, known)
    goes_on(run, known)
    return "a loss that turns NaN"


# ---- All of them


def cases(known: Known) -> list[Case]:
    """Each once; the kinds by turns, so that the first few are of all of them."""
    folder = sum(file.stat().st_size for file in known.run.rglob("*") if file.is_file())
    deleted = ("checkpoints", "checkpoints/00000002", "checkpoints/00000002/model.safetensors")
    kinds: list[list[Case]] = [
        [partial(operation_fails, number) for number in range(known.operations)],
        [partial(disk_of, count) for count in range(1, 3 * folder // PAGE)],
        [partial(not_allowed, where) for where in ("checkpoints", "..", ".")],
        [two_writers],
        [partial(deleted_under_a_grid, what) for what in deleted],
        [partial(loss_turns_nan, step) for step in range(0, SETTINGS["train.steps"], 5)],
    ]
    chance = random.Random(0)
    for kind in kinds:
        chance.shuffle(kind)
    return [case for turn in zip_longest(*kinds) for case in turn if case is not None]


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    preload()
    known = left_alone(Scenario("left alone", SETTINGS), scratch)
    every = cases(known)

    def trial(number: int) -> list[str]:
        run = scratch / f"run-{number}"
        try:
            return [every[number % len(every)](run, known)]
        finally:
            shutil.rmtree(run, ignore_errors=True)

    yield Trials(trial, len(every))


CAMPAIGN = Campaign("disk", "disks full, read-only, or changed by others", prepare)
