"""A ``HookedTransformerConfig`` as plain JSON and back; the empty model that it describes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from interp_tasks.checkpoints.run_files import to_json
from interp_tasks.checkpoints.tensors import DTYPES, dtype_name
from interp_tasks.errors import UserError
from tasks.hooked import construct, global_randomness_untouched
from tasks.post_norm import PostNormConfig

# Where a model runs is no part of what it is; n_params is computed.
_NOT_STORED = {"device", "n_devices", "n_params"}


def config_to_json(config: HookedTransformerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns every field that shapes the model, but ``dtype`` as its parameters have it (``cfg`` can lag behind).

    Raises:
        UserError: for a field that JSON cannot hold.
    """
    known = {field.name for field in dataclasses.fields(config)} - _NOT_STORED
    fields = {name: value for name, value in config.to_dict().items() if name in known}
    fields["dtype"] = dtype_name(dtype)
    try:
        return {name: to_json(value, f"cfg.{name}") for name, value in fields.items()}
    except TypeError as error:
        raise UserError(f"the model's config cannot be stored: {error}") from None


def model_from_json(stored: Mapping[str, Any], file: Path) -> HookedTransformer:
    """Returns the model that a stored config describes, its parameters not yet filled in.

    Raises:
        UserError: naming ``file``, for a config that this transformer-lens does not know or refuses.
    """
    fields = dict(stored)
    # Only post-norm models say how they are normed: a reader that does not know of it refuses the field.
    kind = PostNormConfig if "norm" in fields else HookedTransformerConfig
    known = {field.name for field in dataclasses.fields(kind)} - _NOT_STORED
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(
            f"{file} describes a model that the installed transformer-lens does not know: "
            f"config field {', '.join(unknown)}; see versions in {file.name}"
        )
    dtype = DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise UserError(f"{file} describes no known model: its config's dtype is {fields.get('dtype')!r}")
    if fields.get("attn_scale") == 0:
        raise UserError(f"{file} describes no known model: its config's attn_scale is 0")
    # Weights come from the file: drawing them costs time, and a tokenizer would be fetched from the network.
    overrides = {"dtype": dtype, "device": "cpu", "init_weights": False, "tokenizer_name": None}
    try:
        with global_randomness_untouched():  # a config with a seed reseeds everything
            config = kind(**{**fields, **overrides})
        model = construct(config)
    # transformer-lens reports a config it cannot build with whatever its code runs into first.
    except Exception as error:
        complaint = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{file} describes no model that transformer-lens can build: {complaint}") from None
    for name in ("init_weights", "tokenizer_name"):
        if name in fields:
            setattr(model.cfg, name, fields[name])
    return model


def check_rebuilds(model: HookedTransformer, config: Mapping[str, Any]) -> None:
    """Refuses a model that its config does not rebuild: only parameters are stored, the rest comes from there.

    Raises:
        UserError: naming the first tensor in which the two differ.
    """
    shapes = _rebuilt(json.dumps(config, sort_keys=True))
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in {**shapes, **own}:
        if own.get(name) != shapes.get(name):
            raise UserError(
                f"the model is not the one its config describes: parameter {name} has shape "
                f"{_shape(own.get(name))} in the model and {_shape(shapes.get(name))} by the config"
            )


@lru_cache(maxsize=2)
def _rebuilt(config: str) -> dict[str, tuple[int, ...]]:
    model = model_from_json(json.loads(config), Path("the model's config"))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
