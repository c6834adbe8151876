"""Other checkpoints in training: parts that start from one, parts that train, and attention maps of a teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp_tasks.checkpoints import load_checkpoint
from interp_tasks.checkpoints.checkpoint import read_checked_tensors
from interp_tasks.checkpoints.checkpoint_refs import ResolvedCheckpoint, resolve_one_ref
from interp_tasks.checkpoints.run_reader import WEIGHTS_FILE
from interp_tasks.errors import UserError
from interp_tasks.training.config import PARTS, TrainConfig
from interp_tasks.training.forward import DropoutMasks, FusedForward
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


class TeacherPatterns(FusedForward):
    """Computes the attention patterns of a model that does not train."""

    @torch.no_grad()
    def patterns(self, tokens: Int[Tensor, "batch pos"]) -> list[Float[Tensor, "batch head query key"]]:
        """Returns the pattern of each layer, of the last at the read positions alone."""
        self.computed: list[Tensor] = []
        self(tokens)
        return self.computed

    def _attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, ...] | None
    ) -> Float[Tensor, "batch pos d_heads"]:
        q, k, v = (rearrange(x, "b p (head d) -> b head p d", head=self.cfg.n_heads) for x in (q, k, v))
        scores = q @ k.mT / float(self.cfg.attn_scale)
        visible = self._visible_keys(k.shape[2], rows, k.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        pattern = scores.softmax(-1)
        self.computed.append(pattern)
        return rearrange(pattern @ v, "b head p d -> b p (head d)")


class TeacherAttentionForward(FusedForward):
    """Computes the model's output with a teacher's attention patterns in some layers.

    It is the model under ``circuits.patch.activations("pattern", source=...)`` of another model's patterns, batch by
    batch. Query and key weights of these layers do nothing, and get no gradient.
    """

    kind = "taught"

    def __init__(
        self,
        model: HookedTransformer,
        read_positions: Sequence[int],
        teacher: HookedTransformer,
        layers: Sequence[int],
    ) -> None:
        super().__init__(model, read_positions)
        self.teacher = TeacherPatterns(teacher, read_positions)
        self.layers = tuple(layers) or tuple(range(model.cfg.n_layers))
        self.given: Mapping[int, Tensor] = {}

    def __call__(
        self, tokens: Int[Tensor, "batch pos"], dropout: DropoutMasks | None = None
    ) -> Float[Tensor, "batch read d_out"]:
        """Returns the output at the positions that are read."""
        patterns = self.teacher.patterns(tokens)
        self.given = {layer: patterns[layer] for layer in self.layers}
        return super().__call__(tokens, dropout)

    def _attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, ...] | None
    ) -> Float[Tensor, "batch pos d_heads"]:
        if layer not in self.given:
            return super()._attention(layer, q, k, v, rows)
        v = rearrange(v, "b key (head d) -> b head key d", head=self.cfg.n_heads)
        return rearrange(self.given[layer].to(v.dtype) @ v, "b head p d -> b p (head d)")


def load_teacher_forward(
    model: HookedTransformer, read_positions: Sequence[int], config: TrainConfig, device: str
) -> TeacherAttentionForward:
    """Returns the forward of a model that is given the attention of ``train.attention_from``."""
    assert config.attention_from is not None
    teacher = load_checkpoint(config.attention_from, device=device).model
    shapes = [(m.cfg.n_layers, m.cfg.n_heads, m.cfg.n_ctx, m.cfg.d_vocab) for m in (teacher, model)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"train.attention_from={config.attention_from} has (layers, heads, positions, tokens) {shapes[0]}, this "
            f"model {shapes[1]}: match model.* and task.*"
        )
    if max(config.attention_layers, default=0) >= model.cfg.n_layers:
        raise UserError(f"train.attention_layers: layers are 0 to {model.cfg.n_layers - 1}")
    try:
        return TeacherAttentionForward(model, read_positions, teacher, config.attention_layers)
    except ValueError as error:
        raise UserError(
            f"train.attention_from: no attention can be given to or by such a model ({error})"
        ) from None
