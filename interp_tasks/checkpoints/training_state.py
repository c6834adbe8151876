"""Stores the training state: everything besides weights that a run needs to resume exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from interp_tasks.checkpoints.content import check_digest
from interp_tasks.checkpoints.dtypes import as_dense_tensor, tensors_metadata
from interp_tasks.checkpoints.run_files import TRAINING_STATE_FILE, parse_json
from interp_tasks.errors import UserError
from interp_tasks.files import read_file


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
