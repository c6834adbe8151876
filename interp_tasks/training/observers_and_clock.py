"""What a run records while it trains: what observers see, and the time and memory of its updates."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save

from interp_tasks.errors import UserError
from interp_tasks.file_io import atomic_write
from tasks.base import Batch

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


class ActivationWriter:
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

    def process_and_device_peak_bytes(self) -> dict[str, int]:
        """Returns peaks in bytes: of the whole process (weights, data, libraries), and of tensors on a CUDA device."""
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
        if self.device.type == "cuda":
            peaks["device"] = torch.cuda.max_memory_allocated(self.device)
        return peaks
