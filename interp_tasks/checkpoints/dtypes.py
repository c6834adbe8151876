"""Tensors as safetensors wants them, and dtypes by name."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def as_dense_tensor(tensor: Tensor) -> Tensor:
    """Returns a detached, contiguous tensor on the CPU that owns its storage (safetensors refuses a shared one)."""
    # Cloned even where it may own its storage: two names for one storage are refused too.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype | None:
    """Returns the floating dtype of that name, or ``None``."""
    return _DTYPES.get(name) if isinstance(name, str) else None


def dtype_names() -> list[str]:
    return list(_DTYPES)


def tensors_metadata(content: bytes) -> dict[str, str]:
    """Returns the free-text part of a safetensors header (whose validity the caller has checked)."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return metadata
