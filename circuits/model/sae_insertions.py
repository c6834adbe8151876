"""Puts autoencoders into the forward pass of a model, at its sites, with hook points for features and error.

Where x is what the edits of a site leave, f = encode(x) passes the hook point of the features and x − decode(f) that
of the error; what they leave, f' and e', goes on as decode(f') + e'. It is computed as x + (decode(f') − decode(f)) +
(e' − e), so that the model goes on with x itself, bit for bit, where nothing is edited. No gradient is cut: that at x
is then what it is without an autoencoder, and that at f' goes through the decoder alone, with the error held, as in
Marks et al. 2024 (arXiv:2403.19647), where the error is a node too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.contexts import model_block
from circuits.model.edit_state import state_of
from circuits.model.hooks import Handle
from circuits.model.sites import ERROR, FEATURES, Site, part_of


@dataclass(frozen=True)
class Autoencoder:
    """The two functions of a sparse autoencoder, [... d_in] to [... feature] and back, and the type that it computes
    in (None: the model's).
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    dtype: torch.dtype | None

    def like(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)


class SAEInsertion(nn.Module):
    """An autoencoder in line at one site: a module that maps the site's activation to what the model goes on with.

    Attributes:
        features: the hook point of the features [batch pos feature].
        error: the hook point of the error, in the shape of the site.
        width: the number of features.
    """

    def __init__(self, site: Site, autoencoder: Autoencoder, width: int) -> None:
        super().__init__()
        self.site, self.width = site, width
        self.features, self.error = nn.Identity(), nn.Identity()
        self._autoencoder = autoencoder

    @property
    def hooks(self) -> dict[str, nn.Module]:
        """Its hook points by full name."""
        points = {FEATURES: self.features, ERROR: self.error}
        return {
            part_of(part, self.site.kind).hook.format(self.site.layer): point
            for part, point in points.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        edited = self.edited(x)
        return x if edited is None else edited

    def edited(self, x: Tensor) -> Tensor | None:
        """Returns what takes the place of x; None where neither features nor error are changed."""
        sae, flat = self._autoencoder, x.flatten(2)
        # Copies, as the functions may write to what they are given, and give one buffer again and again.
        features = sae.encode(sae.like(flat).clone()).clone()
        reconstruction = sae.decode(features.clone()).clone()
        error = (flat - reconstruction.to(x.dtype)).reshape(x.shape)
        new_features, new_error = self.features(features), self.error(error)
        changes: list[Tensor] = []
        if new_features is not features:
            changes.append((sae.decode(new_features.clone()) - reconstruction).to(x.dtype).reshape(x.shape))
        if new_error is not error:
            changes.append(new_error - error)
        return sum(changes, x) if changes else None


def splices_of(model: nn.Module) -> Mapping[str, SAEInsertion]:
    """Returns the autoencoders in the model now, by the hook of their site."""
    return state_of(model).splices


@model_block
def spliced(
    model: nn.Module, new: Mapping[str, SAEInsertion], reinstall_hooks: Callable[[], None]
) -> Iterator[None]:
    """Keeps these splices, by the hook of their site, in the model inside the block; blocks may end in any order.

    Args:
        reinstall_hooks: puts all splices of the model in line anew.
    """
    current = state_of(model).splices
    for hook, splice in new.items():
        if hook in current:
            raise CircuitsError(f"splice: there is an autoencoder at {splice.site} already")
    current.update(new)
    try:
        reinstall_hooks()
        yield
    finally:
        for hook in new:
            current.pop(hook, None)
        reinstall_hooks()


def reinstall(model: nn.Module, on_forward: Callable[[str, Any], Handle]) -> None:
    """Puts the model's splices behind all hooks that are there now, so that they read what these leave."""
    state = state_of(model)
    for handle in state.splice_handles:
        handle.remove()
    state.splice_handles = [on_forward(hook, splice.edited) for hook, splice in state.splices.items()]
