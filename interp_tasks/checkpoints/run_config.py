"""``run.json``: written once, compared on every later opening of the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.meta import stored_points
from interp_tasks.checkpoints.run_files import RUN_FILE, read_run, to_json
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks.base import Task

FORMAT = 1
_MISSING = "(not set)"


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: a run may go on by another only if no step taken had another learning rate.

    Attributes:
        settings: the names of those train settings that may change so.
        rates: from train settings, the learning rate of every update, which is counted from 0.
    """

    settings: tuple[str, ...]
    rates: Callable[[Mapping[str, Any]], Callable[[int], float]]


def run_json(
    run: Path,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """Returns the content ``run.json`` should have now: fresh, or the existing one with this opening recorded.

    One that another config made is refused, with the differing keys, or the first step that another schedule changes.

    Args:
        defaults: section -> setting -> what it is where nothing is said.
        schedule: of the learning rate; ``None``: no setting of it may change.
    """
    config, info = to_json(config, "config"), to_json(info, "info")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if not (run / RUN_FILE).exists():
        return {"format": FORMAT, "config": config, **info, "created_at": now, "resumed": []}
    existing = read_run(run)
    if existing.get("format") != FORMAT or not isinstance(existing.get("config"), dict):
        raise UserError(f"{run / RUN_FILE} is not a run of this version (format {existing.get('format')!r})")
    old = dict(existing["config"])
    for section, known in to_json(defaults or {}, "defaults").items():
        if isinstance(old.get(section), dict) and isinstance(config.get(section), dict):
            # Settings that are newer than the run had their defaults when it began.
            old[section] = {name: known[name] for name in config[section] if name in known} | old[section]
    changed = {
        key: (before, after)
        for key, (before, after) in differences(old, config).items()
        if before != _MISSING or after
    }
    scheduled = {f"train.{name}" for name in schedule.settings} if schedule else set()
    other = {key: pair for key, pair in changed.items() if key in scheduled}
    refused = {key: pair for key, pair in changed.items() if key not in other and not _extends(key, *pair)}
    if refused:
        raise UserError(f"{run} was made by another config ({listed(refused)}): choose another --out")
    if schedule and other:
        before, after = schedule.rates(old["train"]), schedule.rates(config["train"])
        taken = max((step for step, _ in stored_points(run)), default=0)
        for update in range(taken):
            if before(update) != after(update):
                raise UserError(
                    f"{run} was made by another schedule ({listed(other)}): of the {taken:,} steps taken, step "
                    f"{update + 1:,} had a learning rate of {before(update):.6g} and would have {after(update):.6g}; "
                    "choose another --out"
                )
    opening: dict[str, Any] = {key: value for key, value in info.items() if existing.get(key) != value}
    if changed:
        opening["config"] = changed
    resumed = [*existing.get("resumed", []), {"at": now, **opening}]
    return {**existing, "config": config, "resumed": resumed}


def declared_drop(task: Task) -> dict[str, Any]:
    """Returns a task's drop metric and theoretical plateau (``None``: it has none) as plain JSON."""
    metric = task.drop_metric
    plateau = task.plateau_levels().get(metric.name)
    return {"name": metric.name, "direction": metric.direction, "plateau": plateau}


def listed(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}: {old!r} there, {new!r} asked for" for key, (old, new) in pairs.items())


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys at which two nested mappings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        differing: dict[str, tuple[Any, Any]] = {}
        for name in {**old, **new}:
            dotted = f"{key}.{name}" if key else name
            differing |= differences(old.get(name, _MISSING), new.get(name, _MISSING), dotted)
        return differing
    return {} if old == new and type(old) is type(new) else {key: (old, new)}


def _extends(key: str, old: Any, new: Any) -> bool:
    return key == "train.steps" and type(old) is int and type(new) is int and new > old
