"""The marks of a run, pre, onset, end and post: stored steps around the drop that its metrics show.

Imports no torch, except for a run whose ``run.json`` is older than the stored plateau: its task is loaded then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.drop_detection import Drop, detect_drop_or_reason
from interp_tasks.checkpoints.run_reader import (
    METRICS_FILE,
    RUN_FILE,
    log_file,
    read_metric_series_and_last_step,
    read_run,
    stored_steps,
)
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks import Task

MARKS = ("pre", "onset", "end", "post")


def find_marks(
    run: str | Path,
    run_name: str | None = None,
    needed: Collection[str] = MARKS,
    run_json: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Returns the step of each mark that there is; with the default arguments, of all four.

    ``pre`` lies well inside the plateau (of the steps before the onset, the one nearest to a quarter of it;
    step 0 only if there is no other), ``onset`` and ``end`` are the stored steps either side of the detected
    drop, and ``post`` is the last. A run of the preset ``paper`` whose ``run.json`` has ``published_drop``
    takes those steps instead.

    Args:
        run_json: the content of its ``run.json``; ``None``: as it is on disk.

    Raises:
        UserError: if the run has no drop (yet), no checkpoint on a side of it that a needed mark is on, or no metrics.
    """
    folder = Path(run)
    name = run_name or folder.as_posix()
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{name} has no {RUN_FILE}, so its drop is unknown: give steps, or @last")
    run_json = read_run(folder) if run_json is None else run_json
    published = run_json.get("published_drop") if run_json.get("preset") == "paper" else None
    given = {mark: int(step) for mark, step in (published or {}).items() if mark in MARKS}
    if set(given) == set(MARKS):
        return given
    drop, steps = detect_drop_of_run(folder, run_json, name), stored_steps(folder)
    before = [step for step in steps if step <= drop.onset]
    after = [step for step in steps if step >= drop.end]
    lacking = set(needed) - set(given)
    for side, where, nearest, marks in (
        (before, "before", f"first is @{steps[0]}", {"pre", "onset"}),
        (after, "after", f"last is @{steps[-1]}", {"end", "post"}),
    ):
        if not side and marks & lacking:
            raise UserError(
                f"{name} has no checkpoint {where} its drop (steps {drop.onset} to {drop.end}): the {nearest}"
            )
    found = {}
    if before:
        plateau = [step for step in before if step > 0] or before
        found = {"pre": min(plateau, key=lambda step: abs(step - drop.onset / 4)), "onset": before[-1]}
    if after:
        found |= {"end": after[0], "post": steps[-1]}
    return found | given


def detect_drop_of_run(run: Path, run_json: Mapping[str, Any], name: str) -> Drop:
    """Returns the drop that a run's own metrics show."""
    metric = run_json.get("drop_metric")
    if not isinstance(metric, dict) or metric.get("direction") not in ("down", "up") or "name" not in metric:
        raise UserError(
            f"{run / RUN_FILE} declares no drop_metric, so no drop can be found: give steps, or @last"
        )
    columns, _ = read_metric_series_and_last_step(run)
    logged = columns.get(("validation", metric["name"]))
    if logged is None or all(value != value for value in logged[1]):
        raise UserError(
            f"{log_file(run, METRICS_FILE)} logs no validation {metric['name']}, so no drop can be found"
        )
    steps, values = logged
    theory = theoretical_plateau(run_json)
    drop = detect_drop_or_reason(steps, values, metric["direction"], theory)
    if not isinstance(drop, Drop):
        expected = "" if theory is None else f" from its plateau by theory, {theory:.4g},"
        alone = "It has no checkpoints; runs drops and runs curve read its log"
        advice = "Give steps, or @last" if stored_steps(run) else alone
        raise UserError(
            f"{name} shows no drop in {metric['name']}{expected} up to step {steps[-1]}: {drop}. {advice}"
        )
    return drop


def theoretical_plateau(run_json: Mapping[str, Any]) -> float | None:
    """Returns the plateau of a run's drop metric by theory, from its ``run.json``; ``None`` where there is none."""
    metric = run_json["drop_metric"]
    if "plateau" in metric:
        stored: float | None = metric["plateau"]
        return stored
    # An older run does not say.
    task = task_of_run(run_json)
    return None if task is None else task.plateau_levels().get(metric["name"])


def task_of_run(run_json: Mapping[str, Any]) -> Task | None:
    """Returns the task of a run, from its ``run.json``; ``None`` for one that is not known here by those settings."""
    import tasks

    try:
        settings = dict(run_json["config"]["task"])
        return tasks.get(settings.pop("name"), **settings)
    except (LookupError, TypeError, ValueError):
        return None
