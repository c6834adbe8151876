"""The shipped runs as rows of a table. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from interp_tasks.checkpoints.drop import final_level
from interp_tasks.checkpoints.refs import ZOO, ZOO_FOLDER, find_drop, zoo_names
from interp_tasks.checkpoints.run_files import read_metrics, read_run, stored_steps
from interp_tasks.errors import UserError

#: What a run folder of several seeds is called, by convention of the trainer and of recipes.
_SEED = re.compile(r"^(?:seed-)?(\d+)$")


def catalog() -> list[dict[str, Any]]:
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
    return [_row(name, [ZOO_FOLDER / run for run in runs]) for name, runs in families.items()]


def _row(name: str, runs: list[Path]) -> dict[str, Any]:
    """Returns the row of one shipped name, which may be several seeds of a run."""
    described = [read_run(run) for run in runs]
    config = described[0]["config"]
    metric = described[0]["drop_metric"]["name"]
    drops = [span for run, about in zip(runs, described, strict=True) if (span := _drop(run, about))]
    steps = [stored_steps(run) for run in runs]
    model = config["model"]
    return {
        "name": ZOO + name,
        "task": config["task"]["name"],
        "size": _size(config["task"]),
        "model": f"{model['n_layers']}L {model['n_heads']}H d{model['d_model']}",
        "seeds": [about["seeds"]["train"] for about in described],
        "steps": config["train"]["steps"],
        "checkpoints": max(map(len, steps)),
        "bytes": sum(file.stat().st_size for run in runs for file in run.rglob("*") if file.is_file()),
        "drop": [min(first for first, _ in drops), max(last for _, last in drops)] if drops else None,
        "dropped": len(drops),
        "metric": metric,
        "final": median(_final(run, metric) for run in runs),
    }


def _size(task: dict[str, Any]) -> str:
    if "n" not in task:
        return str(task.get("p", ""))
    if task.get("sizes"):
        return f"{'/'.join(map(str, task['sizes']))} r{task['rank']}"
    return f"{task['n']}x{task.get('m') or task['n']} r{task['rank']}"


def _drop(run: Path, described: dict[str, Any]) -> tuple[int, int] | None:
    try:
        drop = find_drop(run, described, run.name)
    except UserError:
        return None
    return drop.onset, drop.end


def _final(run: Path, metric: str) -> float:
    values = [line["validation"].get(metric) for line in read_metrics(run) if line.get("validation")]
    return final_level([value for value in values if value is not None])
