"""Reads whole runs: resolves their names, their logs and their drops. Imports no torch."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from interp_tasks.checkpoints import Drop, detect_drop, read_run, resolve
from interp_tasks.checkpoints.drop import final_level, why_no_drop
from interp_tasks.checkpoints.marks import find_drop, theoretical_plateau
from interp_tasks.checkpoints.refs import ZOO, find_run, shipped
from interp_tasks.checkpoints.run_files import (
    METRICS_FILE,
    RUN_FILE,
    is_checkpoint,
    iterate_metrics,
    log_file,
)
from interp_tasks.errors import UserError

#: What is said of a curve, in order.
QUANTITIES = ("drop", "onset", "crossing", "end", "length", "sharpness", "plateau", "final")


@dataclass(frozen=True)
class Curve:
    """A logged metric: its finite values at ascending steps, and its drop, ``None`` where there is none, with why."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    drop: Drop | None
    why_none: str = ""


@dataclass(frozen=True)
class Run:
    """A run with its log.

    Attributes:
        name: as one types it: a folder, or ``zoo:NAME``.
        config: of ``run.json``.
        drop_metric: the metric whose drop is the task's, and its direction.
        columns: of ``metrics.jsonl``, by split and metric: the steps that log it, and its values, NaN for none.
        last_step: that was logged; ``None``: none.
        validated_on: examples of the fixed validation sample; ``None`` where the run does not say.
        plateau: of the drop metric, by theory; ``None`` where there is none.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    drop_metric: str
    direction: str
    columns: Mapping[tuple[str, str], tuple[array[int], array[float]]]
    last_step: int | None
    validated_on: int | None = None
    plateau: float | None = None

    def logged(self, split: str = "validation") -> tuple[str, ...]:
        """Returns the metrics that it logs of a split."""
        return tuple(name for of, name in self.columns if of == split)

    def points(self, metric: str, split: str = "validation") -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns steps and finite values of a metric."""
        columns = self.columns.get((split, metric), ((), ()))
        finite = [(step, value) for step, value in zip(*columns, strict=True) if math.isfinite(value)]
        return tuple(step for step, _ in finite), tuple(value for _, value in finite)

    def curve(self, metric: str) -> Curve:
        """Returns a metric with its drop; accuracies go up, all else moves as the task's own metric does.

        Raises:
            UserError: if the run does not log it, or has logged nothing of it.
        """
        steps, values = self.points(metric)
        if not values:
            raise UserError(
                f"{self.name} logs no validation {metric!r}: it has "
                f"{', '.join(name for name in self.logged() if self.points(name)[1]) or 'nothing'}"
            )
        falls = self.direction == "down" if metric.startswith(self.drop_metric) else "accuracy" not in metric
        theory = self.plateau if metric in self.own_metrics() else None
        way: Literal["down", "up"] = "down" if falls else "up"
        drop = detect_drop(steps, values, way, theory)
        return Curve(metric, steps, values, drop, "" if drop else why_no_drop(steps, values, way, theory))

    def own_metrics(self) -> tuple[str, ...]:
        """Returns the task's drop metric and, of a mixture, that of each part."""
        return tuple(
            name
            for name in self.logged()
            if name == self.drop_metric or name.startswith(f"{self.drop_metric} (")
        ) or (self.drop_metric,)

    def labels(self) -> dict[str, Any]:
        """Returns the columns that all rows of the run share."""
        train = self.config.get("train", {})
        return {
            "run": self.name,
            "ref": self.name,
            "step": self.last_step,
            "seed": whole(train.get("seed")),
            "split": "validation",
            "n": whole(train.get("eval_samples") if self.validated_on is None else self.validated_on),
            "n_runs": 1,
        }


def find_runs(given: str | Sequence[str]) -> dict[str, Path]:
    """Finds the runs of folders, globs and ``zoo:`` names: name -> folder, in order, each once.

    Raises:
        UserError: for none, for a checkpoint, for what does not exist, for a folder without ``run.json``.
    """
    runs: dict[str, Path] = {}
    names = [given] if isinstance(given, str) else [str(name) for name in given]
    if not names:
        raise UserError("no run: name a run folder, a glob of some, or zoo:NAME")
    for name in names:
        check_run_name(name)
        for run, path in with_logs(name):
            for file in (RUN_FILE, METRICS_FILE):
                if not log_file(path, file).is_file():
                    raise UserError(f"{run} has no {file}: only runs of the trainer have curves")
            runs.setdefault(run, path)
    return runs


def check_run_name(name: str) -> None:
    """Refuses what names a checkpoint of a run, or a checkpoint folder."""
    if "@" in name:
        raise UserError(f"{name!r}: name the run alone, {name.rpartition('@')[0]}")
    if not name.startswith(ZOO) and is_checkpoint(Path(name)):
        raise UserError(f"{name!r} is a checkpoint: name its run")


def with_logs(name: str) -> Iterator[tuple[str, Path]]:
    """Yields the runs that a name or glob means; shipped ones need no checkpoints, some being logs alone."""
    if name.startswith(ZOO):
        yield from ((run, find_run(run)) for run in shipped(name))
        return
    for checkpoint in resolve(f"{name}@last"):
        if checkpoint.run_path is None or checkpoint.run_name is None:
            raise UserError(f"{name!r} is a checkpoint: name its run")
        yield checkpoint.run_name, checkpoint.run_path


def read_runs(given: str | Sequence[str]) -> list[Run]:
    """Returns the runs named, with their logs.

    Raises:
        UserError: see :func:`find_runs`; for a run that declares no drop metric.
    """
    return [read_one(name, path) for name, path in find_runs(given).items()]


def read_one(name: str, path: Path) -> Run:
    """Reads a run's declaration and its log, checked.

    Raises:
        UserError: for a run without a drop metric, or a mangled log.
    """
    described = read_run(path)
    metric, config = described.get("drop_metric"), described.get("config")
    if (
        not isinstance(metric, dict)
        or not {"name", "direction"} <= set(metric)
        or not isinstance(config, dict)
    ):
        raise UserError(f"{path / RUN_FILE} declares no drop_metric or no config: its curve cannot be read")
    if not all(isinstance(section, dict) for section in config.values()):
        raise UserError(f"{path / RUN_FILE} is mangled: a section of its config is not an object")
    columns, last_step = read_columns(path)
    return Run(
        name,
        path,
        config,
        metric["name"],
        metric["direction"],
        columns,
        last_step,
        examples(described),
        theoretical_plateau(described),
    )


def read_columns(
    path: Path,
) -> tuple[dict[tuple[str, str], tuple[array[int], array[float]]], int | None]:
    """Reads the metrics of a log, one column each, and the last step; a line at a time, however long the log is.

    Raises:
        UserError: for a mangled log.
    """
    columns: dict[tuple[str, str], tuple[array[int], array[float]]] = {}
    last = -1
    for number, line in enumerate(iterate_metrics(path), start=1):
        splits = {split: line.get(split) for split in ("train", "validation")}
        if line["step"] <= last or not all(isinstance(metrics, dict | None) for metrics in splits.values()):
            raise UserError(
                f"{log_file(path, METRICS_FILE)} is mangled: line {number} has no later step than the one before "
                "it, or metrics that are not an object"
            )
        last = line["step"]
        for split, metrics in splits.items():
            for name, value in (metrics or {}).items():
                steps, values = columns.setdefault((split, name), (array("q"), array("d")))
                steps.append(last)
                values.append(float(value) if isinstance(value, (int, float)) else math.nan)
    return columns, None if last < 0 else last


def examples(described: Mapping[str, Any]) -> int | None:
    """Returns examples of the validation sample, of a mixture of one of its kinds."""
    count = described.get("validation_examples")
    numbers = list(count.values()) if isinstance(count, dict) else []
    return max(numbers) if numbers and all(type(number) is int for number in numbers) else None


def whole(value: Any) -> int | None:
    """Returns a number that a column of whole numbers can hold, ``None`` for all else."""
    return value if type(value) is int and abs(value) < 2**63 else None


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Returns a setting of a config by its dotted key, ``model.d_model``; ``None`` where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def family(name: str) -> str | None:
    """Returns ``RUN/seed-*`` for ``RUN/seed-3``; ``None`` for other names."""
    match = re.fullmatch(r"(.*[/:])seed-\d+", name)
    return f"{match[1]}seed-*" if match else None


def shared_folder(names: Sequence[str]) -> str:
    """Returns the folder that all names lie in; of paths and ``zoo:`` names alike."""
    shared: list[str] = []
    for level in zip(*(name.split("/")[:-1] for name in names), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "/".join(shared)


def measures(curve: Curve) -> dict[str, float]:
    """Returns the quantities of one curve, NaN where it has none."""
    drop = curve.drop
    values = dict.fromkeys(QUANTITIES, math.nan) | {
        "drop": float(drop is not None),
        "final": final_level(curve.values),
    }
    if drop is not None:
        values |= {
            name: float(getattr(drop, name)) for name in ("onset", "crossing", "end", "plateau", "final")
        }
        values |= {"length": float(drop.end - drop.onset), "sharpness": drop.sharpness}
    return values


def plateau_levels(run: Run) -> Mapping[str, float]:
    """Returns the levels that the run's task declares for its plateau; none for a task that is not known here."""
    import tasks

    config = dict(run.config.get("task", {}))
    name = config.pop("name", None)
    return tasks.get(name, **config).plateau_levels() if name in tasks.list() else {}


def logged_drop(run: Path) -> Drop | None:
    """Returns the drop that a run logged; ``None`` where there is none."""
    if not (run / RUN_FILE).is_file():
        return None
    try:
        return find_drop(run, read_run(run), run.name)
    except UserError:
        return None
