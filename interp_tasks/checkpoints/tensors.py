"""Tensors in files: dtypes by name, and what a run needs besides weights to resume exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from interp_tasks.checkpoints.run_files import TRAINING_STATE_FILE, check_digest
from interp_tasks.errors import UserError
from interp_tasks.files import read_file

#: Dtypes of parameters that are stored, by name.
DTYPES = {
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


def tensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns tensors by name, of any dtype and on any device, as one safetensors file."""
    return save({name: as_dense_tensor(tensor) for name, tensor in tensors.items()})


def read_tensors(file: Path, noun: str, expected: Any) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, checked against the digest that ``meta.json`` has of it.

    Raises:
        UserError: in one line, if it is missing or mangled.
    """
    content = read_file(file, noun)
    check_digest(file, content, expected)
    try:
        return load(content)
    # A header that names a dtype torch lacks surfaces as KeyError, wrong sizes as ValueError or RuntimeError.
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        complaint = " ".join(str(error).split())
        raise UserError(f"{file} is not a readable safetensors file: {complaint}") from None


def read_training_state(folder: Path, meta: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Returns the tensors that a run needs besides weights to resume exactly; ``None`` where none are kept.

    Raises:
        UserError: if they are there and mangled.
    """
    file, expected = folder / TRAINING_STATE_FILE, meta.get("training_state")
    if expected is None or not file.is_file():
        return None
    return read_tensors(file, "a training state", expected)
