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
from interp_tasks.errors import UserError
from tasks.hooked import construct, global_randomness_untouched
from tasks.post_norm import PostNormConfig

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
        stored: dict[str, Any] = to_json({**fields, "dtype": dtype_name(dtype)}, "cfg")
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
    dtype = DTYPES.get(str(stored.get("dtype")))
    for name, is_wrong in (("dtype", dtype is None), ("attn_scale", stored.get("attn_scale") == 0)):
        if is_wrong:
            raise UserError(f"{file} describes no known model: its config's {name} is {stored.get(name)!r}")
    # Weights come from the file: drawing them costs time, and a tokenizer would be fetched from the network.
    overrides = {"dtype": dtype, "device": "cpu", "init_weights": False, "tokenizer_name": None}
    try:
        with global_randomness_untouched():  # a config with a seed reseeds everything
            config = kind(**{**stored, **overrides})
        model = construct(config)
    # transformer-lens reports a config it cannot build with whatever its code runs into first.
    except Exception as error:
        complaint = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{file} describes no model that transformer-lens can build: {complaint}") from None
    for name in {"init_weights", "tokenizer_name"} & set(stored):
        setattr(model.cfg, name, stored[name])
    return model


def check_rebuilds(model: HookedTransformer, config: Mapping[str, Any]) -> None:
    """Refuses a model that its config does not rebuild: only parameters are stored, the rest comes from there."""
    shapes = _rebuilt(json.dumps(config, sort_keys=True))
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for name in {**shapes, **own}:
        if own.get(name) != shapes.get(name):
            raise UserError(
                f"the model is not the one its config describes: parameter {name} has shape "
                f"{own.get(name, 'none')} in the model and {shapes.get(name, 'none')} by the config"
            )


@lru_cache(maxsize=2)
def _rebuilt(config: str) -> dict[str, list[int]]:
    model = model_from_json(json.loads(config), Path("the model's config"))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
