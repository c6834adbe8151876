"""Dropout on the residual stream, its masks a function of (seed, step, layer, place) alone.

``HookedTransformer`` has no dropout, so the trainer adds it; stateless masks make a resumed run exact and let
the fused and the hooked forward drop the same entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.devices import constant
from tasks.seeds import generator

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

Place = Literal["resid_mid", "resid_post"]


@dataclass(frozen=True)
class Dropout:
    """The masks of one step (Syrkis & Søgaard 2024, code: z = drop(z + attn(z)); z = drop(z + mlp(z))).

    Attributes:
        rate: share of entries set to zero; the rest is scaled by 1 / (1 − rate).
        masks: one for each sample, or one shared by the batch, as published.
        positions: length of the full sequence; a mask covers it whatever part is computed.
        drawn: masks that are drawn already, by ``layer.place``: a captured function cannot draw.
    """

    rate: float
    masks: Literal["per-sample", "shared"]
    positions: int
    seed: int
    step: int
    drawn: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        layer: int,
        place: Place,
        positions: Sequence[int] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Applies this step's mask to ``resid`` (at ``positions``, if only some are computed)."""
        kept = self.kept(len(resid), resid.shape[-1], layer, place).to(resid.device, resid.dtype)
        if positions is not None:
            kept = kept[:, constant(tuple(positions), torch.long, resid.device)]
        return resid * kept / (1 - self.rate)

    def masks_of(
        self, model: HookedTransformer, examples: int
    ) -> dict[str, Bool[Tensor, "rows pos d_model"]]:
        """Returns the entries that stay at every place of a model, by ``layer.place``."""
        places: tuple[Place, ...] = ("resid_post",) if model.cfg.attn_only else ("resid_mid", "resid_post")
        return {
            f"{layer}.{place}": self.kept(examples, model.cfg.d_model, layer, place)
            for layer in range(model.cfg.n_layers)
            for place in places
        }

    def kept(self, examples: int, d_model: int, layer: int, place: Place) -> Bool[Tensor, "rows pos d_model"]:
        """Returns the entries that stay, on the CPU where they are drawn here; of a shared mask one row."""
        if self.drawn:
            return self.drawn[f"{layer}.{place}"]
        random_stream = generator(self.seed, "dropout", self.step, layer, place)
        rows = 1 if self.masks == "shared" else examples
        return torch.rand(rows, self.positions, d_model, generator=random_stream) >= self.rate
