"""From a model to a checkpoint folder: parameters as safetensors, everything else JSON, all or nothing."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformer_lens import HookedTransformer

from circuits import __version__
from circuits.model.edit_state import inside_block
from interp_tasks.checkpoints.architecture import DTYPES, check_rebuilds, config_to_json, dtype_name
from interp_tasks.checkpoints.meta import FORMAT, signed
from interp_tasks.checkpoints.run_files import (
    META_FILE,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    digest,
    json_bytes,
    to_json,
)
from interp_tasks.disk import check_absent, new_folder, write_synced
from interp_tasks.errors import UserError
from tasks.base import Task


def save_checkpoint(
    path: str | Path,
    model: torch.nn.Module,
    task: Task | None = None,
    step: int = 0,
    *,
    weights_dtype: str | None = None,
    metrics: Mapping[str, Any] | None = None,
    training_state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a checkpoint folder that appears whole or not at all; any ``HookedTransformer`` will do.

    Args:
        path: the folder to make; one that exists is refused.
        model: a ``HookedTransformer``, of any architecture that its config describes.
        task: what the model was trained on; without one, commands ask for ``--task`` or ``--tokens``.
        step: number of updates made so far.
        weights_dtype: ``"float16"`` halves the file; the model comes back in its own dtype. ``None``: as is.
        metrics: JSON to keep beside the weights, e.g. ``tasks.pool(task.metrics(...))``.
        training_state: what a trainer needs to go on from here.

    Returns:
        The folder.

    Raises:
        UserError: for a non-finite parameter, a model that its config does not rebuild, an existing or
            unwritable path.
        TaskError: if the task does not fit the model.
    """
    folder = Path(path)
    check_absent(folder)
    check_storable(model, task, step)
    assert isinstance(model, HookedTransformer)
    config = config_to_json(model.cfg, parameter_dtype(model))
    check_rebuilds(model, config)
    weights = weights_bytes(model, weights_dtype)
    meta = {
        "format": FORMAT,
        "step": step,
        "task": None if task is None else {"name": task.name, "config": task.model_dump(mode="json")},
        "model": config,
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "weights": {**digest(weights), "dtype": weights_dtype or config["dtype"]},
        "training_state": None,
        "metrics": None if metrics is None else to_json(metrics, "metrics"),
        "versions": versions(),
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    files = {WEIGHTS_FILE: weights}
    if training_state is not None:
        files[TRAINING_STATE_FILE] = save(
            {name: as_dense_tensor(each) for name, each in training_state.items()}
        )
        meta["training_state"] = digest(files[TRAINING_STATE_FILE])
    with new_folder(folder) as temporary:
        for name, content in files.items():
            write_synced(temporary / name, content)
        write_synced(temporary / META_FILE, json_bytes(signed(meta)))
    return folder


def check_storable(model: torch.nn.Module, task: Task | None, step: int) -> None:
    """Refuses a model, a task or a step that no checkpoint can hold."""
    if not isinstance(model, HookedTransformer) or type(model).forward is not HookedTransformer.forward:
        raise UserError(
            f"only a HookedTransformer can be stored as a checkpoint, got a {type(model).__name__}"
        )
    if inside_block(model):
        raise UserError("the model is being edited: end the block (circuits.intervene) before it is stored")
    if step < 0:
        raise UserError(f"a checkpoint's step is the number of updates so far, at least 0, got {step}")
    if task is not None:
        if getattr(task, "name", None) is None:
            raise UserError(
                f"{type(task).__name__} has no name to be stored under: decorate it with tasks.register"
            )
        task.check_model(model)


def weights_bytes(model: HookedTransformer, weights_dtype: str | None) -> bytes:
    """Returns all parameters as one safetensors file; never buffers, which hold −inf and are rebuilt."""
    if weights_dtype is not None and weights_dtype not in DTYPES:
        raise UserError(f"no weights_dtype {weights_dtype!r}: it is one of {', '.join(DTYPES)}")
    dtype = None if weights_dtype is None else DTYPES[weights_dtype]
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"parameter {name} holds NaN or infinite values: the model is not stored")
        tensor = as_dense_tensor(parameter)
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
        if not tensors[name].isfinite().all():
            raise UserError(
                f"parameter {name} reaches {tensor.abs().max().item():.4g}, "
                f"beyond the range of {weights_dtype}: store it with weights_dtype=None"
            )
    return save(tensors)


def as_dense_tensor(tensor: Tensor) -> Tensor:
    """Returns a detached, contiguous tensor on the CPU that owns its storage (safetensors refuses a shared one)."""
    # Cloned even where it may own its storage: two names for one storage are refused too.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def parameter_dtype(model: HookedTransformer) -> torch.dtype:
    """Returns the one dtype of all parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    names = sorted(map(dtype_name, dtypes))
    if len(dtypes) != 1 or names[0] not in DTYPES:
        raise UserError(
            f"a stored model has parameters of one dtype, of {', '.join(DTYPES)}; got {', '.join(names)}"
        )
    return dtypes.pop()


def versions() -> dict[str, str]:
    """Returns the versions of what made a checkpoint: of the code that runs, and of packages as they are installed."""
    packages = {name: version(name) for name in ("torch", "transformer-lens")}
    return {"interp-tasks": __version__, **packages, "python": platform.python_version()}
