"""Divides the last residual stream into what each component has added to it."""

from __future__ import annotations

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import Activations
from circuits.logit_lens._norms import FrozenNorm, eps, product_terms, scale_of, sum_terms, units
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.projections import Projections
from circuits.model.sites import Site

_PARTS = tuple(Site(name) for name in ("embed", "pos_embed", "z", "mlp_out"))
_SUMS = tuple(Site(name) for name in ("resid_mid", "resid_post"))
#: The hook of the normalised output of a layer of a post-norm model.
_LAYER_OUTPUT = "blocks.{}.hook_normalized_resid_post"


def needed(surface: HookedModel) -> list[Site]:
    """Returns the sites that `components` reads."""
    last = Site("resid_post", surface.n_layers - 1)
    sites = (*_PARTS, *(_SUMS if surface.post_norm else (last,)))
    return [site for site in sites if site.hook(0) in surface.hooks]


def streams(surface: HookedModel) -> dict[str, Site]:
    """Returns the residual streams that are read out, by name: before the first layer and after each."""
    ends = {
        f"layer {layer}": Site(_LAYER_OUTPUT.format(layer))
        if surface.post_norm
        else Site("resid_post", layer)
        for layer in range(surface.n_layers)
    }
    return {"embed": Site("resid_pre", 0)} | ends


def components(surface: HookedModel, seen: Activations, edited: bool) -> dict[str, Tensor]:
    """Returns each component's part of the last residual stream [batch pos d_model], in the order they are added.

    Norms on the way are treated as linear maps, with their scales fixed at those of this run.
    """
    stream = _Stream(surface, seen, edited)
    stream.normalise("embed", None)
    for layer in range(surface.n_layers):
        stream.add_attention(layer)
        if Site("mlp_out", layer).hook() in seen:
            stream.normalise("resid_mid", layer)
            stream.parts[f"mlp_out.{layer}"] = seen[Site("mlp_out", layer)]
        if layer < surface.n_layers - 1:
            stream.normalise("resid_post", layer)
    stream.attribute_remainder(seen[Site("resid_post", surface.n_layers - 1)])
    if "edits" in stream.parts:
        stream.parts["edits"] = stream.parts.pop("edits")  # moves it to the end
    return stream.parts


class _Stream:
    """The residual stream as the sum of its parts, followed through the layers."""

    def __init__(self, surface: HookedModel, seen: Activations, edited: bool) -> None:
        self.surface, self.seen, self.edited = surface, seen, edited
        if torch.is_autocast_enabled(seen["embed"].device.type):
            raise CircuitsError(
                "lens: under torch.autocast the parts are rounded and do not sum to the stream; call it outside"
            )
        # Buffers too: processed weights of a bridge are partly held in them.
        self.weights = surface.model.state_dict()
        self.projections = Projections.of(surface)
        self.shape = seen["embed"].shape
        self.parts = {
            name: seen[name].expand(self.shape)
            for name in ("embed", "pos_embed")
            if Site(name).hook() in seen
        }
        # Squares [batch pos d_model] of what is rounded in the parts; adding them up rounds, too.
        wide = torch.promote_types(seen["embed"].dtype, torch.float32)
        self.rounded = torch.zeros(self.shape, dtype=wide, device=seen["embed"].device)

    def attribute_remainder(self, stream: Tensor) -> None:
        """Attributes the part of the stream that no component has added to "edits"."""
        parts = torch.stack(list(self.parts.values()))
        remainder = stream - parts.sum(0)
        # Entries are compared one by one, because some may be far larger than all others.
        terms = (self.rounded + sum_terms(parts)).sqrt().clamp(min=torch.finfo(stream.dtype).tiny)
        if bool((remainder.abs() <= units(stream.dtype, bridged=False) * terms).all()):
            return
        if not self.edited:
            raise CircuitsError(
                "lens: the residual stream of this model is not the sum of its embeddings, heads and MLPs; "
                "it, or a hook on it, adds something of its own"
            )
        self.parts["edits"] = self.parts.pop("edits", 0) + remainder

    def normalise(self, site: str, layer: int | None) -> None:
        """Divides every part by the norm of the stream at a site, and lists the norm's bias as a part."""
        path = self.surface.stream_norm(site, layer)
        if path is None:
            return
        stream = (
            torch.stack(list(self.parts.values())).sum(0) if layer is None else self.seen[Site(site, layer)]
        )
        self.attribute_remainder(stream)
        scale, bias = scale_of(stream, True, True, eps(self.surface)), self.weights[f"{path}.b"]
        norm = FrozenNorm(True, scale, self.weights[f"{path}.w"], bias)
        self.rounded = norm.squares(
            self.rounded, torch.stack(list(self.parts.values())), self.surface.bridged
        )
        self.parts = {name: norm.linear(part) for name, part in self.parts.items()}
        name = path.split(".")[-1]
        self.parts[name if layer is None else f"{name}.{layer}"] = bias.expand(self.shape)

    def add_attention(self, layer: int) -> None:
        """Adds the output of each head of a layer, and their common biases."""
        z = self.seen[Site("z", layer)]
        weight, bias = self.projections.outward("z", layer)
        out = weight.detach().unflatten(0, z.shape[2:])
        added = {str(Head(layer, head)): z[:, :, head] @ out[head] for head in range(z.shape[2])}
        if bias is not None:
            added[f"b_O.{layer}"] = bias.detach().expand(self.shape)
        products = product_terms(z.flatten(2), weight.detach())
        path = self.surface.sublayer_norm("attn_out", layer)
        if path is not None:
            heads = torch.stack(list(added.values()))
            norm = FrozenNorm.of(self.surface, path, heads.sum(0))
            products = norm.squares(products, heads, self.surface.bridged)
            added = {name: norm.linear(part) for name, part in added.items()}
            if norm.shift is not None:
                added[f"{path.split('.')[-1]}.{layer}"] = norm.shift.expand(self.shape)
        self.parts |= added
        self.rounded = self.rounded + products
