"""The parts of the residual stream under norms whose scale is held, and how far rounding may carry their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import Activations
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.projections import Projections
from circuits.model.sites import Site

#: Units in the last place by which a read-out that is the model's may differ from its output.
_UNITS = 16


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose scale is fixed at that of one input: a linear map of the input's parts, plus `shift`."""

    centred: bool
    scale: Tensor | float  # [batch pos 1]
    gain: Tensor | float  # [d_model]
    shift: Tensor | None  # [d_model]

    def linear(self, part: Tensor) -> Tensor:
        return centre(part, self.centred) / self.scale * self.gain

    def squares(self, rounded: Tensor, parts: Tensor, bridged: bool) -> Tensor:
        """Returns the squares of what is rounded in the norm of a sum of parts, and in the norm of each part.

        Args:
            rounded: [batch pos d_model], the squares of what was rounded in the parts.
            parts: [part batch pos d_model].
        """
        before = rounded + sum_terms(parts)
        if self.centred:
            before = before + before.mean(-1, keepdim=True)
        factor = torch.as_tensor(self.gain).to(before.dtype) / torch.as_tensor(self.scale).to(before.dtype)
        x = parts.sum(0)
        whole = self._rounding(x, bridged) / units(x.dtype, bridged=False)
        own = torch.stack([whole, *map(self._terms, parts)]).to(before.dtype)
        return before * factor.square() + own.square().sum(0)

    def _terms(self, part: Tensor) -> Tensor:
        """Returns the size [batch pos d_model] of the terms that the norm of a part is computed of."""
        return _largest(part, self.centred, self.scale) * torch.as_tensor(self.gain).abs()

    def _rounding(self, x: Tensor, bridged: bool) -> Tensor:
        """Returns the error [batch pos d_model] that rounding may cause in the norm of x."""
        terms = self._terms(x) + (0.0 if self.shift is None else self.shift.abs())
        return units(x.dtype, bridged) * terms.clamp(min=1e-30)

    @classmethod
    def of(cls, surface: HookedModel, path: str, x: Tensor) -> FrozenNorm:
        """Takes the norm at `path` for LayerNorm, RMS norm or none, whichever makes of `x` what it makes itself."""
        module: Any = surface.model.get_submodule(path)
        gain, shift = (
            next(
                (value.detach() for name in names if (value := getattr(module, name, None)) is not None), None
            )
            for names in (("w", "weight"), ("b", "bias"))
        )
        with torch.no_grad():
            output: Tensor = module(x)
        best, smallest = None, torch.inf
        for (centred, normed), one in product(_KINDS, _gains(gain)):
            candidate = cls(centred, scale_of(x, centred, normed, eps(surface)), one, shift)
            predicted = candidate.linear(x) + (0.0 if shift is None else shift)
            error = float(((predicted - output).abs() / candidate._rounding(x, surface.bridged)).max())
            if error < smallest:
                best, smallest = candidate, error
        if best is None or not smallest <= 1:
            raise CircuitsError(
                f"lens: {path} is neither LayerNorm nor RMS norm, so the heads before it have no share of what it adds"
            )
        return best


@dataclass(frozen=True)
class ReadOut:
    """The final norm and unembedding: with the scale held, a linear map of a part of the residual stream, plus a
    constant.
    """

    centred: bool
    normed: bool
    eps: float
    weight: Tensor  # [d_model out], the norm's own weight folded in
    constant: Tensor  # [out]
    soft_cap: float | None
    bridged: bool

    def scale(self, stream: Tensor) -> Tensor | float:
        """Returns the scale [batch pos 1] of the norm of a whole stream."""
        return scale_of(stream, self.centred, self.normed, self.eps)

    def linear(self, part: Tensor, scale: Tensor | float) -> Tensor:
        """Applies the linear map to a part of the residual stream."""
        return (centre(part, self.centred) / scale) @ self.weight

    def output(self, stream: Tensor) -> Tensor:
        """Returns what the model would put out if the residual stream ended as this one."""
        return self.capped(self.linear(stream, self.scale(stream)) + self.constant)

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def error(self, stream: Tensor, output: Tensor) -> float:
        """Returns the difference from the model's own output, as a multiple of what rounding may cause.

        In the norm a mean is subtracted, so that the largest entry of the stream counts in each.
        """
        scale, predicted = self.scale(stream), self.output(stream)
        products = product_terms(_largest(stream, self.centred, scale), self.weight)
        terms = products + self.constant.to(products.dtype).nan_to_num(posinf=0, neginf=0).square()
        rounding = units(stream.dtype, self.bridged) * terms.sqrt().clamp(min=1e-30)
        # Entries that are equal count as 0 even if infinite, as with a bias that rules an output out.
        difference = (predicted - output).abs().masked_fill(predicted == output, 0)
        return float((difference / rounding).max())

    def check(self, stream: Tensor, output: Tensor) -> None:
        """Refuses a model whose output on a stream is another one."""
        # The comparison is negated so that NaN counts as a difference.
        if not self.error(stream, output) <= 1:
            raise CircuitsError(
                "lens: the output of this model is not a linear function of its normalised residual stream (a norm "
                "other than LayerNorm and RMS, or a read-out of its own), so contributions would not add up"
            )

    @classmethod
    def of(cls, surface: HookedModel, stream: Tensor, output: Tensor, norm: str) -> ReadOut:
        """Builds the read-out with LayerNorm, RMS norm or none, whichever reproduces the model's output best.

        Args:
            norm: the path of the norm whose weight and bias it has; "": none.
        """
        # The state_dict is used, because some classes hold an untrained bias in a buffer.
        weights = surface.model.state_dict()
        weight = weights.get("unembed.W_U")
        if weight is None:
            weight = weights["unembed.weight"].T
        bias = weights.get("unembed.b_U", weights.get("unembed.bias", weight.new_zeros(weight.shape[1])))
        gain = weights.get(f"{norm}.w", weights.get(f"{norm}.weight"))
        shift = weights.get(f"{norm}.b", weights.get(f"{norm}.bias"))
        constant = bias.clone() if shift is None else bias + shift @ weight
        cap = float(getattr(surface.model.cfg, "output_logits_soft_cap", None) or 0)
        best: ReadOut | None = None
        smallest = torch.inf
        for (centred, normed), one in product(_KINDS, _gains(gain)):
            # A copy, as the model may change before contributions are read.
            folded = one[:, None] * weight if isinstance(one, Tensor) else weight.clone()
            candidate = cls(
                centred, normed, eps(surface), folded, constant, cap if cap > 0 else None, surface.bridged
            )
            error = candidate.error(stream[:1], output[:1])
            if best is None or error < smallest:
                best, smallest = candidate, error
        assert best is not None
        return best


# Whether a norm centres, and whether it divides: LayerNorm, an RMS norm, none.
_KINDS = ((True, True), (False, True), (False, False))


def centre(x: Tensor, centred: bool) -> Tensor:
    return x - x.mean(-1, keepdim=True) if centred else x


def scale_of(x: Tensor, centred: bool, normed: bool, small: float) -> Tensor | float:
    return (centre(x, centred).square().mean(-1, keepdim=True) + small).sqrt() if normed else 1.0


def eps(surface: HookedModel) -> float:
    return float(getattr(surface.model.cfg, "eps", 1e-5))


def _gains(weight: Tensor | None) -> Iterator[Tensor | float]:
    """Yields what a norm of this weight may multiply by: the weight, or 1 more (Gemma)."""
    yield from [1.0] if weight is None else [weight, 1 + weight]


def units(dtype: torch.dtype, bridged: bool) -> float:
    """Returns the largest difference, relative to the terms of a sum, that counts as rounding."""
    # The RMS norm of a bridge computes in single precision, whatever the precision of the model.
    return _UNITS * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if bridged else 0.0)


def sum_terms(parts: Tensor) -> Tensor:
    """Returns the sum [batch pos d_model] of squares of all that is rounded in a sum of parts [part batch pos d_model].

    That is each part, and at each addition the sum by then. Roundings add up as independent errors do.
    """
    # At least in single precision, as squares overflow earlier.
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    return parts.square().sum(0) + parts.cumsum(0).square().sum(0)


def product_terms(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum [batch pos out] of squares of all that is rounded in x [batch pos in] @ weight [in out].

    That is the sum of the products by then, at each of `in` additions: on average half of them.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).square() @ weight.to(wide).square() * max(1.0, len(weight) / 2)


def _largest(x: Tensor, centred: bool, scale: Tensor | float) -> Tensor:
    """Returns the size of the terms of each entry of a norm of x, which subtracts the mean where it centres."""
    return (centre(x, centred).abs() + x.abs().amax(-1, keepdim=True)) / scale


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
