"""Norms whose scale is held at that of one run, and how far rounding may carry what is computed with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel

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
