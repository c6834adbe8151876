"""A run that was left alone, and what must be true of the same run whatever happens to it."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.frame import expect
from tests.campaigns.lives import Life, at_operation, interp_run, train_command

#: All the state there is to lose: moments, filter, masks, warm-up, clipping, fresh batches.
WHOLE = {
    "task.p": 11,
    "model.d_model": 8,
    "model.n_heads": 2,
    "train.steps": 48,
    "train.batch_size": 16,
    "train.eval_samples": 16,
    "train.grokfast": "ema",
    "train.dropout": 0.1,
    "train.warmup_steps": 10,
    "train.clip_norm": 1.0,
    "train.weight_decay": 0.1,
    "train.log_every": 3,
    "train.checkpoint_every": 6,
    "train.threads": 1,
}


@dataclass(frozen=True)
class Scenario:
    """A run to be killed.

    Attributes:
        begun: steps that it has had, undisturbed, before the command that is killed extends it.
    """

    name: str
    settings: dict[str, Any]
    begun: int | None = None


@dataclass
class Known:
    """A scenario left alone.

    Attributes:
        run: its folder.
        files: sha256 of every weights file and of the log, by path.
        weights: the same of the weights alone, by step.
        begin: the run that the command finds.
    """

    scenario: Scenario
    run: Path
    files: dict[str, str]
    weights: dict[int, str]
    log: bytes
    began: float
    seconds: float
    operations: int
    begin: Path | None = field(default=None)


def fingerprint(run: Path) -> dict[str, str]:
    files = [*run.glob("checkpoints/*/model.safetensors"), *run.glob("metrics.jsonl")]
    return {str(file.relative_to(run)): sha256(file) for file in sorted(files)}


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def live(
    run: Path, settings: dict[str, Any], first: Callable[[], Any] = lambda: None, output: Path | None = None
) -> Life:
    """One life of a run; ``first`` happens in its process before anything else."""

    def act() -> int:
        first()
        return interp_run(train_command(run, settings))

    return Life(act, output or run.with_suffix(".out"))


def left_alone(scenario: Scenario, scratch: Path) -> Known:
    run = scratch / scenario.name.replace(" ", "-")
    begin = None
    if scenario.begun is not None:
        begin = run.with_name(f"{run.name}-begun")
        ended(live(begin, {**scenario.settings, "train.steps": scenario.begun}))
    counted = run.with_suffix(".operations")

    def act() -> int:
        count = at_operation()
        status = interp_run(train_command(run, scenario.settings))
        counted.write_text(str(count()))
        return status

    start = time.monotonic()
    life = Life(act, run.with_suffix(".out"))
    began = None
    while (status := life.wait(0.002)) is None:
        if began is None and (run / "run.json").exists():
            began = time.monotonic() - start
    seconds = time.monotonic() - start
    expect(status == 0, f"{scenario.name}, left alone, ended with {status}: {life.said()[-300:]}")
    files = fingerprint(run)
    weights = {
        int(Path(name).parent.name): value
        for name, value in files.items()
        if name.endswith("model.safetensors")
    }
    log = (run / "metrics.jsonl").read_bytes()
    return Known(scenario, run, files, weights, log, began or 0.0, seconds, int(counted.read_text()), begin)


def ended(life: Life) -> None:
    status = life.end()
    expect(status == 0, f"a life that was left alone ended with {status}: {life.said()[-300:]}")


def check_disk(run: Path, known: Known) -> None:
    """All that can be read of a run that has just died is what the uninterrupted one has there."""
    from interp_tasks.checkpoints import load_checkpoint, read_metrics, read_run, stored_steps
    from interp_tasks.checkpoints.meta import read_meta
    from interp_tasks.checkpoints.run_files import METRICS_FILE, RUN_FILE, STOPPED_FOLDER
    from interp_tasks.checkpoints.training_state import read_training_state

    if (run / RUN_FILE).exists():
        read_run(run)
    steps = stored_steps(run)
    for step in steps:
        folder = run / "checkpoints" / f"{step:08d}"
        meta = read_meta(folder)
        expect(meta["step"] == step, f"the checkpoint of step {step} says it is of step {meta['step']}")
        expect(step in known.weights, f"a checkpoint of step {step}, which the run left alone lacks")
        expect(sha256(folder / "model.safetensors") == known.weights[step], f"other weights at step {step}")
        read_training_state(folder, meta)
    for ref in [*(f"{run}@{step}" for step in steps[-1:]), *map(str, run.glob(STOPPED_FOLDER))]:
        load_checkpoint(ref)
    if (run / METRICS_FILE).exists():
        read_metrics(run)
        whole = (run / METRICS_FILE).read_bytes()
        expect(known.log.startswith(whole), "the log is no beginning of that of the run left alone")


def begin(run: Path, known: Known) -> None:
    if run.exists():
        shutil.rmtree(run)
    if known.begin is not None:
        shutil.copytree(known.begin, run)


def check_end(run: Path, known: Known, deaths: list[str]) -> None:
    """A run that is done is the one that was left alone."""
    found = fingerprint(run)
    different = [name for name in sorted({*known.files, *found}) if known.files.get(name) != found.get(name)]
    expect(not different, f"{', '.join(different)} differ from the run left alone, after {deaths}")
    left = [str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".lock"]
    expect(not left and not (run / "stopped").exists(), f"left over: {left or 'stopped'}")
