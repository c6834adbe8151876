"""Measures how long the updates of a run took, and how much memory they needed."""

from __future__ import annotations

import resource
import sys
import time

import torch


class Clock:
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

    def memory(self) -> dict[str, int]:
        """Returns peaks in bytes: of the whole process (weights, data, libraries), and of tensors on a CUDA device."""
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
        if self.device.type == "cuda":
            peaks["device"] = torch.cuda.max_memory_allocated(self.device)
        return peaks
