"""Make shipped models from runs: a few of their checkpoints, halved but for the last, metrics recomputed.

The metrics in each meta.json are those of the weights as they are stored, after rounding to float16, over the test
split.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint, resolve, save_checkpoint
from interp_tasks.checkpoints.marks import MARKS, marks_of
from interp_tasks.checkpoints.run_config import declared_drop
from interp_tasks.checkpoints.run_files import (
    CLOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    checkpoint_folder,
    log_file,
    read_log,
    read_metrics,
    read_run,
    write_log,
)
from interp_tasks.errors import UserError
from interp_tasks.grids.plan import TrainUnit, train_units
from interp_tasks.grids.run import is_trained
from interp_tasks.recipes.recipe import orders_of, recipe_file
from interp_tasks.recipes.spec import Shipment, naming_file, read_spec
from tasks.base import Split, Task, pool_parts

#: Test examples behind the stored metrics; finite tasks have fewer and use them all.
SAMPLES = 10_000
#: Lines of a clock that ship at most: times between them are read off a line, and updates take about the same time.
CLOCK_LINES = 200


@torch.no_grad()
def stored_metrics(
    task: Task, model: Any, samples: int = SAMPLES, seed: int = 0, split: Split = "test"
) -> dict[str, float | None]:
    """Returns pooled metrics over examples of a split; of a mixture over as many of each kind."""
    metrics = {}
    for name, part in (task.parts() or {"": task}).items():
        batch = part.sample(samples, seed=seed, split=split)
        outputs = [model(tokens) for tokens in batch.tokens.split(500)]
        metrics[name] = part.metrics(torch.cat(outputs), batch)
    return pool_parts(metrics)


def shortened(log: str) -> str:
    """Returns the lines of a log with its numbers to nine digits, as many as tell single-precision numbers apart."""
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
    """Copies run.json, the logs, compressed, and the checkpoints named; the folder appears whole or not at all.

    Metrics are kept to nine digits, times to milliseconds, of at most 200 logged steps.

    Args:
        at: marks or steps; none: the log alone.
        exact: whether the last checkpoint keeps its precision; all others are halved to float16.

    Raises:
        UserError: for a step or mark that the run has not stored, or a destination that is there.
    """
    if destination.exists():
        raise UserError(f"{destination} is there already: remove it first")
    described = without_folders(read_run(run))
    settings = dict(described["config"]["task"])
    task = tasks.get(settings.pop("name"), **settings)
    # The drop as the task declares it now.
    described["drop_metric"] = declared_drop(task)
    # Before anything is made.
    steps = sorted({step for each in at for step in steps_at(run, described, each)})
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".packed-") as scratch:
        packed = Path(scratch) / destination.name
        packed.mkdir()
        (packed / RUN_FILE).write_text(json.dumps(described), encoding="utf-8")
        for name in (METRICS_FILE, CLOCK_FILE):
            if (file := log_file(run, name)).is_file():
                log = read_log(file, "what the run has logged").decode("utf-8")
                write_log(packed, name, shortened(log) if name == METRICS_FILE else thinned(log))
        for step in steps:
            dtype = None if exact and step == steps[-1] else "float16"
            pack_checkpoint(run, task, step, checkpoint_folder(packed, step), dtype)
        for file in packed.rglob("*.json"):
            put_on_one_line(file)
        packed.rename(destination)


def put_on_one_line(file: Path) -> None:
    """Writes a JSON file anew without line breaks: some hundred files ship, and indents are a third of them."""
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")


def steps_at(run: Path, described: dict[str, Any], at: str | int) -> list[int]:
    """Returns the stored steps that a mark or a step of a run names, its drop being as ``described``."""
    if at in MARKS:
        return [marks_of(run, described, run.as_posix(), [str(at)])[str(at)]]
    return [checkpoint.step for checkpoint in resolve(f"{run}@{at}")]


def pack_checkpoint(run: Path, task: Task, step: int, folder: Path, dtype: str | None) -> None:
    """Stores a checkpoint of a run in another precision, with the metrics of the stored weights."""
    model = load_checkpoint(f"{run}@{step}").model
    with tempfile.TemporaryDirectory() as scratch:
        stored = save_checkpoint(Path(scratch) / "stored", model, task, step, weights_dtype=dtype)
        metrics = stored_metrics(task, load_checkpoint(stored).model)
    save_checkpoint(folder, model, task, step, weights_dtype=dtype, metrics=metrics)


def is_logged(run: Path, last: int) -> bool:
    """Tells whether a run's log goes to its last step: it ships without weights, wherever they are by now."""
    with contextlib.suppress(UserError):
        lines = read_metrics(run)
        return bool(lines) and lines[-1]["step"] >= last
    return False


def pack_recipe(
    recipe: str | Path, grid: Path, into: Path, say: Callable[[str], None] = print
) -> list[ShippedRun]:
    """Ships the runs of a recipe that are trained to their end; shipped ones are left alone.

    Args:
        recipe: a grid file, or the name of one that ships.
        grid: the folder that ``interp-run grid`` trained it in.
        into: the zoo's folder.
        say: is told what becomes of each run, in a line.

    Returns:
        The runs that were packed.

    Raises:
        UserError: for a recipe that ships nothing, or a mark that a run does not have.
    """
    runs = shipped_runs(recipe)
    if not runs:
        raise UserError(f'{recipe} ships nothing: say so under [[train]], as in ship = {{ name = "NAME" }}')
    packed = []
    for run in runs:
        folder, last = grid / run.unit.folder, run.unit.resolved.train.steps
        if (into / run.name).exists():
            say(f"{run.name}: there already")
        elif not (is_trained(grid, run.unit) or (not run.shipment.at and is_logged(folder, last))):
            say(f"{run.name}: {folder} is not trained to step {last:,} yet")
        else:
            pack(folder, run.shipment.at, into / run.name, exact=run.shipment.exact)
            say(f"{run.name}: packed")
            packed.append(run)
    return packed


@dataclass(frozen=True)
class ShippedRun:
    """A run that a recipe trains and ships.

    Attributes:
        name: in the zoo.
        recipe: the name of the file that trains it.
        unit: its whole configuration, and its folder below the grid's.
        shipment: which of its checkpoints ship.
    """

    name: str
    recipe: str
    unit: TrainUnit
    shipment: Shipment


def shipped_runs(recipe: str | Path) -> list[ShippedRun]:
    """Lists the runs that a recipe ships. Imports torch: tasks fill in their defaults.

    Raises:
        UserError: as :func:`ordered_runs`.
    """
    file = recipe_file(recipe)
    spec = read_spec(file)
    with naming_file(str(file)):
        ordered = orders_of(spec)
        units = {id(block): each for block, each in zip(spec.train, train_units(spec), strict=True)}
    return [ShippedRun(run.name, file.stem, units[id(run.block)][run.index], run.shipment) for run in ordered]
