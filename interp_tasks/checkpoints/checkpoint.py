"""Checkpoint folders: a model's parameters as safetensors, all else as JSON; written whole, read without unpickling."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from circuits import __version__
from circuits.model.edit_state import get_edit_state
from interp_tasks.checkpoints.checkpoint_refs import ResolvedCheckpoint, resolve, resolve_one_ref
from interp_tasks.checkpoints.run_reader import (
    FORMAT,
    META_FILE,
    TRAINING_STATE_FILE,
    WEIGHTS_FILE,
    check_names_task,
    json_bytes,
    size_and_sha256,
    to_plain_json,
    with_own_sha256,
)
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_path_is_free, create_folder_atomically, read_file_bytes, write_synced
from tasks.base import Task
from tasks.errors import TaskError
from tasks.model_building import PostNormConfig, build_from_config, global_randomness_untouched

#: Dtypes of parameters that are stored, by name.
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# Where a model runs is no part of what it is; n_params is computed.
_NOT_STORED = {"device", "n_devices", "n_params"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def config_to_json(config: HookedTransformerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns every field that shapes the model, but ``dtype`` as its parameters have it (``cfg`` can lag behind)."""
    known = {field.name for field in dataclasses.fields(config)} - _NOT_STORED
    fields = {name: value for name, value in config.to_dict().items() if name in known}
    try:
        stored: dict[str, Any] = to_plain_json({**fields, "dtype": dtype_name(dtype)}, "cfg")
    except TypeError as error:
        raise UserError(f"the model's config cannot be stored: {error}") from None
    return stored


def model_from_json(stored: Mapping[str, Any], file: Path) -> HookedTransformer:
    """Returns the model that a stored config describes, its parameters not yet filled in."""
    # Only post-norm models say how they are normed: a reader that does not know of it refuses the field.
    kind = PostNormConfig if "norm" in stored else HookedTransformerConfig
    unknown = sorted(
        set(stored) - {field.name for field in dataclasses.fields(kind)} | set(stored) & _NOT_STORED
    )
    if unknown:
        raise UserError(
            f"{file} describes a model that the installed transformer-lens does not know: "
            f"config field {', '.join(unknown)}; see versions in {file.name}"
        )
    # Weights come from the file: drawing them costs time, and a tokenizer would be fetched from the network.
    overrides = {"device": "cpu", "init_weights": False, "tokenizer_name": None}
    try:
        with global_randomness_untouched():  # a config with a seed reseeds everything
            config = kind(**{**stored, **overrides, "dtype": DTYPES[stored["dtype"]]})
        model = build_from_config(config)
    # transformer-lens reports a config it cannot build with whatever its code runs into first.
    except Exception as error:
        raise UserError(
            f"{file} describes no model that transformer-lens can build: {one_line_error(error)}"
        ) from None
    for name in {"init_weights", "tokenizer_name"} & set(stored):
        setattr(model.cfg, name, stored[name])
    return model


def check_config_rebuilds_model(model: HookedTransformer, config: Mapping[str, Any]) -> None:
    """Refuses a model that its config does not rebuild: only parameters are stored, the rest comes from there."""
    shapes = _rebuilt_shapes(json.dumps(config, sort_keys=True))
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for name in {**shapes, **own}:
        if own.get(name) != shapes.get(name):
            raise UserError(
                f"the model is not the one its config describes: parameter {name} has shape "
                f"{own.get(name, 'none')} in the model and {shapes.get(name, 'none')} by the config"
            )


@lru_cache(maxsize=2)
def _rebuilt_shapes(config: str) -> dict[str, list[int]]:
    model = model_from_json(json.loads(config), Path("the model's config"))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


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
    check_path_is_free(folder)
    check_storable(model, task, step)
    assert isinstance(model, HookedTransformer)
    config = config_to_json(model.cfg, parameter_dtype(model))
    check_config_rebuilds_model(model, config)
    weights = serialise_weights(model, weights_dtype)
    meta = {
        "format": FORMAT,
        "step": step,
        "task": None if task is None else {"name": task.name, "config": task.model_dump(mode="json")},
        "model": config,
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "weights": {**size_and_sha256(weights), "dtype": weights_dtype or config["dtype"]},
        "training_state": None,
        "metrics": None if metrics is None else to_plain_json(metrics, "metrics"),
        "versions": versions_to_store(),
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    files = {WEIGHTS_FILE: weights}
    if training_state is not None:
        copies = {name: storable_copy(each) for name, each in training_state.items()}
        files[TRAINING_STATE_FILE] = save(copies)
        meta["training_state"] = size_and_sha256(files[TRAINING_STATE_FILE])
    with create_folder_atomically(folder) as temporary:
        for name, content in files.items():
            write_synced(temporary / name, content)
        write_synced(temporary / META_FILE, json_bytes(with_own_sha256(meta)))
    return folder


def check_storable(model: torch.nn.Module, task: Task | None, step: int) -> None:
    """Refuses a model, a task or a step that no checkpoint can hold."""
    if not isinstance(model, HookedTransformer) or type(model).forward is not HookedTransformer.forward:
        raise UserError(
            f"only a HookedTransformer can be stored as a checkpoint, got a {type(model).__name__}"
        )
    if get_edit_state(model).plans:
        raise UserError("the model is being edited: end the block (circuits.intervene) before it is stored")
    if step < 0:
        raise UserError(f"a checkpoint's step is the number of updates so far, at least 0, got {step}")
    if task is not None:
        if getattr(task, "name", None) is None:
            raise UserError(
                f"{type(task).__name__} has no name to be stored under: decorate it with tasks.register"
            )
        task.check_model(model)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"parameter {name} holds NaN or infinite values: the model is not stored")


def serialise_weights(model: HookedTransformer, weights_dtype: str | None) -> bytes:
    """Returns all parameters as one safetensors file; never buffers, which hold −inf and are rebuilt."""
    if weights_dtype is not None and weights_dtype not in DTYPES:
        raise UserError(f"no weights_dtype {weights_dtype!r}: it is one of {', '.join(DTYPES)}")
    dtype = None if weights_dtype is None else DTYPES[weights_dtype]
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = storable_copy(parameter)
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
        if not tensors[name].isfinite().all():
            raise UserError(
                f"parameter {name} reaches {tensor.abs().max().item():.4g}, "
                f"beyond the range of {weights_dtype}: store it with weights_dtype=None"
            )
    return save(tensors)


def storable_copy(tensor: Tensor) -> Tensor:
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


def versions_to_store() -> dict[str, str]:
    """Returns the versions of what made a checkpoint: of the code that runs, and of packages as they are installed."""
    packages = {name: version(name) for name in ("torch", "transformer-lens")}
    return {"interp-tasks": __version__, **packages, "python": platform.python_version()}


#: In a run folder, what its texts are tokenised with.
TOKENIZER_FOLDER = "tokenizer"


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
            check_names_task(self.meta, self.ref)
        assert self.task is not None, "its task was registered after it was loaded"
        return self.task


def load_checkpoint(ref: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Returns the one checkpoint that a REF names.

    Raises:
        UserError: in one line, for a REF that names none or several, or whatever is wrong with its files.
    """
    return _load_resolved(resolve_one_ref(ref), device)


def load_checkpoints(ref: str | Path, device: str | torch.device = "cpu") -> Iterator[Checkpoint]:
    """Returns the checkpoints that a REF names, each loaded when it is reached; the REF itself is checked at once."""
    resolved = resolve(ref)
    return (_load_resolved(each, device) for each in resolved)


def _load_resolved(resolved: ResolvedCheckpoint, device: str | torch.device) -> Checkpoint:
    model, run = load_model(resolved, device), resolved.run_name
    return Checkpoint(model, resolved.task, resolved.step, resolved.meta, resolved.ref, resolved.path, run)


def read_checked_tensors(file: Path, meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a file of a checkpoint, which is as it was written: its ``meta.json`` has the digest."""
    is_state = file.name == TRAINING_STATE_FILE
    expected = meta["training_state" if is_state else "weights"]
    content = read_file_bytes(file, "a training state" if is_state else "the model's parameters")
    found = size_and_sha256(content)
    if found != {name: expected[name] for name in found}:
        size = f"{len(content)} bytes where {META_FILE} says {expected['bytes']}"
        what = size if len(content) != expected["bytes"] else f"its sha256 is not the one in {META_FILE}"
        raise UserError(f"{file} has been altered: {what}; restore it from a copy")
    tensors: dict[str, Tensor] = load(content)
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


def load_model(resolved: ResolvedCheckpoint, device: str | torch.device) -> HookedTransformer:
    """Returns the model of a checkpoint on a device: its files checked, and that it fits the task it names."""
    check_device(device)
    folder, meta = resolved.path, resolved.meta
    if meta["step"] != resolved.step:
        raise UserError(
            f"{folder} is misplaced: its meta.json says step {meta['step']}, its name {resolved.step}"
        )
    tensors = read_checked_tensors(folder / WEIGHTS_FILE, meta)
    model = model_from_json(meta["model"], folder / META_FILE)
    fill_parameters(model, tensors, folder / WEIGHTS_FILE)
    give_tokenizer(model, resolved.run_path)
    frozen = set(meta["frozen"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.to(torch.device(device), print_details=False)
    try:
        if resolved.task is not None:
            resolved.task.check_model(model)
    except TaskError as error:
        raise UserError(f"{folder / META_FILE}: {error}") from None
    return model


def give_tokenizer(model: HookedTransformer, run: Path | None) -> None:
    """Gives a model the tokenizer that its run keeps, if any."""
    if run is None or not (run / TOKENIZER_FOLDER).is_dir():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(run / TOKENIZER_FOLDER, local_files_only=True)
    except Exception as error:
        raise UserError(f"{run / TOKENIZER_FOLDER} holds no tokenizer: {one_line_error(error)}") from None
    model.set_tokenizer(tokenizer)


def one_line_error(error: Exception) -> str:
    """Returns an error of a library in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
