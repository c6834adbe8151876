"""A student's forward pass with the attention patterns of a teacher, a model that does not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp_tasks.checkpoints import load_checkpoint
from interp_tasks.errors import UserError
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.fused_forward import DropoutMasks, FusedForward

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


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
