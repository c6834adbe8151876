"""From a checkpoint folder, or a REF that names some, back to models. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.architecture import DTYPES, dtype_name, model_from_json
from interp_tasks.checkpoints.hugging_face import give_tokenizer
from interp_tasks.checkpoints.meta import no_task
from interp_tasks.checkpoints.refs import ResolvedCheckpoint, resolve
from interp_tasks.checkpoints.run_files import META_FILE, TRAINING_STATE_FILE, WEIGHTS_FILE, check_digest
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.files import read_file
from tasks.base import Task
from tasks.errors import TaskError


@dataclass(frozen=True)
class Checkpoint:
    """A stored model, ready to run.

    Attributes:
        task: what it was trained on; ``None`` if it names no task, or one that is not registered here.
        step: number of updates it has had.
        meta: all of ``meta.json``.
        ref: the REF of exactly this checkpoint, e.g. ``runs/x@4000``.
        run: the run it belongs to, e.g. ``runs/x`` or ``zoo:NAME``; ``None`` for a folder on its own.
    """

    model: HookedTransformer = field(repr=False)
    task: Task | None
    step: int
    meta: dict[str, Any] = field(repr=False)
    ref: str
    path: Path
    run: str | None

    def require_task(self) -> Task:
        """Returns the task.

        Raises:
            UserError: saying why there is none.
        """
        if self.task is None:
            raise no_task(self.meta, self.ref)
        return self.task


def load_checkpoint(ref: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Returns the one checkpoint that a REF names.

    Raises:
        UserError: in one line, for a REF that names none or several, or whatever is wrong with its files.
    """
    resolved = resolve(ref)
    if len(resolved) > 1:
        raise UserError(
            f"{ref} names {len(resolved)} checkpoints ({resolved[0].ref} ... {resolved[-1].ref}): "
            "name one, or iterate over load_checkpoints"
        )
    return load_resolved(resolved[0], device)


def load_checkpoints(ref: str | Path, device: str | torch.device = "cpu") -> Iterator[Checkpoint]:
    """Returns the checkpoints that a REF names, each loaded when it is reached; the REF itself is checked at once."""
    resolved = resolve(ref)
    return (load_resolved(each, device) for each in resolved)


def read_tensors(file: Path, noun: str, expected: Any) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, checked against the digest that ``meta.json`` has of it."""
    content = read_file(file, noun)
    check_digest(file, content, expected)
    try:
        return load(content)
    # A header that names a dtype torch lacks surfaces as KeyError, wrong sizes as ValueError or RuntimeError.
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        complaint = " ".join(str(error).split())
        raise UserError(f"{file} is not a readable safetensors file: {complaint}") from None


def read_training_state(folder: Path, meta: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Returns the tensors that a run needs besides weights to resume exactly; ``None`` where none are kept."""
    file, expected = folder / TRAINING_STATE_FILE, meta.get("training_state")
    is_kept = expected is not None and file.is_file()
    return read_tensors(file, "a training state", expected) if is_kept else None


def read_parameters(folder: Path, meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint's weights file, checked against its ``meta.json`` and finite."""
    file = folder / WEIGHTS_FILE
    if (dtype := meta["weights"]["dtype"]) not in DTYPES:
        raise UserError(
            f"{folder / META_FILE} is mangled: the dtype of the weights is none of {', '.join(DTYPES)}"
        )
    tensors = read_tensors(file, "the model's parameters", meta["weights"])
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) != dtype:
            raise UserError(
                f"{file}: parameter {name} is {dtype_name(tensor.dtype)} where meta.json says {dtype}"
            )
        if not tensor.isfinite().all():
            raise UserError(f"{file}: parameter {name} holds NaN or infinite values")
    return tensors


def fill_parameters(model: HookedTransformer, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Copies stored parameters into a model, in place, after checking that they are exactly the model's."""
    parameters = dict(model.named_parameters())
    for kind, names in (
        ("lacks parameter", sorted(parameters.keys() - tensors.keys())),
        ("holds an unknown parameter", sorted(tensors.keys() - parameters.keys())),
    ):
        if names:
            raise UserError(f"{file} {kind} {names[0]}: it does not hold the model that is asked for")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise UserError(
                f"{file}: parameter {name} has shape {list(tensors[name].shape)}, the model has {list(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def load_resolved(resolved: ResolvedCheckpoint, device: str | torch.device) -> Checkpoint:
    """Loads a checkpoint onto a device: its files checked, its model built and filled, its task made."""
    check_device(device)
    folder, meta = resolved.path, resolved.meta
    if meta["step"] != resolved.step:
        raise UserError(
            f"{folder} is misplaced: its meta.json says step {meta['step']}, its name {resolved.step}"
        )
    tensors = read_parameters(folder, meta)
    model = model_from_json(meta["model"], folder / META_FILE)
    fill_parameters(model, tensors, folder / WEIGHTS_FILE)
    give_tokenizer(model, resolved.run_path)
    frozen = set(meta["frozen"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.to(torch.device(device), print_details=False)
    task = resolved.task
    try:
        if task is not None:
            task.check_model(model)
    except TaskError as error:
        raise UserError(f"{folder / META_FILE}: {error}") from None
    return Checkpoint(model, task, resolved.step, meta, resolved.ref, folder, resolved.run_name)
