"""Where a run comes from: seeds, versions, hardware, git state, start time and command, for its ``run.json``."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from interp_tasks.checkpoints.run_writer import declared_drop
from interp_tasks.pages import package_versions
from interp_tasks.training.config import TrainConfig
from tasks.base import Task


def run_provenance(task: Task, config: TrainConfig, preset: str | None, device: str) -> dict[str, Any]:
    """Returns seeds, versions, hardware, git state, start time and command, as plain JSON."""
    from_scratch = config.start_from is None and config.attention_from is None and not config.train_parts
    # The preset `paper`, none of its task settings overridden.
    is_published = preset == "paper" and task == type(task)(**task.presets["paper"].get("task", {}))
    published = task.published_marks if from_scratch and is_published else {}
    return {
        "preset": preset,
        **({"published_drop": dict(published)} if published else {}),
        "drop_metric": declared_drop(task),
        "plateau_levels": dict(task.plateau_levels()),
        "loss_shares": dict(task.loss_shares()),
        "seeds": {"train": config.seed},
        "versions": package_versions(),
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "processor": describe_processor(),
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        },
        "git": git_state(),
        "command": shlex.join(["interp-run", *sys.argv[1:]])
        if sys.argv[0].endswith(("interp-run", "interp_tasks/__main__.py"))
        else None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def describe_processor() -> str:
    """Returns the kind of processor and the instructions that torch uses on it: on another, sums round otherwise."""
    named: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        pairs = (line.partition(":") for line in lines.splitlines())
        named = {key.strip(): value.strip() for key, _, value in pairs}
    numbers = [f"{key} {named[key]}" for key in ("cpu family", "model") if key in named]
    name = named.get("model name") or platform.processor() or platform.machine()
    return ", ".join([name, *numbers, torch.backends.cpu.get_cpu_capability()])


def git_state() -> dict[str, Any] | None:
    """Returns the working directory's commit and whether tracked files differ; ``None`` outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
