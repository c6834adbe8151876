"""Ships the runs of a recipe that are trained to their end: their logs, compressed, and some of their checkpoints.

Run it as `python -P docs/scripts/pack.py RECIPE [GRID [ZOO]]`, GRID being the folder in which `interp-run grid RECIPE`
trained them; what ships already is left alone. All checkpoints but the last of a run that ships exactly are halved to
float16, and the metrics beside the weights are those of the weights as they are stored.
"""

import json
import lzma
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tasks
from interp_tasks import load_checkpoint, save_checkpoint
from interp_tasks.checkpoints import MARKS, find_marks, read_metrics, read_run, resolve
from interp_tasks.checkpoints.checkpoint_refs import ZOO_FOLDER
from interp_tasks.checkpoints.run_reader import (
    CLOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    checkpoint_folder,
    log_file,
    read_decompressed_log,
)
from interp_tasks.checkpoints.run_writer import declared_drop
from interp_tasks.grid_spec import RunToShip, read_grid_spec, recipe_file, runs_shipped_by_recipe
from interp_tasks.grids.grid_run_and_table import is_trained
from interp_tasks.grids.work_units import TrainUnit, train_units_of_each_block
from tasks.base import pool_parts

#: Test examples behind the stored metrics; finite tasks have fewer and use them all.
SAMPLES = 10_000
#: Lines of a clock that ship at most: updates take about the same time.
CLOCK_LINES = 200


def shipped_runs(recipe: str | Path) -> dict[str, tuple[RunToShip, TrainUnit]]:
    """Returns the runs that a recipe ships, by name in the zoo, each with its whole configuration and folder."""
    spec = read_grid_spec(recipe_file(recipe))
    units = train_units_of_each_block(spec)
    return {
        run.name: (run, units[spec.train.index(run.block)][run.index])
        for run in runs_shipped_by_recipe(recipe)
    }


@torch.no_grad()
def stored_metrics(
    task: tasks.Task, model: Any, samples: int | None = SAMPLES, seed: int = 0, split: Any = "test"
) -> dict[str, float | None]:
    """Returns pooled metrics over examples of a split; of a mixture over as many of each kind."""
    metrics = {}
    for name, part in (task.parts() or {"": task}).items():
        batch = part.sample(samples, seed=seed, split=split)
        metrics[name] = part.metrics(torch.cat([model(tokens) for tokens in batch.tokens.split(500)]), batch)
    return pool_parts(metrics)


def shortened(log: str) -> str:
    """Returns a log with its numbers to nine digits, as many as tell single-precision numbers apart."""
    lines = [
        json.loads(line, parse_float=lambda text: float(f"{float(text):.9g}")) for line in log.splitlines()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def thinned(clock: str) -> str:
    """Returns some of the lines of a clock, from its first to its last, with seconds to three decimals."""
    lines = [json.loads(line, parse_float=lambda text: round(float(text), 3)) for line in clock.splitlines()]
    kept = sorted({round(place) for place in np.linspace(0, len(lines) - 1, min(CLOCK_LINES, len(lines)))})
    return "".join(json.dumps(lines[place]) + "\n" for place in kept)


def without_folders(described: Any) -> Any:
    """Returns a run's description with absolute paths in commands cut to their last name: folders are one machine's."""
    if isinstance(described, list):
        return [without_folders(each) for each in described]
    if not isinstance(described, dict):
        return described
    return {
        key: shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(value))
        if key == "command" and value
        else without_folders(value)
        for key, value in described.items()
    }


def pack(run: Path, at: Sequence[str | int], destination: Path, *, exact: bool = False) -> None:
    """Copies a run's description, logs and named checkpoints; the folder appears whole or not at all."""
    described = without_folders(read_run(run))
    settings: Mapping[str, Any] = described["config"]["task"]
    task = tasks.get(settings["name"], **{key: value for key, value in settings.items() if key != "name"})
    described["drop_metric"] = declared_drop(task)
    steps = sorted({step for each in at for step in steps_at(run, described, each)})
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".packed-") as scratch:
        packed = Path(scratch) / destination.name
        packed.mkdir()
        (packed / RUN_FILE).write_text(json.dumps(described), encoding="utf-8")
        for name, short in ((METRICS_FILE, shortened), (CLOCK_FILE, thinned)):
            if (file := log_file(run, name)).is_file():
                text = short(read_decompressed_log(file).decode("utf-8")).encode("utf-8")
                (packed / f"{name}.xz").write_bytes(lzma.compress(text, preset=6 | lzma.PRESET_EXTREME))
        for step in steps:
            dtype = None if exact and step == steps[-1] else "float16"
            model = load_checkpoint(f"{run}@{step}").model
            half = save_checkpoint(Path(scratch) / f"half-{step}", model, task, step, weights_dtype=dtype)
            metrics = stored_metrics(task, load_checkpoint(half).model)
            folder = checkpoint_folder(packed, step)
            save_checkpoint(folder, model, task, step, weights_dtype=dtype, metrics=metrics)
        for file in packed.rglob("*.json"):
            # Some hundred files ship, and indents are a third of them.
            file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")
        packed.rename(destination)


def steps_at(run: Path, described: Mapping[str, Any], at: str | int) -> list[int]:
    """Returns the stored steps that a mark or a step of a run names, its drop being as ``described``."""
    if at in MARKS:
        return [find_marks(run, needed=[str(at)], run_json=described)[str(at)]]
    return [checkpoint.step for checkpoint in resolve(f"{run}@{at}")]


def pack_recipe(recipe: str | Path, grid: Path, into: Path) -> list[str]:
    """Ships the runs of a recipe that are trained to their end; returns the names of new ones."""
    packed = []
    for name, (run, unit) in shipped_runs(recipe).items():
        folder, last = grid / unit.folder, unit.resolved.train.steps
        log_is_whole = log_file(folder, METRICS_FILE).is_file() and read_metrics(folder)[-1]["step"] >= last
        if (into / name).exists():
            print(f"{name}: there already")
        elif not (is_trained(grid, unit) or (not run.shipment.at and log_is_whole)):
            print(f"{name}: {folder} is not trained to step {last:,} yet")
        else:
            pack(folder, run.shipment.at, into / name, exact=run.shipment.exact)
            print(f"{name}: packed")
            packed.append(name)
    return packed


if __name__ == "__main__":
    given, *more = sys.argv[1:]
    folders = [*map(Path, more), Path("grids") / Path(given).stem, ZOO_FOLDER]
    pack_recipe(given, folders[0], folders[-1] if len(more) < 2 else folders[1])
