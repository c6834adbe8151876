"""Presets are TOML beside the task they belong to."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_presets(package: str, task_name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The presets of one task: name -> section (task, model, train) -> key -> value."""
    text = resources.files(package).joinpath("presets.toml").read_text(encoding="utf-8")
    presets: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)[task_name]
    return presets
