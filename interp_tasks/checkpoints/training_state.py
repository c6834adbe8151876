"""Tensors in files: dtypes by name, and the training state, all besides weights that a run needs to resume exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from interp_tasks.checkpoints.content import check_digest
from interp_tasks.checkpoints.run_files import TRAINING_STATE_FILE, parse_json
from interp_tasks.errors import UserError
from interp_tasks.files import read_file

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


@dataclass(frozen=True)
class TrainingState:
    """Tensors by name (any dtype, any device) and plain JSON data; floats survive to the last bit."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def training_state_bytes(state: TrainingState) -> bytes:
    """Returns the state as one safetensors file, the JSON part in its header.

    Raises:
        UserError: for data that JSON cannot hold.
    """
    try:
        data = json.dumps(dict(state.data))
    except (TypeError, ValueError) as error:
        raise UserError(f"the data of a training state must be plain JSON: {error}") from None
    return save(
        {name: as_dense_tensor(tensor) for name, tensor in state.tensors.items()}, metadata={"data": data}
    )


def read_training_state(folder: Path, meta: Mapping[str, Any]) -> TrainingState | None:
    """Returns the training state of a checkpoint, checked against its digest; ``None`` where none is kept.

    Raises:
        UserError: if it is there and mangled.
    """
    file = folder / TRAINING_STATE_FILE
    expected = meta.get("training_state")
    if expected is None or not file.is_file():
        return None
    content = read_file(file, "a training state")
    check_digest(file, content, expected)
    try:
        tensors = load(content)
        data = parse_json(tensors_metadata(content)["data"].encode())
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        complaint = " ".join(str(error).split())
        raise UserError(f"{file} is not a training state: {complaint}") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} is not a training state: its data is no object")
    return TrainingState(tensors, data)
