"""Moves tensors to a device without making the device wait."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def moved(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Returns a tensor on a device; to a CUDA device it is copied while the operations queued there go on."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # From memory that may be paged out, a copy first waits for everything queued.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def constant(values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers as a tensor, made once for each CUDA device: a CUDA graph can copy none from ordinary memory."""
    return (_kept if device.type == "cuda" else _made)(values, dtype, device)


def _made(values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # One made in inference mode could not take part in a backward pass later.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


# For as long as the process: a CUDA graph that was recorded with one of them reads its memory.
_kept = lru_cache(maxsize=None)(_made)
