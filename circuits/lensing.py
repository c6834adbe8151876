"""What the residual stream says so far: read-outs after each layer, and what each component adds to the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.applying import intervene
from circuits.arguments import read_run_tokens
from circuits.editing import edit
from circuits.errors import CircuitsError
from circuits.interventions import Intervention
from circuits.running import Activations, run
from circuits.selection import Head
from circuits.sites import Site
from circuits.surface import Surface


@dataclass(frozen=True)
class Lens:
    """What `lens` found; every tensor is [batch pos out], as the model's output.

    Attributes:
        output: the model's own.
        readouts: "embed", "layer 0", "layer 1", ...: the read-out (final norm and unembedding) of the residual stream
            before the first layer and after each. The last equals `output`.
        contributions: "embed", "pos_embed", "L0H0", ..., "b_O.0", "mlp_out.0", ..., in the order they are added: what
            each adds to the output directly, along the residual stream, with the final norm's scale held at its value
            in this run. What interventions put into the residual stream itself is "edits".
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
        from circuits.component_plots import lens_figure

        return lens_figure(self, positions)

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
    streams = {"embed": Site("resid_pre", 0)}
    streams |= {f"layer {layer}": Site("resid_post", layer) for layer in range(surface.n_layers)}
    last = Site("resid_post", surface.n_layers - 1)
    parts = [site for site in _PARTS if site.hook(0) in surface.hooks]
    # One block around all of it: weights that an intervention puts in are also those that contributions are made with.
    with intervene(model, *interventions):
        output, seen = run(model, tokens, cache=[*parts, *streams.values()])
        readouts = {
            name: run(model, tokens, edit(last, _constantly(seen[stream])))
            for name, stream in streams.items()
        }
        added = _added(surface, seen)
        weights = _ReadOut.of(surface, seen[last], output)
        contributions = {name: weights.linear(part) for name, part in added.items()}
        rest = seen[last] - torch.stack(list(added.values())).sum(0)
        if float(rest.abs().max()) > _allowed(seen[last]):
            if not interventions:
                raise CircuitsError(
                    "lens: the residual stream of this model is not the sum of its embeddings, heads and MLPs; "
                    "it, or a hook on it, adds something of its own"
                )
            contributions["edits"] = weights.linear(rest)
    return Lens(output, readouts, contributions, weights.constant)


_PARTS = tuple(Site(name) for name in ("embed", "pos_embed", "z", "mlp_out"))


def _added(surface: Surface, seen: Activations) -> dict[str, Tensor]:
    """What each component adds to the residual stream [batch pos d_model], in order."""
    weights = {name: value.detach() for name, value in surface.named_weights().items()}
    shape = seen["embed"].shape
    found = {name: seen[name].expand(shape) for name in ("embed", "pos_embed") if Site(name).hook() in seen}
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
            found[f"mlp_out.{layer}"] = seen[Site("mlp_out", layer)]
    return found


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
        gain = weights.get("ln_final.w", weights.get("ln_final.weight"))
        shift = weights.get("ln_final.b", weights.get("ln_final.bias"))
        constant = bias.clone() if shift is None else bias + shift @ weight
        folded = weight if gain is None else gain[:, None] * weight
        eps = float(getattr(surface.model.cfg, "eps", 1e-5))
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
    """What rounding may leave where large terms cancel."""
    eps = torch.finfo(whole.dtype).eps
    # Half precision has no room for ten thousand roundings: that would allow anything.
    share = max(1e4 * eps if eps < 1e-6 else 16 * eps, at_least)
    return share * float(whole[whole.isfinite()].abs().max().clamp(min=1e-30))


def _constantly(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda activation: value
