"""Parts of a model that start from another checkpoint, and parts that train while the rest is frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from interp_tasks.checkpoints.checkpoint import read_checked_tensors
from interp_tasks.checkpoints.checkpoint_refs import ResolvedCheckpoint, resolve_one_ref
from interp_tasks.checkpoints.run_reader import WEIGHTS_FILE
from interp_tasks.errors import UserError
from interp_tasks.training.config import PARTS, TrainConfig
from tasks.model_building import is_post_norm

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

_PATTERNS: Mapping[str, str] = {
    "attn": r"blocks\.\d+\.(attn|ln1)\..+",
    "qk": r"blocks\.\d+\.attn\.[Wb]_[QK]",
    "mlp": r"blocks\.\d+\.(mlp|ln2)\..+",
    "embed": r"(embed|ln_embed)\..+",
    "pos_embed": r"pos_embed\..+",
    "unembed": r"(unembed|ln_final)\..+",
}


def is_in_parts(name: str, parts: Sequence[str]) -> bool:
    """Returns whether a parameter belongs to one of some parts."""
    if not any(re.fullmatch(pattern, name) for pattern in _PATTERNS.values()):
        raise UserError(
            f"parameter {name} belongs to none of the parts {', '.join(PARTS)}: "
            "leave out train.start_from and train.train_parts"
        )
    return any(re.fullmatch(_PATTERNS[part], name) for part in parts)


def comes_from_source(name: str, config: TrainConfig) -> bool:
    """Returns whether a parameter comes from ``train.start_from``: by default those that do not train, or all."""
    if config.start_parts:
        return is_in_parts(name, config.start_parts)
    return not is_in_parts(name, config.train_parts)


def source_record(checkpoint: ResolvedCheckpoint) -> dict[str, str]:
    """Returns what ``run.json`` records of a source of weights: a run goes on only with the same bytes."""
    return {"ref": checkpoint.ref, "sha256": checkpoint.meta["weights"]["sha256"]}


def copy_weights(model: HookedTransformer, config: TrainConfig) -> dict[str, str]:
    """Copies the weights of ``train.start_from`` into a model, of ``train.start_parts`` alone; returns their record.

    Raises:
        UserError: before any change, for a REF that does not name exactly one checkpoint, or files that are not whole;
            naming the first parameter whose shape is another, or which one of the two lacks; for weights of a pre-norm
            model in a post-norm one, or the other way round.
    """
    assert config.start_from is not None
    source = resolve_one_ref(config.start_from, f"train.start_from={config.start_from}")
    norm, own_norm = source.meta["model"].get("norm", "pre"), "post" if is_post_norm(model) else "pre"
    if norm != own_norm:
        raise UserError(
            f"train.start_from={config.start_from} is of a {norm}-norm model, this one is {own_norm}-norm: "
            f"set model.norm={norm}, or start from another"
        )
    stored, own = (
        {name: tensor for name, tensor in tensors if comes_from_source(name, config)}
        for tensors in (
            read_checked_tensors(source.path / WEIGHTS_FILE, source.meta).items(),
            model.named_parameters(),
        )
    )
    for name in sorted({*own, *stored}):
        there, here = (str(list(each[name].shape)) if name in each else "missing" for each in (stored, own))
        if there != here:
            raise UserError(
                f"train.start_from={config.start_from} is of another architecture: {name} is {there} there "
                f"and {here} here; match task.* and model.*, or leave its part out of train.start_parts"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])
    return source_record(source)


def freeze_untrained(model: HookedTransformer, config: TrainConfig) -> None:
    """Freezes the parameters of every part that is not in ``train.train_parts``."""
    if not config.train_parts:
        return
    for name, parameter in model.named_parameters():
        if not is_in_parts(name, config.train_parts):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"train.train_parts={','.join(config.train_parts)}: this model has nothing to train there"
        )
