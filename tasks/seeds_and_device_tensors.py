"""Seeds from seeds, generators of random numbers for one purpose each, and tensors on devices."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def derive_seed(seed: int, *labels: object) -> int:
    """Returns a 63-bit seed from ``seed`` and labels: the same on every machine, unrelated for different labels."""
    text = "\x1f".join([str(int(seed)), *map(str, labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *labels: object) -> torch.Generator:
    """Returns a local CPU generator for one purpose; global random state is never touched."""
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


def move_to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Returns a tensor on a device; to a CUDA device it is copied while the operations queued there go on."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # From memory that may be paged out, a copy first waits for everything queued.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def constant(values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers as a tensor, made once for each CUDA device: a CUDA graph can copy none from ordinary memory."""
    return (_kept if device.type == "cuda" else _make)(values, dtype, device)


def _make(values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # One made in inference mode could not take part in a backward pass later.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


# For as long as the process: a CUDA graph that was recorded with one of them reads its memory.
_kept = lru_cache(maxsize=None)(_make)
