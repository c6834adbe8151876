"""Describes a command's settings, for the head of its printed table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp_tasks.measurement.experiment import EXPERIMENTS

#: Settings whose option has another name.
OPTIONS = {"sites": "site", "templates": "template"}


def header_parts(experiment: str, config: Mapping[str, Any]) -> list[str]:
    """Returns settings for a header, ``["mode uniform", "positions hidden"]``; of joined results those they share.

    Args:
        config: of a :class:`Result`.
    """
    known = EXPERIMENTS.get(experiment)
    settings = {} if known is None else known.says
    each = [
        examined(part)
        + [
            phrase(name, part[name])
            for name, unsaid in settings.items()
            if part.get(name) not in (None, unsaid)
        ]
        for part in config.get("parts", [config])
    ]
    return [one for one in each[0] if all(one in others for others in each)]


def examined(config: Mapping[str, Any]) -> list[str]:
    """Returns the task whose examples these are, where one was named in place of the checkpoint's own."""
    if config.get("task") is None:
        return []
    settings = [f"{name} {value}" for name, value in config.get("task_config", {}).items()]
    return [" ".join(["task", config["task"], *([f"({', '.join(settings)})"] if settings else [])])]


def phrase(name: str, value: Any) -> str:
    name = OPTIONS.get(name, name.replace("_", "-"))
    if value is True:
        return name
    if isinstance(value, (list, tuple)):
        return f"{name} {', '.join(map(str, value))}"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
