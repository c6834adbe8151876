"""What a run records beside its weights: what observers see, the time and memory of its updates, where it came from."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save

from interp_tasks.checkpoints.run_writer import declared_drop
from interp_tasks.errors import UserError
from interp_tasks.file_io import atomic_write
from interp_tasks.pages import package_versions
from interp_tasks.training.config import TrainConfig
from tasks.base import Batch, Task

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


@runtime_checkable
class Observer(Protocol):
    """Called after update ``step`` if ``step % every == 0``; what it returns is merged into that step's log line."""

    every: int

    def __call__(self, step: int, model: HookedTransformer, run: Path) -> Mapping[str, Any]: ...


def check_observed(names: Sequence[str], model: HookedTransformer) -> None:
    """Refuses names that the model has no hook for."""
    if missing := [name for name in names if name not in model.hook_dict]:
        known = ", ".join(list(model.hook_dict)[:9])
        raise UserError(f"no activation {missing[0]!r} to observe: names are such as {known}")


class ActivationObserver:
    """Named activations on one fixed batch, stored as ``RUN/activations/00000100.safetensors``."""

    def __init__(self, names: tuple[str, ...], every: int, batch: Batch) -> None:
        self.names, self.every, self.batch = names, every, batch

    def __call__(self, step: int, model: HookedTransformer, run: Path) -> Mapping[str, Any]:
        with torch.no_grad():
            _, cache = model.run_with_cache(self.batch.tokens, names_filter=list(self.names))
        tensors = {name: cache[name].contiguous().cpu() for name in self.names}
        content = save({"tokens": self.batch.tokens.cpu(), **tensors}, {"step": json.dumps(step)})
        atomic_write(run / "activations" / f"{step:08d}.safetensors", content)
        return {}


class TrainingClock:
    """Seconds spent on updates: evaluation, writing and pauses between two openings of the run are left out.

    Attributes:
        seconds: so far, those of earlier openings included; ``None`` where these are not known.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seconds: float | None = 0.0
        self._since: float | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def go(self) -> None:
        """Starts the clock: an update begins."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stops the clock: work other than updates begins."""
        if self._since is None:
            return
        if self.device.type == "cuda":
            # Updates are only queued when their call returns. Of the whole device this would wait for the runs of other
            # threads too, and is refused while one of them records a CUDA graph.
            torch.cuda.current_stream(self.device).synchronize()
        if self.seconds is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None

    def peak_memory(self) -> dict[str, int]:
        """Returns peaks in bytes: of the whole process (weights, data, libraries), and of tensors on a CUDA device."""
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
        if self.device.type == "cuda":
            peaks["device"] = torch.cuda.max_memory_allocated(self.device)
        return peaks


def run_info(task: Task, config: TrainConfig, preset: str | None, device: str) -> dict[str, Any]:
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
