"""Dropout on the residual stream, its masks a function of (seed, step, layer, place) alone.

``HookedTransformer`` has no dropout, so the trainer adds it; stateless masks make a resumed run exact and let
the fused and the hooked forward drop the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tasks.base import generator


@dataclass(frozen=True)
class Dropout:
    """The masks of one step (Syrkis & Søgaard 2024, code: z = drop(z + attn(z)); z = drop(z + mlp(z))).

    Attributes:
        rate: share of entries set to zero; the rest is scaled by 1 / (1 − rate).
        masks: one for each sample, or one shared by the batch, as published.
        positions: length of the full sequence; a mask covers it whatever part is computed.
    """

    rate: float
    masks: Literal["per-sample", "shared"]
    positions: int
    seed: int
    step: int

    def __call__(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        layer: int,
        place: Literal["resid_mid", "resid_post"],
        positions: Sequence[int] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """``resid`` (at ``positions``, if only some are computed) with this step's mask applied."""
        random_stream = generator(self.seed, "dropout", self.step, layer, place)
        rows = 1 if self.masks == "shared" else len(resid)
        kept = torch.rand(rows, self.positions, resid.shape[-1], generator=random_stream) >= self.rate
        if positions is not None:
            kept = kept[:, list(positions)]
        return resid * kept.to(resid.device, resid.dtype) / (1 - self.rate)
