"""Checkpoints, runs and grids mangled by the thousand: refused in one line, or read as what was saved.

No trial may end in anything but a ``UserError`` (or a task's), run code that lies in a file, hang, or take more memory
than what is read and a fixed room beside it. A file that reads although it was mangled gives the bits that were saved.
What nobody can tell from a good file is another good file: a checkpoint whose digests were made anew, and ``run.json``
and the logs, which carry none; of these only the form can be checked. Trials of that kind are counted apart ("signed
anew", "without digest").
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.campaigns.damage import (
    BYTES,
    TEXTS,
    changed,
    doubled,
    spoil_place,
    tensors_spoilt,
)
from tests.campaigns.frame import Campaign, Fault, Trials, expect

#: Beside what is mapped already, in bytes. The files are some ten thousand.
ROOM = 192 << 20
SECONDS = 30
SPEC = {
    "train": {
        "task": "modular-addition",
        "seeds": "0",
        "set": {
            "task.p": 5,
            "train.steps": 4,
            "train.eval_samples": 8,
            "model.d_model": 8,
            "model.n_heads": 2,
        },
    },
    "experiment": [{"name": "ablation", "at": "last", "settings": {"samples": 8, "heads": "0.0"}}],
}


@dataclass(frozen=True)
class Good:
    """What is mangled, as it was saved.

    Attributes:
        tensors: parameters by step, as bytes by name; of the training states the same.
        again: the command that made the run.
        rows: the grid's table.
    """

    run: Path
    grid: Path
    tensors: dict[int, dict[str, bytes]]
    states: dict[int, dict[str, bytes]]
    again: Callable[[Path], Path]
    rows: Any


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def make(scratch: Path) -> Good:
    from interp_tasks.checkpoints import load_parameters, stored_steps
    from interp_tasks.checkpoints.meta import read_meta
    from interp_tasks.checkpoints.training_state import read_training_state
    from interp_tasks.grids import grid
    from interp_tasks.grids.table import table
    from interp_tasks.training import train
    from tasks import get

    config = {
        "steps": 40,
        "checkpoint_every": 20,
        "log_every": 1,
        "batch_size": 5,
        "grokfast": "ema",
    }
    task = get("modular-addition", p=5)

    def again(out: Path) -> Path:
        return train(task, out=out, settings={"d_model": 8, "n_heads": 2}, config=config)

    run = again(scratch / "run")
    steps = stored_steps(run)
    states = {
        step: read_training_state(folder, read_meta(folder))
        for step in steps
        for folder in [run / "checkpoints" / f"{step:08d}"]
    }
    # Where each copy will be: rows say where their run lies.
    found = grid(SPEC, scratch / "trial", executor="serial")
    rows = table(found)
    (scratch / "trial").rename(scratch / "grid")
    return Good(
        run,
        scratch / "grid",
        {step: bits(load_parameters(run / "checkpoints" / f"{step:08d}")) for step in steps},
        {step: bits(state.tensors) for step, state in states.items() if state is not None},
        again,
        rows,
    )


@contextmanager
def limited() -> Iterator[None]:
    """Little memory, little time."""
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    )
    before = resource.getrlimit(resource.RLIMIT_AS)

    def hang(number: int, frame: Any) -> None:
        raise Fault(f"it hangs for more than {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def tried(what: str, act: Callable[[], Any]) -> Any:
    """What ``act`` gives, ``None`` where it refuses in one line.

    Raises:
        Fault: for any other end.
    """
    import traceback

    from circuits import CircuitsError
    from interp_tasks.errors import UserError
    from tasks.errors import TaskError

    try:
        return act()
    except (UserError, TaskError, CircuitsError) as error:
        text = str(error)
        expect("\n" not in text and bool(text), f"{what}: not one line: {text[:200]!r}")
        expect(
            "allocate" not in text and "out of memory" not in text, f"{what}: it took memory: {text[:200]}"
        )
        return None
    except Fault:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        ours = [
            each for each in traceback.extract_tb(error.__traceback__) if "/interp_tasks/" in each.filename
        ]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        raise Fault(
            f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:160]} ({place})"
        ) from error


# ---- What is mangled


def mangle_checkpoint(folder: Path, chance: random.Random, canary: Path) -> tuple[str, bool]:
    """What was done to it, and whether its digests were made anew."""
    from interp_tasks.checkpoints.atomic import digest
    from interp_tasks.checkpoints.meta import signed

    meta_file = folder / "meta.json"
    names = sorted(file.name for file in folder.iterdir())
    how = chance.choice(
        [*["bytes"] * 3, "place", "text", "json", "json anew", "json anew", "tensors", "tensors anew", "swap"]
    )
    if how == "bytes":
        file, act = folder / chance.choice(names), chance.choice(BYTES)
        file.write_bytes(act(file.read_bytes(), chance))
        return f"{file.name} {act.__name__}", False
    if how == "place":
        file = folder / chance.choice(names)
        return f"{file.name} is {spoil_place(file, chance, canary)}", False
    if how == "text":
        content = chance.choice([*TEXTS, doubled(meta_file.read_bytes(), chance)])
        meta_file.write_bytes(content)
        return "meta.json another text", False
    if how == "swap":
        one, other = folder / chance.choice(names), folder / chance.choice(names)
        one.write_bytes(other.read_bytes())
        return "one file in the place of another", False
    meta = json.loads(meta_file.read_text())
    if how.startswith("json"):
        meta, kind = changed(meta, chance)
        if how == "json anew":
            meta = signed(meta)
        meta_file.write_bytes(json.dumps(meta).encode())
        return f"{how}: {kind}", how == "json anew"
    file = folder / chance.choice([name for name in names if name.endswith(".safetensors")])
    content, kind = tensors_spoilt(file.read_bytes(), chance)
    file.write_bytes(content)
    if how == "tensors anew":
        key = "weights" if file.name == "model.safetensors" else "training_state"
        meta[key].update(digest(content))
        meta_file.write_text(json.dumps(signed(meta)))
    return f"{how}: {kind}", how == "tensors anew"


def mangle_json_lines(file: Path, chance: random.Random) -> str:
    lines = file.read_bytes().split(b"\n")
    at = chance.randrange(len(lines) - 1)
    how = chance.choice(["value", "value", "value", "text", "order", "twice", "bytes"])
    if how == "value":
        lines[at] = json.dumps(changed(json.loads(lines[at]), chance)[0]).encode()
    elif how == "text":
        lines[at] = chance.choice(TEXTS)
    elif how == "order":
        chance.shuffle(lines)
    elif how == "twice":
        lines.insert(at, lines[at])
    content = b"\n".join(lines)
    file.write_bytes(chance.choice(BYTES)(content, chance) if how == "bytes" else content)
    return f"{file.name}: {how}"


def mangle_run(run: Path, chance: random.Random, canary: Path) -> str:
    how = chance.choice(["run.json"] * 4 + ["log"] * 4 + ["clock", "place", "names", "bytes"])
    file = run / "run.json"
    if how == "run.json":
        if chance.random() < 0.2:
            file.write_bytes(chance.choice(TEXTS))
            return "run.json another text"
        value, kind = changed(json.loads(file.read_text()), chance)
        file.write_text(json.dumps(value))
        return f"run.json: {kind}"
    if how == "log":
        return mangle_json_lines(run / "metrics.jsonl", chance)
    if how == "clock":
        return mangle_json_lines(run / "clock.jsonl", chance)
    if how == "names":
        checkpoints = run / "checkpoints"
        one = checkpoints / chance.choice(sorted(os.listdir(checkpoints)))
        name = chance.choice(
            ["00000007", "9" * 30, "٣", "-1", "1e3", "00000001 ", ".x", "0000000", "\x1b[2J"]
        )
        if not (checkpoints / name).exists():
            one.rename(checkpoints / name)
        return "a checkpoint of another name"
    file = run / chance.choice(["run.json", "metrics.jsonl", "clock.jsonl", ".lock"])
    if how == "place":
        return f"{file.name} is {spoil_place(file, chance, canary)}"
    act = chance.choice(BYTES)
    file.write_bytes(act(file.read_bytes(), chance))
    return f"{file.name} {act.__name__}"


def mangle_grid(folder: Path, chance: random.Random, canary: Path) -> str:
    file = chance.choice(sorted((folder / "units").iterdir()))
    how = chance.choice(["bytes", "place", "text", "json"])
    if how == "place":
        return f"{file.suffix} is {spoil_place(file, chance, canary)}"
    if how == "json" and file.suffix == ".json":
        value, kind = changed(json.loads(file.read_text()), chance)
        file.write_text(json.dumps(value))
        return f"record: {kind}"
    if how == "text":
        file.write_bytes(chance.choice(TEXTS))
        return f"{file.suffix} another text"
    act = chance.choice(BYTES)
    file.write_bytes(act(file.read_bytes(), chance))
    return f"{file.suffix} {act.__name__}"


# ---- What must hold


def try_checkpoint(run: Path, good: Good, chance: random.Random, canary: Path) -> str:
    from interp_tasks.checkpoints import describe_run, load_checkpoint, load_parameters
    from interp_tasks.checkpoints.meta import read_meta
    from interp_tasks.checkpoints.training_state import read_training_state

    step = chance.choice(sorted(good.states))
    folder = run / "checkpoints" / f"{step:08d}"
    kind, anew = mangle_checkpoint(folder, chance, canary)
    with limited():
        loaded = tried(kind, lambda: load_checkpoint(chance.choice([f"{run}@{step}", str(folder)])))
        tried(kind, lambda: describe_run(run))
        state = tried(kind, lambda: read_training_state(folder, read_meta(folder)))
        parameters = tried(kind, lambda: load_parameters(folder))
    if loaded is not None:
        found = bits(dict(loaded.model.named_parameters()))
        saved = bits(parameters) if anew and parameters is not None else good.tensors[step]
        expect(loaded.step == step or anew, f"{kind}: it loads as step {loaded.step}")
        expect(anew or found == saved, f"{kind}: it loads with other weights than were saved")
        if anew and parameters is not None:
            # In whichever dtype the file has them, the model has the same numbers.
            same = all(
                (parameters[name].to(parameter.dtype) == parameter).all()
                for name, parameter in loaded.model.named_parameters()
            )
            expect(bool(same), f"{kind}: the model has other weights than its file")
    if state is not None:
        expect(
            anew or bits(state.tensors) == good.states[step], f"{kind}: another training state than was saved"
        )
    end = "refused" if loaded is None else "read, signed anew" if anew else "read as saved"
    return f"checkpoint {end}"


def try_run(run: Path, good: Good, chance: random.Random, canary: Path) -> str:
    from interp_tasks.checkpoints import (
        MARKS,
        RunFolder,
        describe_run,
        load_checkpoint,
        read_metrics,
        read_run,
    )
    from interp_tasks.checkpoints import resolve as resolved
    from interp_tasks.checkpoints.run_files import read_clock
    from interp_tasks.measurement.run_logs import read_runs
    from interp_tasks.report.run_report import check_report

    kind = mangle_run(run, chance, canary)
    config = json.loads((good.run / "run.json").read_text())["config"]

    def go_on() -> Any:
        with RunFolder.open(run, config, {}) as folder:
            point = folder.resume()
            if point is not None:
                folder.time_at(point.step)
            folder.finish({"process": 1})
            return point

    def curves() -> None:
        from interp_tasks.experiments import curve, drops

        for each in read_runs(str(run)):
            for metric in each.own_metrics():
                each.curve(metric)
        drops(str(run))
        curve(str(run))

    def loaded() -> Any:
        return load_checkpoint(f"{run}@last")

    with limited():
        log = tried(kind, lambda: read_metrics(run))
        tried(kind, lambda: read_run(run))
        tried(kind, lambda: read_clock(run))
        tried(kind, lambda: resolved(f"{run}@all"))
        tried(kind, lambda: resolved(f"{run}@{chance.choice(MARKS)}"))
        tried(kind, lambda: describe_run(run))
        if chance.random() < 0.1:
            tried(kind, curves)
            tried(kind, lambda: check_report(str(run), None, {}))
        checkpoint = tried(kind, loaded)
        point = tried(kind, go_on)
        if chance.random() < 0.2:
            tried(kind, lambda: good.again(run))
    if checkpoint is not None:
        found = bits(dict(checkpoint.model.named_parameters()))
        expect(found == good.tensors[checkpoint.step], f"{kind}: other weights than were saved")
    if point is not None:
        expect(bits(point.parameters) == good.tensors[point.step], f"{kind}: it goes on from other weights")
        expect(bits(point.tensors) == good.states[point.step], f"{kind}: it goes on from another state")
    return f"run {'refused' if log is None and point is None else 'read, without digest'}"


def try_grid(folder: Path, good: Good, chance: random.Random, canary: Path) -> str:
    import pandas

    from interp_tasks.grids import grid, spec_of
    from interp_tasks.grids.page import Findings
    from interp_tasks.grids.table import table
    from interp_tasks.grids.unit import read_record
    from interp_tasks.grids.units import plan

    kind = mangle_grid(folder, chance, canary)
    whole = plan(spec_of(SPEC))
    with limited():
        for unit in whole.units:
            tried(kind, lambda unit=unit: read_record(folder, unit))
    # A unit that must be done again takes more memory than what is read.
    found = tried(kind, lambda: grid(SPEC, folder, executor="serial"))
    if found is None:
        return "grid refused"
    if found.failed:
        return "grid with a failed unit"
    if chance.random() < 0.1:
        tried(kind, lambda: Findings.of(found).write())
    rows = tried(kind, lambda: table(found))
    expect(rows is not None, f"{kind}: no table")
    try:
        pandas.testing.assert_frame_equal(rows, good.rows)
    except AssertionError as error:
        raise Fault(f"{kind}: another table: {' '.join(str(error).split())[:200]}") from None
    return "grid done again" if found.done_before < len(whole.units) else "grid read as saved"


def trial(number: int, good: Good, scratch: Path) -> list[str]:
    chance = random.Random(number)
    place, canary = scratch / "trial", scratch / "canary"
    subject = chance.choices([try_checkpoint, try_run, try_grid], [60, 35, 5])[0]
    source = good.grid if subject is try_grid else good.run
    shutil.copytree(source, place)
    around = sorted(os.listdir(scratch))
    try:
        end = subject(place, good, chance, canary)
        expect(not canary.exists(), "code that lay in a file was run")
        expect(sorted(os.listdir(scratch)) == around, "something was written beside the folder")
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if canary.exists():
            canary.rmdir()
    return [end]


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    import torch

    torch.set_num_threads(1)
    # What is installed does not change here, and asking takes longer than reading a checkpoint.
    asked = importlib.metadata.entry_points
    importlib.metadata.entry_points = lru_cache(asked)
    try:
        good = make(scratch)
        yield Trials(lambda number: trial(number, good, scratch))
    finally:
        importlib.metadata.entry_points = asked


CAMPAIGN = Campaign("mangle", "checkpoints, runs and grids mangled", prepare, usual=10_000)
