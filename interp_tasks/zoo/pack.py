"""Make shipped models from runs: a few of their checkpoints, halved but for the last, metrics recomputed.

The metrics in each meta.json are those of the weights as they are stored, after rounding to float16, over the test
split.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint, resolve, save_checkpoint
from interp_tasks.checkpoints.marks import MARKS, marks_of
from interp_tasks.checkpoints.refs import find_run
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
from interp_tasks.recipes.recipe import orders_of, recipe_file, recipe_names
from interp_tasks.recipes.spec import Shipment, naming_file, read_spec
from interp_tasks.training.provenance import declared_drop, processor
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


def is_logged(grid: Path, unit: TrainUnit) -> bool:
    """Tells whether a run's log goes to its last step: it ships without weights, wherever they are by now."""
    with contextlib.suppress(UserError):
        lines = read_metrics(grid / unit.folder)
        return bool(lines) and lines[-1]["step"] >= unit.resolved.train.steps
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
    return list(_packed(runs, grid, into, say))


def _packed(
    runs: Iterable[ShippedRun], grid: Path, into: Path, say: Callable[[str], None]
) -> Iterable[ShippedRun]:
    for run in runs:
        if (into / run.name).exists():
            say(f"{run.name}: there already")
        elif not (is_trained(grid, run.unit) or (not run.shipment.at and is_logged(grid, run.unit))):
            say(
                f"{run.name}: {grid / run.unit.folder} is not trained to step {run.unit.resolved.train.steps:,} yet"
            )
        else:
            pack(grid / run.unit.folder, run.shipment.at, into / run.name, exact=run.shipment.exact)
            say(f"{run.name}: packed")
            yield run


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


def recipe_of(name: str) -> ShippedRun:
    """Returns the recipe's run behind a shipped model.

    Raises:
        UserError: if no recipe ships it.
    """
    for recipe in recipe_names():
        for run in shipped_runs(recipe):
            if run.name == name:
                return run
    raise UserError(f"no recipe ships {name}: interp-run runs zoo lists what ships")


ZOO = "zoo:"


@dataclass(frozen=True)
class Replication:
    """Says how the first lines of two logs compare.

    Attributes:
        lines: that were compared; ``equal``: of them, those that are the same digit for digit.
        largest: relative difference of a number, over all lines; 0 where all are equal.
        trained_on: the processor that the shipped run names; "" where it names none. ``here``: this one.
    """

    name: str
    recipe: str
    lines: int
    equal: int
    largest: float
    trained_on: str
    here: str

    @property
    def said(self) -> str:
        if self.equal == self.lines:
            return "the same to the last digit"
        return f"{self.equal} lines the same; numbers differ by {self.largest:.1g} of their size at most"

    @property
    def remark(self) -> str:
        """Says why logs differ that should not; empty where they are the same."""
        if self.equal == self.lines or self.trained_on == self.here:
            return ""
        return f"trained on {self.trained_on or 'a processor that it does not name'}; this is {self.here}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "said": self.said}


def replicate(name: str, steps: int, out: Path | None = None) -> Replication:
    """Train the first steps of a shipped run again, by its recipe, and compare the logs.

    Numbers agree to the last digit on the same kind of processor and build of torch, and differ by rounding on others.

    Args:
        name: ``zoo:NAME`` or ``NAME``.
        steps: how many; the run's own length at most.
        out: where to train; one that was stopped there goes on. Default: a folder that goes away.

    Raises:
        UserError: for a name that does not ship, or a run that logs nothing in so many steps.
    """
    from interp_tasks.training.trainer import train_resolved

    name = name.removeprefix(ZOO)
    shipped = find_run(ZOO + name)
    run = recipe_of(name)
    resolved = run.unit.resolved
    last_step = min(steps, resolved.train.steps)
    wanted = {line["step"]: line for line in read_metrics(shipped) if line["step"] <= last_step}
    if not wanted:
        raise UserError(f"{ZOO}{name} logs nothing in its first {steps:,} steps: compare more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        train_resolved(resolved, folder, steps=last_step)
        log = (folder / METRICS_FILE).read_text(encoding="utf-8")
    # A run logs its end, too, wherever that is.
    again = {
        line["step"]: line for line in map(json.loads, shortened(log).splitlines()) if line["step"] in wanted
    }
    pairs = [(line, again.get(step)) for step, line in wanted.items()]
    return Replication(
        name,
        run.recipe,
        len(pairs),
        sum(one == other for one, other in pairs),
        max(difference(one, other) for one, other in pairs),
        (read_run(shipped).get("hardware") or {}).get("processor", ""),
        processor(),
    )


def difference(one: Any, other: Any) -> float:
    """Returns the largest relative difference between the numbers of two JSON values; infinite where one lacks some."""
    if isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other):
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if one == other:
        return 0.0
    numbers = all(isinstance(each, (int, float)) for each in (one, other))
    return abs(one - other) / max(abs(one), abs(other)) if numbers else float("inf")
