"""Make a shipped model from a run: a few of its checkpoints, halved but for the last, metrics recomputed.

    python -m interp_tasks.zoo.pack runs/matrix-completion-4x4 --steps 0,500,1000,20000

writes ``interp_tasks/zoo/matrix-completion-4x4``. The metrics in each meta.json are those of the weights as they
are stored, after rounding to float16, over the test split.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from interp_tasks.checkpoints import load_checkpoint, read_run, save_checkpoint
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.checkpoints.run_files import METRICS_FILE, RUN_FILE, checkpoint_folder
from tasks.base import Task, pool

#: Test examples behind the stored metrics; finite tasks have fewer and use them all.
SAMPLES = 10_000


@torch.no_grad()
def stored_metrics(task: Task, model: Any, samples: int = SAMPLES, seed: int = 0) -> dict[str, float | None]:
    """Pooled metrics over test examples."""
    batch = task.sample(samples, seed=seed, split="test")
    outputs = [model(tokens) for tokens in batch.tokens.split(500)]
    return pool(task.metrics(torch.cat(outputs), batch))


def pack(run: Path, steps: list[int], destination: Path) -> None:
    """Copy run.json, the metrics log and the given checkpoints; the last keeps float32.

    Raises:
        UserError: for a step that the run has not stored, or a destination that is there.
    """
    (destination / "checkpoints").mkdir(parents=True)
    task = load_checkpoint(f"{run}@{steps[-1]}").require_task()
    drop = {"name": task.drop_metric.name, "direction": task.drop_metric.direction}
    described = {**read_run(run), "drop_metric": drop}  # as the task declares it now
    (destination / RUN_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    shutil.copy(run / METRICS_FILE, destination)
    for step in steps:
        checkpoint = load_checkpoint(f"{run}@{step}")
        dtype = None if step == steps[-1] else "float16"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--steps", required=True, help="stored steps to ship, comma-separated, the last in float32"
    )
    parser.add_argument("--name", help="name in the zoo; the run folder's own by default")
    options = parser.parse_args()
    steps = sorted(int(step) for step in options.steps.split(","))
    pack(options.run, steps, zoo_folder() / (options.name or options.run.name))


if __name__ == "__main__":
    main()
