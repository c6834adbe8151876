"""Says how far estimates of edges can be doubted, and which are to be measured.

The rule, for every edge from a sender to a receiver:

1. The change of the sender, source − base, is carried to what the receiver reads, and queries and keys on to the head's
   z with the softmax computed anew (AtP*: Kramár et al. 2024, arXiv:2403.00745). Where either is no
   larger than the rounding of a sum of d_model terms, the edge does nothing: no doubt.
2. The effect is estimated with the gradient at base, on the way and at source. Where these estimates are not all zero,
   to the same rounding, and agree to it, the metric is linear there: no doubt.
3. Else the doubt is the larger of (a) the spread of these estimates, and (b) the edge's share of the change of what the
   receiver reads (of z, for queries and keys; at most 1), of the metric's whole change from base to source: what the
   edge might do where gradients vanish.

The budget goes to the largest doubts. Nothing in the rule is a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from circuits.model.sites import KINDS
from circuits.patch._gradients import Run, vector_jacobian_products

#: Largest difference of a pattern or z from the one computed by hand, relative to the largest entry. Some models
#: compute the softmax in float32, whatever their own precision.
_SAME = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF = 5e-2


@dataclass(frozen=True)
class Arrival:
    """What arrives of the changes of all senders at one receiver.

    Attributes:
        z: what they make of z of its heads, [sender batch pos head d_head]; None for others than queries and keys.
        heads: these heads.
        sizes: the first six fields of `Evidence`, [sender field].
    """

    z: Tensor | None
    heads: slice
    sizes: np.ndarray


class Extremes:
    """Collects the largest and smallest of several estimates [sender n], and the largest sum of absolute terms."""

    def __init__(self) -> None:
        self.found: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, estimates: Tensor, terms: Tensor, elsewhere: Tensor) -> None:
        """Adds estimates but for those `elsewhere` [sender 1]."""
        given = (
            estimates.masked_fill(elsewhere, -torch.inf),
            -estimates.masked_fill(elsewhere, torch.inf),
            terms.masked_fill(elsewhere, 0.0),
        )
        found = given if self.found is None else self.found
        high, low, size = (torch.maximum(one, other) for one, other in zip(found, given, strict=True))
        self.found = high, low, size

    def summed(self) -> np.ndarray:
        """Returns spread, largest |estimate| and terms, summed over examples, [sender 3]."""
        assert self.found is not None
        high, low, size = self.found
        rows = [high + low, torch.maximum(high, low), size]
        return torch.stack([row.sum(1) for row in rows], 1).cpu().numpy()


@dataclass(frozen=True)
class Evidence:
    """What is known of edges beside their estimates; each array is [edge], summed over examples.

    Attributes:
        arrived: squared size of the change at the receiver.
        whole: squared size of what the receiver reads, at base and at source.
        moved: squared size of the change of all that the receiver reads, from base to source.
        z_arrived, z_whole, z_moved: the same of z, of queries and keys; else NaN.
        spread: largest minus smallest estimate.
        largest: the largest |estimate|.
        terms: sum of the absolute terms of an estimate, the largest. Where a change is orthogonal to the gradient the
            estimate vanishes, and these terms do not.
        gap: absolute change of the metric from base to source.
    """

    arrived: np.ndarray
    whole: np.ndarray
    moved: np.ndarray
    z_arrived: np.ndarray
    z_whole: np.ndarray
    z_moved: np.ndarray
    spread: np.ndarray
    largest: np.ndarray
    terms: np.ndarray
    gap: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Evidence:
        """Reads evidence [edge field], in the order of the attributes."""
        return cls(*np.stack(list(parts)).T)

    def doubts(self, rounding: float) -> np.ndarray:
        """Returns the doubt of every edge, in units of the metric summed over examples: see the top of this file."""
        recomputed = ~np.isnan(self.z_arrived)
        nothing = self.arrived <= rounding**2 * self.whole
        nothing |= recomputed & (self.z_arrived <= rounding**2 * self.z_whole)
        linear = (self.largest > rounding * self.terms) & (self.spread <= rounding * self.terms)
        arrived = np.where(recomputed, self.z_arrived, self.arrived)
        moved = np.where(recomputed, self.z_moved, self.moved)
        share = np.sqrt(np.divide(arrived, moved, out=np.ones_like(arrived), where=arrived < moved))
        return np.where(nothing | linear, 0.0, np.maximum(self.spread, share * self.gap))


def rounding_of(dtype: torch.dtype, terms: int) -> float:
    """Returns the largest relative rounding error of a sum of so many terms."""
    return terms * torch.finfo(dtype).eps


def carried(out: Tensor, x: Tensor, changes: Tensor) -> Tensor | None:
    """Carries changes of x [sender ...] forward to `out`, to first order; None where out does not depend on x.

    The Jacobian-vector product is computed by backward passes: the vector-Jacobian product is linear in its vector, and
    its gradient there is the Jacobian-vector product.
    """
    vector = torch.zeros_like(out, requires_grad=True)
    with torch.enable_grad():
        (vjp,) = torch.autograd.grad(out, x, vector, create_graph=True, allow_unused=True)
    if vjp is None:
        return None
    return vector_jacobian_products(vjp, vector, changes.to(x.dtype)).detach()


def attention_hooks(layer: int) -> dict[str, str]:
    """Returns the hooks between queries, keys and z, by site."""
    return {name: KINDS[name].hook.format(layer) for name in ("q", "k", "scores", "pattern", "v", "z")}


def recomputed_z(run: Run, layer: int, site: str, changes: Tensor) -> Tensor | None:
    """Returns what changes of all queries ("q") or keys ("k") of a layer make of z: [sender batch pos head d_head].

    Scores follow to first order (exactly, where nothing but a rotation stands between), the softmax is computed anew.
    None where z is not the values weighed by the softmax of the scores.
    """
    q_or_k, scores, pattern, v, z = (
        run.activations[attention_hooks(layer)[name]] for name in (site, "scores", "pattern", "v", "z")
    )
    values = v.detach().repeat_interleave(z.shape[2] // v.shape[2], 2)
    weights = _softmax(scores.detach())
    if not (_same(weights, pattern) and _same(_weighed(weights, values), z)):
        return None
    score_changes = carried(scores, q_or_k, changes)
    if score_changes is None:
        return None
    return torch.stack(
        [_weighed(_softmax(scores.detach() + change) - weights, values) for change in score_changes]
    )


def _softmax(scores: Tensor) -> Tensor:
    # A position that sees nothing has no pattern.
    return scores.softmax(-1).nan_to_num(0.0)


def _weighed(weights: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("b h q k, b k h d -> b q h d", weights, values)


def _same(computed: Tensor, own: Tensor) -> bool:
    own = own.detach().nan_to_num(0.0)
    error = (computed - own).abs().max()
    return bool(error <= _SAME.get(own.dtype, _HALF) * own.abs().max().clamp_min(torch.finfo(own.dtype).tiny))
