"""Make shipped models from runs: a few of their checkpoints, halved but for the last, metrics recomputed.

    python -m interp_tasks.zoo.pack runs/matrix-completion-4x4 --steps 0,500,1000,20000
    python -m interp_tasks.zoo.pack width-16=runs/wide/16 runs/seeds/seed-* --into matrix-completion-sweeps --final

write ``interp_tasks/zoo/matrix-completion-4x4``, and ``interp_tasks/zoo/matrix-completion-sweeps/width-16`` and so on.
``--final`` ships the last step alone, halved. The metrics in each meta.json are those of the weights as they are
stored, after rounding to float16, over the test split.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from interp_tasks.checkpoints import load_checkpoint, read_run, resolve, save_checkpoint
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.checkpoints.run_files import CLOCK_FILE, METRICS_FILE, RUN_FILE, checkpoint_folder
from interp_tasks.errors import UserError
from interp_tasks.training.provenance import declared_drop
from tasks.base import Task, pool_parts

#: Test examples behind the stored metrics; finite tasks have fewer and use them all.
SAMPLES = 10_000


@torch.no_grad()
def stored_metrics(task: Task, model: Any, samples: int = SAMPLES, seed: int = 0) -> dict[str, float | None]:
    """Pooled metrics over test examples; of a mixture over as many of each kind."""
    found = {}
    for name, part in (task.parts() or {"": task}).items():
        batch = part.sample(samples, seed=seed, split="test")
        outputs = [model(tokens) for tokens in batch.tokens.split(500)]
        found[name] = part.metrics(torch.cat(outputs), batch)
    return pool_parts(found)


def shortened(log: str) -> str:
    """The lines of a log with its numbers to nine digits, as many as tell single-precision numbers apart."""
    lines = [
        json.loads(line, parse_float=lambda text: float(f"{float(text):.9g}")) for line in log.splitlines()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def pack(run: Path, steps: list[int], destination: Path, *, final: bool = False) -> None:
    """Copy run.json, the metrics log (to nine digits) and the given checkpoints; the last keeps float32.

    Args:
        final: ship the last stored step alone, in float16.

    Raises:
        UserError: for a step that the run has not stored, or a destination that is there or would be lost.
    """
    if "." in destination.name:
        raise UserError(f"{destination.name}: a name with a dot is left out of wheels; write 5e-1 for 0.5")
    if destination.exists():
        raise UserError(f"{destination.name} is there already: remove it, or choose another name")
    if final:
        steps = [resolve(f"{run}@last")[0].step]
    for step in steps:  # before anything is made
        resolve(f"{run}@{step}")
    (destination / "checkpoints").mkdir(parents=True)
    task = load_checkpoint(f"{run}@{steps[-1]}").require_task()
    described = {**read_run(run), "drop_metric": declared_drop(task)}  # as the task declares it now
    (destination / RUN_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    if (run / METRICS_FILE).is_file():
        log = (run / METRICS_FILE).read_text(encoding="utf-8")
        (destination / METRICS_FILE).write_text(shortened(log), encoding="utf-8")
    if (run / CLOCK_FILE).is_file():
        shutil.copy(run / CLOCK_FILE, destination)
    for step in steps:
        checkpoint = load_checkpoint(f"{run}@{step}")
        dtype = "float16" if final or step != steps[-1] else None
        with tempfile.TemporaryDirectory() as scratch:
            stored = save_checkpoint(
                Path(scratch) / "stored", checkpoint.model, task, step, weights_dtype=dtype
            )
            metrics = stored_metrics(task, load_checkpoint(stored).model)
        save_checkpoint(
            checkpoint_folder(destination, step),
            checkpoint.model,
            task,
            step,
            weights_dtype=dtype,
            metrics=metrics,
        )
        print(step, metrics)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, or NAME=RUN for another name in the zoo"
    )
    parser.add_argument("--steps", help="stored steps to ship, comma-separated, the last in float32")
    parser.add_argument("--final", action="store_true", help="ship the last step alone, in float16")
    parser.add_argument("--into", default="", help="folder of the zoo to put the runs into")
    options = parser.parse_args(arguments)
    if bool(options.steps) == options.final:
        parser.error("say which: --steps 0,100 or --final")
    parts = [part.strip() for part in (options.steps or "").split(",")] if options.steps else []
    if not all(part.isascii() and part.isdecimal() for part in parts):
        parser.error(f"--steps {options.steps}: write stored steps, such as 0,100")
    steps = sorted(map(int, parts))
    for given in options.runs:
        name, _, run = given.rpartition("=")
        destination = zoo_folder() / options.into / (name or Path(run).name)
        try:
            pack(Path(run), steps, destination, final=options.final)
        except UserError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
