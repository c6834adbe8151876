"""``run.json``: written once, compared on every later opening of the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.meta import reached
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

    def change(self, old: Mapping[str, Any], new: Mapping[str, Any], taken: int) -> str:
        """Returns the first of ``taken`` steps whose rate would be another, in words; nothing if there is none."""
        before, after = self.rates(old), self.rates(new)
        for update in range(taken):
            if before(update) != after(update):
                return (
                    f"of the {taken:,} steps taken, step {update + 1:,} had a learning rate of {before(update):.6g} "
                    f"and would have {after(update):.6g}"
                )
        return ""


def run_json(
    run: Path,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """Returns the content ``run.json`` should have now: fresh, or the existing one with this opening recorded.

    Args:
        defaults: section -> setting -> what it is where nothing is said.
        schedule: of the learning rate; ``None``: no setting of it may change.

    Raises:
        UserError: if the existing one was made by another config, naming the differing keys and both values, and the
            first step that another schedule would change.
    """
    config, info = to_json(config, "config"), to_json(info, "info")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if not (run / RUN_FILE).exists():
        return {"format": FORMAT, "config": config, **info, "created_at": now, "resumed": []}
    existing = read_run(run)
    if existing.get("format") != FORMAT or not isinstance(existing.get("config"), dict):
        raise UserError(f"{run / RUN_FILE} is not a run of this version (format {existing.get('format')!r})")
    old = _completed(existing["config"], config, to_json(defaults or {}, "defaults"))
    changed = {key: pair for key, pair in differences(old, config).items() if not _was_off(*pair)}
    scheduled = {f"train.{name}" for name in schedule.settings} if schedule else set()
    refused = {
        key: pair for key, pair in changed.items() if key not in scheduled and not _extends(key, *pair)
    }
    if refused:
        raise UserError(f"{run} was made by another config ({listed(refused)}): choose another --out")
    other = {key: pair for key, pair in changed.items() if key in scheduled}
    if schedule and other:
        change = schedule.change(old["train"], config["train"], reached(run) or 0)
        if change:
            raise UserError(
                f"{run} was made by another schedule ({listed(other)}): {change}; choose another --out"
            )
    opening: dict[str, Any] = {key: value for key, value in info.items() if existing.get(key) != value}
    if changed:
        opening["config"] = changed
    resumed = [*existing.get("resumed", []), {"at": now, **opening}]
    return {**existing, "config": config, "resumed": resumed}


def declared_drop(task: Task) -> dict[str, Any]:
    """Returns a task's drop metric and theoretical plateau (``None``: it has none) as plain JSON."""
    metric = task.drop_metric
    return {
        "name": metric.name,
        "direction": metric.direction,
        "plateau": task.plateau_levels().get(metric.name),
    }


def listed(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}: {old!r} there, {new!r} asked for" for key, (old, new) in pairs.items())


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys at which two nested mappings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        differing: dict[str, tuple[Any, Any]] = {}
        for name in [*old, *(name for name in new if name not in old)]:
            dotted = f"{key}.{name}" if key else name
            differing |= differences(old.get(name, _MISSING), new.get(name, _MISSING), dotted)
        return differing
    return {} if old == new and type(old) is type(new) else {key: (old, new)}


def _completed(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the old config with the settings that are newer than the run: they had their defaults when it began."""
    completed = dict(old)
    for section, known in defaults.items():
        if isinstance(old.get(section), dict) and isinstance(new.get(section), dict):
            newer = {name: known[name] for name in new[section] if name in known}
            completed[section] = {**newer, **old[section]}
    return completed


def _was_off(old: Any, new: Any) -> bool:
    return bool(old == _MISSING and not new)


def _extends(key: str, old: Any, new: Any) -> bool:
    return key == "train.steps" and type(old) is int and type(new) is int and new > old
