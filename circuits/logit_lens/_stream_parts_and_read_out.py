"""The parts of the residual stream under norms whose scale is held, and the read-out that follows them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.intervene_run_cache import Activations
from circuits.model.head_and_mlp_projections import Projections
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site

#: Whether a norm centres, and whether it divides: LayerNorm, an RMS norm, none.
_KINDS = ((True, True), (False, True), (False, False))
#: Units in the last place, of the terms of a sum, by which what is the model's own may differ from what it computes.
_UNITS = 16


def rounding_tolerance(dtype: torch.dtype, bridged: bool) -> float:
    """Returns the largest difference, relative to the terms of a sum, that counts as rounding."""
    # The RMS norm of a bridge computes in single precision, whatever the precision of the model.
    return _UNITS * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if bridged else 0.0)


def _norm_weights(hooked: HookedModel, path: str) -> tuple[Tensor | None, Tensor | None]:
    """Returns the weight and the bias of a norm, as far as it has them."""
    # The state_dict is used, because some classes hold an untrained bias in a buffer, as bridges do processed weights.
    known = hooked.model.state_dict()
    weight = known.get(f"{path}.w", known.get(f"{path}.weight"))
    return weight, known.get(f"{path}.b", known.get(f"{path}.bias"))


@dataclass(frozen=True)
class Norm:
    """LayerNorm, an RMS norm or none: with its scale held, a linear map of the parts of a stream, plus `shift`."""

    centred: bool
    normed: bool
    eps: float
    gain: Tensor | float  # [d_model]
    shift: Tensor | None  # [d_model]

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def scale(self, stream: Tensor) -> Tensor | float:
        """Returns what the norm of a whole stream divides by, [batch pos 1]."""
        return (self.centre(stream).square().mean(-1, keepdim=True) + self.eps).sqrt() if self.normed else 1.0

    def apply_at_scale(self, part: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the norm of a part of a stream of this scale, without `shift`."""
        return self.centre(part) / scale * self.gain

    def rounding_sizes(self, stream: Tensor) -> Tensor:
        """Returns the size [batch pos d_model] of what is rounded in the norm of a stream.

        Where a mean is subtracted, the largest entry of the stream counts in each.
        """
        sizes = (self.centre(stream).abs() + stream.abs().amax(-1, keepdim=True)) / self.scale(stream)
        sizes = sizes * torch.as_tensor(self.gain).abs()
        return sizes if self.shift is None else sizes + self.shift.abs()

    @classmethod
    def candidates(cls, hooked: HookedModel, gain: Tensor | None, shift: Tensor | None) -> list[Norm]:
        """Returns what a norm with this weight and bias may be; it multiplies by the weight, or 1 more (Gemma)."""
        small = float(getattr(hooked.model.cfg, "eps", 1e-5))
        # Copies, as the model may change before contributions are read.
        gains: list[Tensor | float] = [1.0] if gain is None else [gain.detach().clone(), 1 + gain.detach()]
        return [cls(*kind, small, one, shift) for kind, one in product(_KINDS, gains)]

    @classmethod
    def fit(cls, hooked: HookedModel, path: str, x: Tensor) -> Norm:
        """Returns the norm at `path`: the kind that makes of `x` what the module makes itself."""
        module, (gain, shift) = hooked.model.get_submodule(path), _norm_weights(hooked, path)
        with torch.no_grad():
            output: Tensor = module(x)

        def error_in_roundings(norm: Norm) -> float:
            predicted = norm.apply_at_scale(x, norm.scale(x)) + (0.0 if shift is None else shift)
            rounding = rounding_tolerance(x.dtype, hooked.bridged) * norm.rounding_sizes(x).clamp(min=1e-30)
            return float(((predicted - output).abs() / rounding).max())

        best = min(cls.candidates(hooked, gain, shift), key=error_in_roundings)
        if not error_in_roundings(best) <= 1:
            raise CircuitsError(
                f"lens: {path} is neither LayerNorm nor RMS norm, so the heads before it have no share of what it adds"
            )
        return best


@dataclass(frozen=True)
class ReadOut:
    """The final norm and unembedding: with the scale held, a linear map of a part of the residual stream, plus a
    constant.
    """

    norm: Norm
    weight: Tensor  # [d_model out]
    constant: Tensor  # [out]
    soft_cap: float | None
    bridged: bool

    def share_of_output(self, part: Tensor, scale: Tensor | float) -> Tensor:
        """Applies the linear map to a part of the residual stream."""
        return self.norm.apply_at_scale(part, scale) @ self.weight

    def output(self, stream: Tensor) -> Tensor:
        """Returns what the model would put out if the residual stream ended as this one."""
        return self.apply_soft_cap(self.share_of_output(stream, self.norm.scale(stream)) + self.constant)

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def error_in_roundings(self, stream: Tensor, output: Tensor) -> float:
        """Returns the difference from the model's own output, as a multiple of what rounding may cause."""
        predicted, wide = self.output(stream), torch.promote_types(stream.dtype, torch.float32)
        # At each of d_model additions the sum by then is rounded: on average half of all products.
        products = self.norm.rounding_sizes(stream).to(wide).square() @ self.weight.to(wide).square()
        terms = (
            products * (len(self.weight) / 2) + self.constant.to(wide).nan_to_num(posinf=0, neginf=0).square()
        )
        rounding = rounding_tolerance(stream.dtype, self.bridged) * terms.sqrt().clamp(min=1e-30)
        # Entries that are equal count as 0 even if infinite, as with a bias that rules an output out.
        difference = (predicted - output).abs().masked_fill(predicted == output, 0)
        return float((difference / rounding).max())

    def check_output(self, stream: Tensor, output: Tensor) -> None:
        """Refuses a model whose output on a stream is another one."""
        # The comparison is negated so that NaN counts as a difference.
        if not self.error_in_roundings(stream, output) <= 1:
            raise CircuitsError(
                "lens: the output of this model is not a linear function of its normalised residual stream (a norm "
                "other than LayerNorm and RMS, or a read-out of its own), so contributions would not add up"
            )

    @classmethod
    def fit(cls, hooked: HookedModel, stream: Tensor, output: Tensor, normed: bool = True) -> ReadOut:
        """Builds the read-out of the last residual stream, with the kind of norm that reproduces the model's output
        best, or without a norm.
        """
        norm = hooked.post_norm_path_after("resid_post", hooked.n_layers - 1) or "ln_final" if normed else ""
        weights = hooked.model.state_dict()
        weight = weights.get("unembed.W_U")
        weight = weights["unembed.weight"].T.clone() if weight is None else weight.clone()
        bias = weights.get("unembed.b_U", weights.get("unembed.bias", weight.new_zeros(weight.shape[1])))
        gain, shift = _norm_weights(hooked, norm)
        constant = bias.clone() if shift is None else bias + shift @ weight
        cap = float(getattr(hooked.model.cfg, "output_logits_soft_cap", None) or 0)
        kinds = [
            cls(one, weight, constant, cap if cap > 0 else None, hooked.bridged)
            for one in Norm.candidates(hooked, gain, None)
        ]
        return min(kinds, key=lambda one: one.error_in_roundings(stream[:1], output[:1]))


_PARTS = tuple(Site(name) for name in ("embed", "pos_embed", "z", "mlp_out"))
_SUMS = tuple(Site(name) for name in ("resid_mid", "resid_post"))
#: The hook of the normalised output of a layer of a post-norm model.
_LAYER_OUTPUT = "blocks.{}.hook_normalized_resid_post"


def sites_to_cache(hooked: HookedModel) -> list[Site]:
    """Returns the sites that `component_contributions` reads."""
    last = Site("resid_post", hooked.n_layers - 1)
    sites = (*_PARTS, *(_SUMS if hooked.post_norm else (last,)))
    return [site for site in sites if site.hook(0) in hooked.hooks]


def readout_sites(hooked: HookedModel) -> dict[str, Site]:
    """Returns the residual streams that are read out, by name: before the first layer and after each."""
    ends = {
        f"layer {layer}": Site(_LAYER_OUTPUT.format(layer)) if hooked.post_norm else Site("resid_post", layer)
        for layer in range(hooked.n_layers)
    }
    return {"embed": Site("resid_pre", 0)} | ends


def component_contributions(hooked: HookedModel, seen: Activations, edited: bool) -> dict[str, Tensor]:
    """Returns each component's part of the last residual stream [batch pos d_model], in the order they are added.

    Norms on the way are treated as linear maps, with their scales fixed at those of this run.
    """
    stream = _StreamDecomposition(hooked, seen, edited)
    stream.normalise("embed", None)
    for layer in range(hooked.n_layers):
        stream.add_attention(layer)
        if Site("mlp_out", layer).hook() in seen:
            stream.normalise("resid_mid", layer)
            stream.parts[f"mlp_out.{layer}"] = seen[Site("mlp_out", layer)]
        if layer < hooked.n_layers - 1:
            stream.normalise("resid_post", layer)
    stream.attribute_remainder_to_edits(seen[Site("resid_post", hooked.n_layers - 1)])
    if "edits" in stream.parts:
        stream.parts["edits"] = stream.parts.pop("edits")  # moves it to the end
    return stream.parts


class _StreamDecomposition:
    """The residual stream as the sum of its parts, followed through the layers."""

    def __init__(self, hooked: HookedModel, seen: Activations, edited: bool) -> None:
        self.hooked, self.seen, self.edited = hooked, seen, edited
        if torch.is_autocast_enabled(seen["embed"].device.type):
            raise CircuitsError(
                "lens: under torch.autocast the parts are rounded and do not sum to the stream; call it outside"
            )
        self.projections = Projections.of_model(hooked)
        self.shape = seen["embed"].shape
        self.parts = {
            name: seen[name].expand(self.shape) for name in hooked.embeddings if Site(name).hook() in seen
        }

    def attribute_remainder_to_edits(self, stream: Tensor) -> None:
        """Attributes the part of the stream that no component has added to "edits"."""
        parts = torch.stack(list(self.parts.values()))
        remainder = stream - parts.sum(0)
        # What is rounded in a part is as large as its largest entry, in whichever entry.
        sizes = parts.abs().amax(-1, keepdim=True).sum(0)
        if bool((remainder.abs() <= rounding_tolerance(stream.dtype, self.hooked.bridged) * sizes).all()):
            return
        if not self.edited:
            raise CircuitsError(
                "lens: the residual stream of this model is not the sum of its embeddings, heads and MLPs; "
                "it, or a hook on it, adds something of its own"
            )
        self.parts["edits"] = self.parts.pop("edits", 0) + remainder

    def normalise(self, site: str, layer: int | None) -> None:
        """Divides every part by the norm of the stream at a site, and lists the norm's bias as a part."""
        path = self.hooked.post_norm_path_after(site, layer)
        if path is None:
            return
        whole = torch.stack(list(self.parts.values())).sum(0)
        stream = whole if layer is None else self.seen[Site(site, layer)]
        self.attribute_remainder_to_edits(stream)
        norm, *_ = Norm.candidates(self.hooked, *_norm_weights(self.hooked, path))
        self._apply_norm_to_parts_in_place(norm, self.parts, norm.scale(stream), path, layer)

    def add_attention(self, layer: int) -> None:
        """Adds the output of each head of a layer, and their common biases."""
        z = self.seen[Site("z", layer)]
        weight, bias = self.projections.output_weight_and_bias("z", layer)
        out = weight.detach().unflatten(0, z.shape[2:])
        added = {str(Head(layer, head)): z[:, :, head] @ out[head] for head in range(z.shape[2])}
        if bias is not None:
            added[f"b_O.{layer}"] = bias.detach().expand(self.shape)
        path = self.hooked.sublayer_norm_path("attn_out", layer)
        if path is not None:
            whole = torch.stack(list(added.values())).sum(0)
            norm = Norm.fit(self.hooked, path, whole)
            self._apply_norm_to_parts_in_place(norm, added, norm.scale(whole), path, layer)
        self.parts |= added

    def _apply_norm_to_parts_in_place(
        self, norm: Norm, parts: dict[str, Tensor], scale: Tensor | float, path: str, layer: int | None
    ) -> None:
        """Replaces parts by what a norm of this scale makes of them, and adds its bias."""
        parts |= {name: norm.apply_at_scale(part, scale) for name, part in parts.items()}
        if norm.shift is not None:
            name = path.split(".")[-1]
            parts[name if layer is None else f"{name}.{layer}"] = norm.shift.expand(self.shape)
