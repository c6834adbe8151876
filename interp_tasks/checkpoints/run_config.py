"""``run.json``: written once, compared on every later opening of the run. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.atomic import to_json
from interp_tasks.checkpoints.run_files import RUN_FILE, read_run
from interp_tasks.errors import UserError

FORMAT = 1
_MISSING = "(not set)"


def run_json(
    run: Path,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The content ``run.json`` should have now: fresh, or the existing one with this opening recorded.

    Args:
        defaults: section -> setting -> what it is where nothing is said.

    Raises:
        UserError: if the existing one was made by another config, naming the differing keys and both values.
    """
    config, info = to_json(config, "config"), to_json(info, "info")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if not (run / RUN_FILE).exists():
        return {"format": FORMAT, "config": config, **info, "created_at": now, "resumed": []}
    existing = read_run(run)
    if existing.get("format") != FORMAT or not isinstance(existing.get("config"), dict):
        raise UserError(f"{run / RUN_FILE} is not a run of this version (format {existing.get('format')!r})")
    differing = {
        key: pair
        for key, pair in differences(existing["config"], config).items()
        if not _goes_on(key, *pair, to_json(defaults or {}, "defaults"))
    }
    if differing:
        listed = "; ".join(
            f"{key}: {old!r} there, {new!r} asked for" for key, (old, new) in differing.items()
        )
        raise UserError(f"{run} was made by another config ({listed}): choose another --out")
    changed = {key: value for key, value in info.items() if existing.get(key) != value}
    resumed = [*existing.get("resumed", []), {"at": now, **changed}]
    return {**existing, "config": config, "resumed": resumed}


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys at which two nested mappings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in [*old, *(name for name in new if name not in old)]:
            dotted = f"{key}.{name}" if key else name
            found |= differences(old.get(name, _MISSING), new.get(name, _MISSING), dotted)
        return found
    return {} if old == new and type(old) is type(new) else {key: (old, new)}


def _goes_on(key: str, old: Any, new: Any, defaults: Mapping[str, Mapping[str, Any]]) -> bool:
    # A setting that is newer than the run was off, or at its default, when it began.
    section, _, name = key.partition(".")
    if old == _MISSING and (not new or new == defaults.get(section, {}).get(name, _MISSING)):
        return True
    return key == "train.steps" and type(old) is int and type(new) is int and new > old
