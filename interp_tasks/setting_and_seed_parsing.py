"""Readers of what users write: ``--set key=value``, ``--seeds 0:8``, ``--import FILE.py`` and task names."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.file_io import check_regular_file

#: One past the largest seed that a generator, or the integer column of a table, holds.
SEED_END = 2**63

#: Who does the work of a grid.
EXECUTORS = "serial, processes, dask, or dask://HOST:PORT"
#: More runs are trained by a grid only where that is said to be meant; and the most seeds of one run.
MANY_RUNS, MAX_SEEDS = 1000, 10_000


def parse_settings(given: Sequence[str]) -> dict[str, str]:
    """Parses ``["train.steps=100"]`` to ``{"train.steps": "100"}``."""
    settings: dict[str, str] = {}
    for text in given:
        key, equals, value = map(str.strip, text.partition("="))
        if not equals or not key:
            raise UserError(f"--set {text!r}: write key=value, such as train.steps=1000")
        if key in settings:
            raise UserError(f"--set {key} is given twice, as {settings[key]} and as {value}")
        settings[key] = value
    return settings


def parse_seeds(text: str) -> Sequence[int]:
    """Parses different seeds: ``0:8`` is 0 to 7 (end excluded), ``3`` is 3, ``0,2,5`` are those."""
    try:
        seeds = range(*map(int, text.split(":"))) if ":" in text else [int(part) for part in text.split(",")]
    except (ValueError, TypeError):
        raise UserError(f"--seeds {text!r}: write 0:8 for seeds 0 to 7, or 0,2,5") from None
    few = 0 < len(seeds[: MAX_SEEDS + 1]) <= MAX_SEEDS
    if not few or min(seeds) < 0 or max(seeds) >= SEED_END or len(set(seeds)) < len(seeds):
        raise UserError(
            f"--seeds {text!r}: 1 to {MAX_SEEDS} different ones, from 0, below 2^63; the end of 0:8 is excluded"
        )
    return seeds


def import_file(path: Path) -> None:
    """Runs a user's Python file once, so that the tasks it registers are known; it may import the modules beside it."""
    check_regular_file(path, "--import")
    name = f"interp_run_import_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise UserError(f"--import {path}: not a Python file (.py)")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a module beside it takes no installed one's place
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        here = (str(path), str(path.resolve()))
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename in here]
        if isinstance(error, SyntaxError) and error.filename in here:
            lines.append(error.lineno)
        line_text = f", line {lines[-1]}" if lines else ""
        message = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise UserError(f"--import {path}{line_text}: {message}") from error


def parse_task_settings(task: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """Returns a task's own settings as ``--set`` gives them."""
    if not settings:
        return {}
    from interp_tasks.training.config import list_valued_keys, parse_setting_value
    from tasks import registry

    # A task that --import brings is not known yet when the options are checked.
    lists = list_valued_keys(task) if task in registry.task_names() else frozenset()
    config = {}
    for name, value in parse_settings([text.strip().removeprefix("task.") for text in settings]).items():
        if "." in name:
            raise UserError(f"--set {name}: here it sets the task's own settings, such as task.n=4")
        config[name] = parse_setting_value(value, is_list=f"task.{name}" in lists)
    return config


def check_task_name(name: str) -> None:
    """Refuses an unknown task without importing any."""
    from tasks import registry

    if name not in registry.task_names():
        raise UserError(registry.unknown_task_message(name))
