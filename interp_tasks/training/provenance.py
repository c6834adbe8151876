"""The provenance that a run records: where it came from."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from interp_tasks.checkpoints.run_config import declared_drop
from interp_tasks.texts import without_secrets
from interp_tasks.training.config import TrainConfig
from tasks.base import Task


def run_info(task: Task, config: TrainConfig, preset: str | None, device: str) -> dict[str, Any]:
    """Returns seeds, versions, hardware, git state, start time and command, as plain JSON."""
    from_scratch = config.start_from is None and config.attention_from is None and not config.train_parts
    published = task.published_marks if from_scratch and is_published(task, preset) else {}
    return {
        "preset": preset,
        **({"published_drop": dict(published)} if published else {}),
        "drop_metric": declared_drop(task),
        "seeds": {"train": config.seed},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("interp-tasks", "torch", "transformer-lens", "numpy")},
        },
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "processor": processor(),
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        },
        "git": git_state(),
        "command": command() if sys.argv[0].endswith(("interp-run", "interp_tasks/__main__.py")) else None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """Returns the kind of processor and the instructions that torch uses on it: on another, sums round otherwise."""
    named: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        named = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in lines.splitlines())
        }
    numbers = [f"{key} {named[key]}" for key in ("cpu family", "model") if key in named]
    name = named.get("model name") or platform.processor() or platform.machine()
    return ", ".join([name, *numbers, torch.backends.cpu.get_cpu_capability()])


def command() -> str:
    """Returns the command line, without the secrets of URLs in it."""
    return shlex.join(["interp-run", *map(without_secrets, sys.argv[1:])])


def is_published(task: Task, preset: str | None) -> bool:
    """Returns whether the data is the paper's: the preset ``paper``, none of its task settings overridden."""
    return preset == "paper" and task == type(task)(**task.presets["paper"].get("task", {}))


def git_state() -> dict[str, Any] | None:
    """Returns the working directory's commit and whether tracked files differ; ``None`` outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
