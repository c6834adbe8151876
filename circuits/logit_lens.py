"""What the residual stream says so far: read-outs after each layer, and what each component adds to the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import Activations, intervene, run
from circuits.interventions.base import Intervention
from circuits.interventions.custom import edit
from circuits.model.heads import Head
from circuits.model.sites import Site
from circuits.model.surface import Surface
from circuits.validate import read_run_tokens


@dataclass(frozen=True)
class Lens:
    """What `lens` found; every tensor is [batch pos out], as the model's output.

    Attributes:
        output: the model's own.
        readouts: "embed", "layer 0", "layer 1", ...: the read-out (final norm and unembedding) of the residual stream
            before the first layer and after each. The last equals `output`. In a post-norm model it is the unembedding
            alone, of what the embeddings and each layer hand on, normalised as they do it.
        contributions: "embed", "pos_embed", "L0H0", ..., "b_O.0", "mlp_out.0", ..., in the order they are added: what
            each adds to the output directly, along the residual stream, with the scale of every norm on the way held at
            its value in this run: that of the final norm; in a post-norm model those after each sum, whose biases are
            "ln_embed", "ln1.0", "ln2.0", .... What interventions put into the residual stream itself is "edits".
        constant: [out], what the read-out adds by itself (biases). Contributions and constant add up to `output`.
    """

    output: Tensor
    readouts: Mapping[str, Tensor]
    contributions: Mapping[str, Tensor]
    constant: Tensor

    def plot(self, positions: Any = None) -> Any:
        """A plotly figure: how large each component's direct contribution is, and how far each read-out is from the
        output, both as root mean squares over examples, outputs and `positions` (default: all), in units of the output.
        """
        from circuits.figures.components import lens_figure

        return lens_figure(self.contributions, self.readouts, self.output, positions)

    def without(self, name: str) -> Tensor:
        """The output without one component's direct contribution."""
        return self.output - self.contributions[name]


def lens(model: Any, tokens: Any, *interventions: Intervention) -> Lens:
    """The logit lens (nostalgebraist 2020) and direct logit attribution (Elhage et al. 2021), for any read-out.

    Read-outs are made by the model itself, which is run once more per layer with its last residual stream replaced.
    Contributions need a final norm (LayerNorm, RMS or none) and a linear unembedding: a model whose output they do
    not add up to (soft caps) is refused. Interventions, if any, are in force. Eval mode, no gradients.
    """
    surface = Surface.of(model)
    tokens = read_run_tokens(tokens, "lens")
    surface.check_inputs(tokens, "lens: tokens")
    layers = range(surface.n_layers)
    ends = [
        Site(_HANDED_ON.format(layer)) if surface.post_norm else Site("resid_post", layer) for layer in layers
    ]
    streams = {"embed": Site("resid_pre", 0)} | {f"layer {layer}": end for layer, end in enumerate(ends)}
    last = ends[-1]
    wanted = (*_PARTS, *(_SUMS if surface.post_norm else ()))
    parts = [site for site in wanted if site.hook(0) in surface.hooks]
    # One block around all of it: weights that an intervention puts in are also those that contributions are made with.
    with intervene(model, *interventions):
        output, seen = run(model, tokens, cache=[*parts, *streams.values()])
        readouts = {
            name: run(model, tokens, edit(last, _constantly(seen[stream])))
            for name, stream in streams.items()
        }
        added = _added(surface, seen, bool(interventions))
        weights = _ReadOut.of(surface, seen[Site("resid_post", layers[-1])], output)
        contributions = {name: weights.linear(part) for name, part in added.items()}
    return Lens(output, readouts, contributions, weights.constant)


_PARTS = tuple(Site(name) for name in ("embed", "pos_embed", "z", "mlp_out"))
_SUMS = tuple(Site(name) for name in ("resid_mid", "resid_post"))
#: What a layer of a post-norm model hands on.
_HANDED_ON = "blocks.{}.hook_normalized_resid_post"


def _added(surface: Surface, seen: Activations, edited: bool) -> dict[str, Tensor]:
    """What each component adds to the last residual stream [batch pos d_model], in order.

    Norms on the way there are linear maps, their scales held at those of this run.
    """
    weights = {name: value.detach() for name, value in surface.named_weights().items()}
    shape = seen["embed"].shape
    found = {name: seen[name].expand(shape) for name in ("embed", "pos_embed") if Site(name).hook() in seen}

    def settle(stream: Tensor) -> None:
        """What the stream has that no component has added is the edits'."""
        parts = torch.stack(list(found.values()))
        rest = stream - parts.sum(0)
        # By position: one of them may have entries that are larger than all that others are made of.
        largest = torch.maximum(parts.abs().amax((0, -1)), stream.abs().amax(-1))
        if bool((rest.abs().amax(-1) <= _share(stream.dtype) * largest).all()):
            return
        if not edited:
            raise CircuitsError(
                "lens: the residual stream of this model is not the sum of its embeddings, heads and MLPs; "
                "it, or a hook on it, adds something of its own"
            )
        found["edits"] = found.pop("edits", 0) + rest

    def normalise(site: str, layer: int | None) -> None:
        path = surface.stream_norm(site, layer)
        if path is None:
            return
        stream = torch.stack(list(found.values())).sum(0) if layer is None else seen[Site(site, layer)]
        settle(stream)
        centred = stream - stream.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + _eps(surface)).sqrt()
        for name, part in found.items():
            found[name] = (part - part.mean(-1, keepdim=True)) / scale * weights[f"{path}.w"]
        norm = path.split(".")[-1]
        found[norm if layer is None else f"{norm}.{layer}"] = weights[f"{path}.b"].expand(shape)

    normalise("embed", None)
    for layer in range(surface.n_layers):
        z = seen[Site("z", layer)]
        prefix = f"blocks.{layer}.attn"
        out = weights.get(f"{prefix}.W_O")
        if out is None:
            # A torch Linear: [d_model, head * d_head].
            out = weights[f"{prefix}.o.weight"].T.reshape(z.shape[2], z.shape[3], -1)
        for head in range(z.shape[2]):
            found[Head(layer, head).label] = z[:, :, head] @ out[head]
        bias = weights.get(f"{prefix}.b_O", weights.get(f"{prefix}.o.bias"))
        if bias is not None:
            found[f"b_O.{layer}"] = bias.expand(shape)
        if Site("mlp_out", layer).hook() in seen:
            normalise("resid_mid", layer)
            found[f"mlp_out.{layer}"] = seen[Site("mlp_out", layer)]
        if layer < surface.n_layers - 1:
            normalise("resid_post", layer)
    settle(seen[Site("resid_post", surface.n_layers - 1)])
    if "edits" in found:
        found["edits"] = found.pop("edits")  # the last
    return found


def _eps(surface: Surface) -> float:
    return float(getattr(surface.model.cfg, "eps", 1e-5))


@dataclass(frozen=True)
class _ReadOut:
    """The final norm and unembedding, as a linear map of a part of the residual stream plus a constant."""

    centred: bool
    scale: Tensor | float  # [batch pos 1], of the whole residual stream
    weight: Tensor  # [d_model out], the norm's own weight folded in
    constant: Tensor  # [out]

    def linear(self, part: Tensor) -> Tensor:
        if self.centred:
            part = part - part.mean(-1, keepdim=True)
        return (part / self.scale) @ self.weight

    @classmethod
    def of(cls, surface: Surface, stream: Tensor, output: Tensor) -> _ReadOut:
        """Which norm it is, is told by which one gives the model's own output."""
        # Of the state_dict, as some classes hold a bias that is not trained in a buffer.
        weights = surface.model.state_dict()
        weight = weights.get("unembed.W_U")
        if weight is None:
            weight = weights["unembed.weight"].T
        bias = weights.get("unembed.b_U", weights.get("unembed.bias", weight.new_zeros(weight.shape[1])))
        norm = surface.stream_norm("resid_post", surface.n_layers - 1) or "ln_final"
        gain = weights.get(f"{norm}.w", weights.get(f"{norm}.weight"))
        shift = weights.get(f"{norm}.b", weights.get(f"{norm}.bias"))
        constant = bias.clone() if shift is None else bias + shift @ weight
        folded = weight if gain is None else gain[:, None] * weight
        eps = _eps(surface)
        best, smallest = None, torch.inf
        for centred, normed in ((True, True), (False, True), (False, False)):
            centre = stream - stream.mean(-1, keepdim=True) if centred else stream
            scale = (centre.square().mean(-1, keepdim=True) + eps).sqrt() if normed else 1.0
            found = cls(centred, scale, folded, constant)
            made = found.linear(stream) + constant
            # Equal ones too may be infinite: a bias that rules an output out.
            off = float((made - output).abs().masked_fill(made == output, 0).max())
            if off < smallest:
                best, smallest = found, off
        # The RMS norm of a bridge computes in single precision, whatever the model's.
        if best is None or smallest > _allowed(output, at_least=1e-6):
            raise CircuitsError(
                "lens: the output of this model is not a linear function of its normalised residual stream (a soft "
                "cap, or a norm other than LayerNorm and RMS), so contributions would not add up"
            )
        return best


def _allowed(whole: Tensor, at_least: float = 0.0) -> float:
    """What rounding may leave in a tensor where large terms cancel."""
    return max(_share(whole.dtype), at_least) * float(whole[whole.isfinite()].abs().max().clamp(min=1e-30))


def _share(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    # Half precision has no room for ten thousand roundings: that would allow anything.
    return 1e4 * eps if eps < 1e-6 else 16 * eps


def _constantly(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda activation: value
