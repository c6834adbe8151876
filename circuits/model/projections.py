"""What a model does between the residual stream and a head or an MLP: its own norms, and its weights by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.sites import KINDS
from circuits.model.surface import Surface

# What a product of weights may differ from the model's own by, relative to the largest entry.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF = 5e-2
#: Where each component writes from, and where that is added to the stream.
OUTPUTS = {"attn_out": "z", "mlp_out": "mlp_post"}


@dataclass(frozen=True)
class Projections:
    """Of one model, with the weights that it has at the time of each call."""

    surface: Surface
    held: Mapping[str, Tensor]  # its parameters and buffers

    @classmethod
    def of(cls, surface: Surface) -> Projections:
        return cls(surface, surface.model.state_dict(keep_vars=True))

    def norm(self, layer: int, streams: Tensor) -> Tensor:
        """What the attention of a layer reads of residual streams [row pos d_model]."""
        if self.surface.post_norm:
            return streams.clone()  # a caller may keep one beside the other
        found: Tensor = self._block(layer).ln1(streams)
        return found

    def onward(self, site: str, layer: int | None, stream: Tensor) -> Tensor:
        """What the residual stream is past a site: normalised in a post-norm model, else the same object."""
        path = self.surface.stream_norm(site, layer)
        if path is None:
            return stream
        found: Tensor = self.surface.model.get_submodule(path)(stream)
        return found

    def by_head(self, site: str, layer: int) -> tuple[Tensor, Tensor]:
        """The weights of q, k or v [head d_model d_head] and the biases [head d_head]."""
        path, heads = f"blocks.{layer}.attn", self.surface.head_count(KINDS[site])
        if f"{path}.{site}.weight" in self.held:
            weight, bias = self.held[f"{path}.{site}.weight"], self.held[f"{path}.{site}.bias"]
            return weight.unflatten(0, (heads, -1)).mT, bias.unflatten(0, (heads, -1))
        found = []
        for name in (f"W_{site.upper()}", f"b_{site.upper()}"):
            # Of key-value heads that are shared there are fewer, under another name.
            one = self._held(f"{path}.{name}", f"{path}._{name}")
            found.append(one.repeat_interleave(heads // len(one), 0) if len(one) < heads else one)
        return found[0], found[1]

    def outward(self, site: str, layer: int) -> tuple[Tensor, Tensor | None]:
        """The weights from z (heads side by side) or mlp_post to the stream [in d_model], and the bias."""
        path = f"blocks.{layer}.{'attn' if site == 'z' else 'mlp'}"
        name, capital = ("o", "O") if site == "z" else ("out", "out")
        if f"{path}.{name}.weight" in self.held:
            return self.held[f"{path}.{name}.weight"].mT, self.held.get(f"{path}.{name}.bias")
        weight = self._held(f"{path}.W_{capital}")
        return weight.flatten(0, -2), self.held.get(f"{path}.b_{capital}")

    def mlp(self, layer: int, arriving: Tensor, stream: Tensor) -> Tensor:
        """What the MLP of a layer adds to a residual stream, with all hooks inside it.

        Args:
            arriving: the stream as it comes to the site resid_mid, and `stream` as it goes on from there.
        """
        block = self._block(layer)
        if self.surface.bridged:
            # There the hook point is the norm's own.
            found: Tensor = block.mlp(block.ln2(arriving))
            return found
        if getattr(self.surface.model.cfg, "use_hook_mlp_in", False):
            stream = block.hook_mlp_in(stream)
        return block.apply_mlp(stream if self.surface.post_norm else block.ln2(stream))

    def _block(self, layer: int) -> Any:
        block = self.surface.model.get_submodule(f"blocks.{layer}")
        return block.get_submodule("_original_component") if self.surface.bridged else block

    def _held(self, *names: str) -> Tensor:
        for name in names:
            if name in self.held:
                return self.held[name]
        raise CircuitsError(
            f"patch.path: the model has no weight {names[0]}, so its paths cannot be told apart"
        )


def check_made(own: Tensor, made: Tensor, label: str, what: str) -> None:
    """Refuse a model that computes something else between two sites than the weights say."""
    with torch.no_grad():
        apart, largest = (own - made).abs().max(), own.abs().max()
        # Written so that NaN is apart too.
        if not bool(apart <= _TOLERANCE.get(own.dtype, _HALF) * largest):
            raise CircuitsError(
                f"{label}: {what} by {float(apart / largest):.1e} of its largest entry; a hook stands between them, or "
                "the model is not a plain one"
            )
