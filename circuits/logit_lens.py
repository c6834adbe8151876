"""The logit lens and direct logit attribution: read-outs after each layer, and each component's contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import Activations, intervene, run
from circuits.interventions.base import Intervention
from circuits.interventions.custom import edit
from circuits.model.heads import Head
from circuits.model.inputs import read_prompts
from circuits.model.projections import Projections
from circuits.model.prompts import Prompts
from circuits.model.sites import Site
from circuits.model.surface import Surface
from circuits.tensors import Snapshot, parse_positions, select_positions


@dataclass(frozen=True, repr=False)
class Lens:
    """The result of `lens`; every tensor is [batch pos out], as the model's output, unless stated.

    Attributes:
        output: the model's own output.
        readouts: "embed", "layer 0", "layer 1", ...: the read-out (final norm and unembedding) of the residual stream
            before the first layer and after each. The last equals `output`. In a post-norm model it is the unembedding
            alone, applied to the normalised output of the embeddings and of each layer.
        contributions: "embed", "pos_embed", "0.0", ..., "b_O.0", "mlp_out.0", ..., in the order they are added: each
            component's direct contribution to the output, along the residual stream, with the scale of every norm on
            the way fixed at its value in this run: that of the final norm; of the norm that attention's output passes
            before it is added, where there is one (Gemma 2, OLMo 2), so that heads have a share of it; in a post-norm
            model also those after each sum, whose biases are "ln_embed", "ln1.0", "ln2.0", .... "edits" is the
            contribution of interventions on the residual stream itself.
        constant: [out], the biases of the read-out. Contributions and constant add up to `output`; where logits pass a
            soft cap, to what comes to the cap.
        soft_cap: the bound c of a soft cap, output = c·tanh(logits / c); None where there is none.
        prompts: the inputs; at their padding no tensor has a meaning.
    """

    output: Tensor
    readouts: Mapping[str, Tensor]
    contributions: Mapping[str, Tensor]
    constant: Tensor
    soft_cap: float | None = None
    prompts: Prompts | None = None

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.output.shape))
        contributions, last = list(self.contributions), list(self.readouts)[-1]
        return (
            f"Lens of output [{shape}]: .readouts of embed to {last}, .contributions of {len(contributions)} "
            f"components, {contributions[0]} to {contributions[-1]}"
        )

    def plot(self, positions: Any = None) -> Any:
        """Returns a plotly figure of each component's direct contribution and each read-out's distance from the output.

        Both are root mean squares over examples, outputs and `positions` (default: all but padding), which count in
        each prompt's own tokens, in units of the output.
        """
        from circuits.figures.components import lens_figure

        prompts, chosen = self.prompts, parse_positions(positions, "plot, positions")
        padded = prompts is not None and prompts.padded
        kept = prompts.real if prompts is not None else torch.ones(self.output.shape[:2], dtype=torch.bool)
        where = ""
        if isinstance(chosen, Snapshot):
            if chosen.tensor.shape not in (kept.shape, (1, *kept.shape[1:]), kept.shape[1:]):
                raise CircuitsError(
                    f"plot, positions: a mask {list(kept.shape)} is needed; got {list(chosen.tensor.shape)}"
                )
            kept = kept & chosen.tensor
        elif chosen is not None:
            kept = kept & select_positions(chosen, kept.shape[1], "plot, positions", kept if padded else None)
            names = None if prompts is None else prompts.labels()
            longest = int(kept.shape[1]) if prompts is None else int(prompts.lengths.max())
            # A position that counts from the end is another one in each prompt.
            own = [at if at >= 0 or padded else at + longest for at in chosen]
            where = ", ".join(str(at) if names is None or at < 0 else names[at] for at in own)
        return lens_figure(self.contributions, self.readouts, self.output, kept, where)

    def without(self, name: str) -> Tensor:
        """Returns the output without one component's direct contribution."""
        if name not in self.contributions:
            raise CircuitsError(f"lens: no contribution {name!r}; there are {', '.join(self.contributions)}")
        if self.soft_cap is None:
            return self.output - self.contributions[name]
        parts = [part for other, part in self.contributions.items() if other != name]
        return _capped(sum(parts, self.constant), self.soft_cap)


def lens(model: Any, tokens: Any, *interventions: Intervention) -> Lens:
    """Computes the logit lens (nostalgebraist 2020) and direct logit attribution (Elhage et al. 2021).

    `tokens` are ids [batch pos], or anything that `prompts` takes.
    Read-outs are computed by the model itself, which is run once more per layer with its last residual stream replaced.
    Contributions need norms that are LayerNorm, RMS or none, and a linear unembedding, but for a soft cap of its
    output: a model is refused if they do not add up. Interventions, if any, are in force. Eval mode, no gradients.
    """
    surface = Surface.of(model)
    prompts = read_prompts(surface, tokens, "lens")
    surface.check_prompts(prompts, "lens: tokens")
    layers = range(surface.n_layers)
    layer_outputs = [
        Site(_LAYER_OUTPUT.format(layer)) if surface.post_norm else Site("resid_post", layer)
        for layer in layers
    ]
    streams = {"embed": Site("resid_pre", 0)} | {
        f"layer {layer}": end for layer, end in enumerate(layer_outputs)
    }
    last = layer_outputs[-1]
    sites = (*_PARTS, *(_SUMS if surface.post_norm else ()))
    parts = [site for site in sites if site.hook(0) in surface.hooks]
    # One block spans everything, so that contributions use the weights that interventions put in.
    with intervene(model, *interventions):
        output, seen = run(model, prompts, cache=[*parts, *streams.values()])
        readouts = {
            name: run(model, prompts, edit(last, _constant_function(seen[stream])))
            for name, stream in streams.items()
        }
        components = _components(surface, seen, bool(interventions))
        read_out = _ReadOut.of(surface, seen[Site("resid_post", layers[-1])], output)
        contributions = {name: read_out.linear(part) for name, part in components.items()}
    return Lens(output, readouts, contributions, read_out.constant, _soft_cap(surface), prompts)


_PARTS = tuple(Site(name) for name in ("embed", "pos_embed", "z", "mlp_out"))
_SUMS = tuple(Site(name) for name in ("resid_mid", "resid_post"))
#: The hook of the normalised output of a layer of a post-norm model.
_LAYER_OUTPUT = "blocks.{}.hook_normalized_resid_post"


def _components(surface: Surface, seen: Activations, edited: bool) -> dict[str, Tensor]:
    """Returns each component's part of the last residual stream [batch pos d_model], in order.

    Norms on the way are treated as linear maps, with their scales fixed at those of this run.
    """
    # Buffers too: processed weights of a bridge are partly held in them.
    weights = surface.model.state_dict()
    projections = Projections.of(surface)
    shape = seen["embed"].shape
    components = {
        name: seen[name].expand(shape) for name in ("embed", "pos_embed") if Site(name).hook() in seen
    }

    # Squares [batch pos d_model] of what is rounded in the components; adding them up rounds, too.
    wide = torch.promote_types(seen["embed"].dtype, torch.float32)
    rounded = torch.zeros(shape, dtype=wide, device=seen["embed"].device)

    def attribute_remainder(stream: Tensor) -> None:
        """Attributes the part of the stream that no component has added to "edits"."""
        parts = torch.stack(list(components.values()))
        remainder = stream - parts.sum(0)
        # Entries are compared one by one, because some may be far larger than all others.
        terms = (rounded + _sum_terms(parts)).sqrt().clamp(min=torch.finfo(stream.dtype).tiny)
        if bool((remainder.abs() <= _units(stream.dtype, bridged=False) * terms).all()):
            return
        if not edited:
            raise CircuitsError(
                "lens: the residual stream of this model is not the sum of its embeddings, heads and MLPs; "
                "it, or a hook on it, adds something of its own"
            )
        components["edits"] = components.pop("edits", 0) + remainder

    def normalise(site: str, layer: int | None) -> None:
        """Divides every component by the norm of the stream at a site, and lists the norm's bias as a component."""
        nonlocal rounded
        path = surface.stream_norm(site, layer)
        if path is None:
            return
        stream = torch.stack(list(components.values())).sum(0) if layer is None else seen[Site(site, layer)]
        attribute_remainder(stream)
        centred = stream - stream.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + _eps(surface)).sqrt()
        norm = _FrozenNorm(True, scale, weights[f"{path}.w"], weights[f"{path}.b"])
        rounded = norm.squares(rounded, torch.stack(list(components.values())), surface.bridged)
        for name, part in components.items():
            components[name] = norm.linear(part)
        name = path.split(".")[-1]
        components[name if layer is None else f"{name}.{layer}"] = weights[f"{path}.b"].expand(shape)

    normalise("embed", None)
    for layer in range(surface.n_layers):
        z = seen[Site("z", layer)]
        weight, bias = projections.outward("z", layer)
        out = weight.detach().unflatten(0, z.shape[2:])
        added = {str(Head(layer, head)): z[:, :, head] @ out[head] for head in range(z.shape[2])}
        if bias is not None:
            added[f"b_O.{layer}"] = bias.detach().expand(shape)
        products = _product_terms(z.flatten(2), weight.detach())
        path = surface.sublayer_norm("attn_out", layer)
        if path is not None:
            heads = torch.stack(list(added.values()))
            norm = _FrozenNorm.of(surface, path, heads.sum(0))
            products = norm.squares(products, heads, surface.bridged)
            added = {name: norm.linear(part) for name, part in added.items()}
            if norm.shift is not None:
                added[f"{path.split('.')[-1]}.{layer}"] = norm.shift.expand(shape)
        components |= added
        rounded = rounded + products
        if Site("mlp_out", layer).hook() in seen:
            normalise("resid_mid", layer)
            components[f"mlp_out.{layer}"] = seen[Site("mlp_out", layer)]
        if layer < surface.n_layers - 1:
            normalise("resid_post", layer)
    attribute_remainder(seen[Site("resid_post", surface.n_layers - 1)])
    if "edits" in components:
        components["edits"] = components.pop("edits")  # moves it to the end
    return components


def _eps(surface: Surface) -> float:
    return float(getattr(surface.model.cfg, "eps", 1e-5))


#: Units in the last place by which a read-out that is the model's may differ from its output.
_UNITS = 16


def _units(dtype: torch.dtype, bridged: bool) -> float:
    """Returns the largest difference, relative to the terms of a sum, that counts as rounding."""
    # The RMS norm of a bridge computes in single precision, whatever the precision of the model.
    return _UNITS * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if bridged else 0.0)


def _sum_terms(parts: Tensor) -> Tensor:
    """Returns the sum [batch pos d_model] of squares of all that is rounded in a sum of parts [part batch pos d_model].

    That is each part, and at each addition the sum by then. Roundings add up as independent errors do.
    """
    # At least in single precision, as squares overflow earlier.
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    return parts.square().sum(0) + parts.cumsum(0).square().sum(0)


def _product_terms(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum [batch pos out] of squares of all that is rounded in x [batch pos in] @ weight [in out].

    That is the sum of the products by then, at each of `in` additions: on average half of them.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).square() @ weight.to(wide).square() * max(1.0, len(weight) / 2)


def _largest(x: Tensor, centred: bool, scale: Tensor | float) -> Tensor:
    """Returns the size of the terms of each entry of a norm of x, which subtracts the mean where it centres."""
    centre = x - x.mean(-1, keepdim=True) if centred else x
    return (centre.abs() + x.abs().amax(-1, keepdim=True)) / scale


def _soft_cap(surface: Surface) -> float | None:
    cap = float(getattr(surface.model.cfg, "output_logits_soft_cap", None) or 0)
    return cap if cap > 0 else None


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _norm_kinds(x: Tensor, eps: float) -> Iterator[tuple[bool, Tensor | float]]:
    """Yields (whether it centres, its scale at x) of LayerNorm, of an RMS norm, and of none."""
    for centred, normed in ((True, True), (False, True), (False, False)):
        centre = x - x.mean(-1, keepdim=True) if centred else x
        yield centred, (centre.square().mean(-1, keepdim=True) + eps).sqrt() if normed else 1.0


def _gains(weight: Tensor | None) -> list[Tensor | float]:
    """Returns what a norm of this weight may multiply by: the weight, or 1 more (Gemma)."""
    return [1.0] if weight is None else [weight, 1 + weight]


@dataclass(frozen=True)
class _FrozenNorm:
    """A norm whose scale is fixed at that of one input: a linear map of the input's parts, plus `shift`."""

    centred: bool
    scale: Tensor | float  # [batch pos 1]
    gain: Tensor | float  # [d_model]
    shift: Tensor | None  # [d_model]

    def linear(self, part: Tensor) -> Tensor:
        if self.centred:
            part = part - part.mean(-1, keepdim=True)
        return part / self.scale * self.gain

    def squares(self, rounded: Tensor, parts: Tensor, bridged: bool) -> Tensor:
        """Returns the squares of what is rounded in the norm of a sum of parts, and in the norm of each part.

        Args:
            rounded: [batch pos d_model], the squares of what was rounded in the parts.
            parts: [part batch pos d_model].
        """
        before = rounded + _sum_terms(parts)
        if self.centred:
            before = before + before.mean(-1, keepdim=True)
        factor = torch.as_tensor(self.gain).to(before.dtype) / torch.as_tensor(self.scale).to(before.dtype)
        x = parts.sum(0)
        whole = self.rounding(x, bridged) / _units(x.dtype, bridged=False)
        own = torch.stack([whole, *map(self.terms, parts)]).to(before.dtype)
        return before * factor.square() + own.square().sum(0)

    def terms(self, part: Tensor) -> Tensor:
        """Returns the size [batch pos d_model] of the terms that the norm of a part is computed of."""
        return _largest(part, self.centred, self.scale) * torch.as_tensor(self.gain).abs()

    def rounding(self, x: Tensor, bridged: bool) -> Tensor:
        """Returns the error [batch pos d_model] that rounding may cause in the norm of x."""
        terms = self.terms(x) + (0.0 if self.shift is None else self.shift.abs())
        return _units(x.dtype, bridged) * terms.clamp(min=1e-30)

    @classmethod
    def of(cls, surface: Surface, path: str, x: Tensor) -> _FrozenNorm:
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
        for (centred, scale), one in product(_norm_kinds(x, _eps(surface)), _gains(gain)):
            candidate = cls(centred, scale, one, shift)
            predicted = candidate.linear(x) + (0.0 if shift is None else shift)
            error = float(((predicted - output).abs() / candidate.rounding(x, surface.bridged)).max())
            if error < smallest:
                best, smallest = candidate, error
        if best is None or not smallest <= 1:
            raise CircuitsError(
                f"lens: {path} is neither LayerNorm nor RMS norm, so the heads before it have no share of what it adds"
            )
        return best


@dataclass(frozen=True)
class _ReadOut:
    """The final norm and unembedding, as a linear map of a part of the residual stream plus a constant."""

    centred: bool
    scale: Tensor | float  # [batch pos 1], of the whole residual stream
    weight: Tensor  # [d_model out], the norm's own weight folded in
    constant: Tensor  # [out]
    bridged: bool

    def linear(self, part: Tensor) -> Tensor:
        """Applies the linear map to a part of the residual stream."""
        if self.centred:
            part = part - part.mean(-1, keepdim=True)
        return (part / self.scale) @ self.weight

    def rounding(self, stream: Tensor) -> Tensor:
        """Returns the error [batch pos out] that rounding may cause in the read-out of a stream.

        In the norm a mean is subtracted, so that the largest entry of the stream counts in each.
        """
        products = _product_terms(_largest(stream, self.centred, self.scale), self.weight)
        terms = products + self.constant.to(products.dtype).nan_to_num(posinf=0, neginf=0).square()
        return _units(stream.dtype, self.bridged) * terms.sqrt().clamp(min=1e-30)

    @classmethod
    def of(cls, surface: Surface, stream: Tensor, output: Tensor) -> _ReadOut:
        """Builds the read-out with LayerNorm, RMS norm or none, whichever reproduces the model's output best."""
        # The state_dict is used, because some classes hold an untrained bias in a buffer.
        weights = surface.model.state_dict()
        weight = weights.get("unembed.W_U")
        if weight is None:
            weight = weights["unembed.weight"].T
        bias = weights.get("unembed.b_U", weights.get("unembed.bias", weight.new_zeros(weight.shape[1])))
        norm = surface.stream_norm("resid_post", surface.n_layers - 1) or "ln_final"
        gain = weights.get(f"{norm}.w", weights.get(f"{norm}.weight"))
        shift = weights.get(f"{norm}.b", weights.get(f"{norm}.bias"))
        constant = bias.clone() if shift is None else bias + shift @ weight
        best, smallest = None, torch.inf
        for (centred, scale), one in product(_norm_kinds(stream, _eps(surface)), _gains(gain)):
            folded = one[:, None] * weight if isinstance(one, Tensor) else weight
            candidate = cls(centred, scale, folded, constant, surface.bridged)
            predicted = _capped(candidate.linear(stream) + constant, _soft_cap(surface))
            # Entries that are equal count as 0 even if infinite, as with a bias that rules an output out.
            difference = (predicted - output).abs().masked_fill(predicted == output, 0)
            error = float((difference / candidate.rounding(stream)).max())
            if error < smallest:
                best, smallest = candidate, error
        # The comparison is negated so that NaN counts as a difference.
        if best is None or not smallest <= 1:
            raise CircuitsError(
                "lens: the output of this model is not a linear function of its normalised residual stream (a norm "
                "other than LayerNorm and RMS, or a read-out of its own), so contributions would not add up"
            )
        return best


def _constant_function(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda activation: value
