"""Parts of a model: which start from another checkpoint, and which train (Gopalani, Lubana, Hu 2024, section 4).

The parts share out all parameters. Attention takes the LayerNorm before it along, the MLP likewise, and the read-out
the final one, so that a part that trains sets the scale of its own input. In a post-norm model they take the LayerNorm
after them, as in the authors' code; that of the embeddings, there trained with both tables, goes with the tokens'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from interp_tasks.checkpoints.load import read_parameters
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import resolve
from interp_tasks.errors import UserError
from interp_tasks.training.config import PARTS, TrainConfig
from tasks.hooked import is_post_norm

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


def in_parts(name: str, parts: Sequence[str]) -> bool:
    """Returns whether a parameter belongs to one of some parts.

    Raises:
        UserError: if it belongs to none at all, as in architectures that the task did not build.
    """
    if not any(re.fullmatch(pattern, name) for pattern in _PATTERNS.values()):
        raise UserError(
            f"parameter {name} belongs to none of the parts {', '.join(PARTS)}: "
            "leave out train.start_from and train.train_parts"
        )
    return any(re.fullmatch(_PATTERNS[part], name) for part in parts)


def comes_from_source(name: str, config: TrainConfig) -> bool:
    """Returns whether a parameter comes from ``train.start_from``: by default those that do not train, or all."""
    return (
        in_parts(name, config.start_parts) if config.start_parts else not in_parts(name, config.train_parts)
    )


def one_checkpoint(ref: str, setting: str) -> tuple[Path, dict[str, str]]:
    """Returns the one checkpoint that a setting's REF names, and its record in ``run.json``: a run goes on only with
    the same bytes.

    Raises:
        UserError: if it names several.
    """
    resolved = resolve(ref)
    if len(resolved) > 1:
        raise UserError(
            f"{setting}={ref} names {len(resolved)} checkpoints "
            f"({resolved[0].ref} ... {resolved[-1].ref}): name one"
        )
    path = resolved[0].path
    return path, {"ref": resolved[0].ref, "sha256": read_meta(path)["weights"]["sha256"]}


def copy_weights(model: HookedTransformer, config: TrainConfig) -> dict[str, str]:
    """Copies the weights of ``train.start_from`` into a model, of ``train.start_parts`` alone; returns their record.

    Raises:
        UserError: before any change, for a REF that does not name exactly one checkpoint, or files that are not whole;
            naming the first parameter whose shape is another, or which one of the two lacks; for weights of a pre-norm
            model in a post-norm one, or the other way round.
    """
    assert config.start_from is not None
    path, record = one_checkpoint(config.start_from, "train.start_from")
    meta = read_meta(path)
    norm, own_norm = meta["model"].get("norm", "pre"), "post" if is_post_norm(model) else "pre"
    if norm != own_norm:
        raise UserError(
            f"train.start_from={config.start_from} is of a {norm}-norm model, this one is {own_norm}-norm: "
            f"set model.norm={norm}, or start from another"
        )
    stored, own = (
        {name: tensor for name, tensor in tensors if comes_from_source(name, config)}
        for tensors in (read_parameters(path, meta).items(), model.named_parameters())
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
    return record


def freeze_others(model: HookedTransformer, config: TrainConfig) -> None:
    """Freezes the parameters of every part that is not in ``train.train_parts``.

    Raises:
        UserError: if nothing is left to train.
    """
    if not config.train_parts:
        return
    for name, parameter in model.named_parameters():
        if not in_parts(name, config.train_parts):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"train.train_parts={','.join(config.train_parts)}: this model has nothing to train there"
        )
