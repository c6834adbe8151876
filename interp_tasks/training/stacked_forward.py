"""Runs the forward pass of several models of one architecture at once, with a leading seed axis on every tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp_tasks.training.dropout import DrawnMasks, Dropout
from interp_tasks.training.forward import FusedForward
from tasks.devices import moved

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: By ``layer.place``, ``[seed rows pos d_model]``.
Masks = Mapping[str, Bool[Tensor, "..."]]


class StackedForward:
    """The fused forward pass of every model, mapped over the seed axis by ``torch.func.vmap``.

    Args:
        parameters: of all models, ``[seed, *shape]`` by name.

    Raises:
        ValueError: if the architecture is not one that the fused forward computes.
    """

    def __init__(
        self,
        models: Sequence[HookedTransformer],
        read_positions: Sequence[int],
        parameters: Mapping[str, Tensor],
    ) -> None:
        forwards = [MappedForward(model, read_positions) for model in models]
        self.one = forwards[0]
        self.one.silent = set.intersection(*(forward.silent for forward in forwards))
        self.parameters = dict(parameters)

    def __call__(
        self,
        tokens: Int[Tensor, "*seed batch pos"],
        dropouts: Sequence[Dropout] = (),
        masks: Masks | None = None,
    ) -> Float[Tensor, "seed batch read d_out"]:
        """Returns outputs at the read positions.

        Args:
            tokens: without the seed axis where every seed has the same.
            dropouts: one for each seed, or none at all.
            masks: as :meth:`masks` draws them; ``None``: drawn here.
        """
        if masks is None:
            masks = self.masks(dropouts, tokens.shape[-2])
        masks = {place: moved(mask, tokens.device) for place, mask in masks.items()}

        def forward(parameters: dict[str, Tensor], tokens: Tensor, masks: Masks) -> Tensor:
            one = copy.copy(self.one)
            one.parameters = parameters
            return one(tokens, DrawnMasks(**vars(dropouts[0]), drawn=masks) if dropouts else None)

        seeds = 0 if tokens.ndim == 3 else None
        mapped = torch.func.vmap(forward, in_dims=(0, seeds, 0))
        output: Tensor = mapped(self.parameters, tokens, masks)
        return output

    def masks(self, dropouts: Sequence[Dropout], examples: int) -> Masks:
        """Returns the masks of one step of every seed, on the CPU; empty without dropout."""
        cfg = self.one.cfg
        drawn = [
            dropout.drawn_for(examples, cfg.n_layers, cfg.attn_only, cfg.d_model) for dropout in dropouts
        ]
        places = drawn[0] if drawn else {}
        return {place: torch.stack([masks[place] for masks in drawn]) for place in places}


class MappedForward(FusedForward):
    """The fused forward pass written in operations that are fast when mapped."""

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Two axes: mapped, three would be a matrix product for every example, each with a copy of the weight.
        product = (x.flatten(0, -2) @ weight).unflatten(0, x.shape[:-1])
        return product if bias is None else product + bias

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
        mixed: Tensor = FoldedAttention.apply(q, k, v, visible, scale)
        return mixed


class FoldedAttention(torch.autograd.Function):
    """Attention whose ``vmap`` folds seeds and examples into one batch axis of the kernel.

    On the CPU torch would run the kernel seed by seed.
    """

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing: the mapped form is differentiated as it is."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, int]:
        q, k, v = (
            each.movedim(axis, 0).flatten(0, 1) for each, axis in zip((q, k, v), in_dims[:3], strict=True)
        )
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return z.unflatten(0, (info.batch_size, -1)), 0
