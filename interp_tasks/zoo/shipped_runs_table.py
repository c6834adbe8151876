"""The shipped runs as rows of a table. Imports no torch."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from interp_tasks.checkpoints.checkpoint_refs import ZOO, zoo_names
from interp_tasks.checkpoints.drop_detection import final_level
from interp_tasks.checkpoints.run_reader import stored_steps
from interp_tasks.measurement.logged_runs import LoggedRun, read_runs

#: What a run folder of several seeds is called, by convention of the trainer and of recipes.
_SEED = re.compile(r"^(?:seed-)?(\d+)$")


def shipped_run_rows() -> list[dict[str, Any]]:
    """Returns one row per shipped run, seeds of one folder together.

    Each has ``name`` (as REFs take it), ``task``, ``size`` (of its matrices and their rank, or its modulus), ``model``
    (layers, heads, width), ``seeds``, ``steps`` trained, ``checkpoints`` stored, ``bytes``, ``drop`` (onset and end, of
    several seeds the earliest and the latest), ``dropped`` (how many did), ``metric`` and its ``final`` level (of
    several seeds the median).
    """
    families: dict[str, list[str]] = {}
    for name in zoo_names():
        folder, _, last = name.rpartition("/")
        families.setdefault(f"{folder}/seed-*" if folder and _SEED.match(last) else name, []).append(name)
    return [_shipped_run_row(name, read_runs([ZOO + run for run in runs])) for name, runs in families.items()]


def _shipped_run_row(name: str, runs: list[LoggedRun]) -> dict[str, Any]:
    """Returns the row of one shipped name, which may be several seeds of a run."""
    config = runs[0].config
    curves = [run.validation_curve(run.drop_metric) for run in runs]
    drops = [curve.drop for curve in curves if curve.drop is not None]
    steps = [stored_steps(run.path) for run in runs]
    model = config["model"]
    return {
        "name": ZOO + name,
        "task": config["task"]["name"],
        "size": _task_size_text(config["task"]),
        "model": f"{model['n_layers']}L {model['n_heads']}H d{model['d_model']}",
        "seeds": [run.described["seeds"]["train"] for run in runs],
        "steps": config["train"]["steps"],
        "checkpoints": max(map(len, steps)),
        "bytes": sum(file.stat().st_size for run in runs for file in run.path.rglob("*") if file.is_file()),
        "drop": [min(drop.onset for drop in drops), max(drop.end for drop in drops)] if drops else None,
        "dropped": len(drops),
        "metric": runs[0].drop_metric,
        "final": median(final_level(curve.values) for curve in curves),
    }


def _task_size_text(task: dict[str, Any]) -> str:
    if "n" not in task:
        return str(task.get("p", ""))
    if task.get("sizes"):
        return f"{'/'.join(map(str, task['sizes']))} r{task['rank']}"
    return f"{task['n']}x{task.get('m') or task['n']} r{task['rank']}"
