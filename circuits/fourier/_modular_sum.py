"""Analyses sums modulo a number, and the part of activations or logits that the sums' Fourier components explain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from circuits.arguments import is_whole, parse_frequencies
from circuits.errors import CircuitsError
from circuits.fourier_waves import cos_sin, wave_products
from circuits.frozen_tensors_and_positions import parse_numbers


@dataclass(frozen=True, repr=False)
class CosineFit:
    """A fit of logits by α_0 + Σ_k α_k cos(w_k (r - c)), w_k = 2πk/q; see `ModularSum.cosines`.

    Attributes:
        by_difference: [d], d = 0..q-1, the mean logit of class c = r - d mod q, the best fit by any function of r - c.
        difference: r - c mod q of each input and class.
        logits: the logits that are fitted, float64.
    """

    by_difference: Float[Tensor, " difference"]
    difference: Int[Tensor, "input class"]
    logits: Float[Tensor, "input class"]

    def __repr__(self) -> str:
        inputs, classes = self.logits.shape
        return f"CosineFit of logits [{inputs} inputs × {classes} classes]: .coefficients, .explained(), .fitted()"

    @cached_property
    def _cosine_table(self) -> Float[Tensor, "frequency difference"]:
        """Returns cos(w_k d), k = 0..q/2, on the device of the logits."""
        period = len(self.by_difference)
        d = torch.arange(period, device=self.by_difference.device)
        k = d[: period // 2 + 1, None]
        return (k * d % period).double().mul(2 * math.pi / period).cos()

    @cached_property
    def coefficients(self) -> Float[Tensor, " frequency"]:
        """Returns α_k, k = 0..q/2, in logits; k = 0 is the mean."""
        return self._cosine_table @ self.by_difference / self._cosine_table.square().sum(1)

    def fitted(self, keys: Iterable[int]) -> Float[Tensor, "input class"]:
        """Returns the fit by the mean and the cosines of some frequencies."""
        curve = self.coefficients[0].expand(len(self.by_difference)).clone()
        for key in parse_frequencies(keys, len(self.by_difference), "CosineFit", 0):
            curve += self.coefficients[key] * self._cosine_table[key]
        return curve[self.difference]

    def explained(self, keys: Iterable[int]) -> float:
        """Returns the share of the logits' variance over inputs and classes that cosines of some frequencies explain.

        The share is 0 where there is no variance.
        """
        # Less one of them, so that equal logits have no variance, and not that of their mean's rounding.
        logits = self.logits - self.logits[0, 0]
        total = float((logits - logits.mean()).square().mean())
        period = len(self.by_difference)
        explained_sum = sum(
            float(self.coefficients[key]) ** 2 * (1.0 if 2 * key == period else 0.5)
            for key in parse_frequencies(keys, period, "CosineFit", 0)
        )
        return explained_sum / total if total > 0 else 0.0


#: Functions are dependent on each other where a combination of them is below this share of their norms.
_DEPENDENT = 1e-6
#: A function whose spread is below this share of its norm is constant, up to rounding in float64.
_CONSTANT = 1e-13


@dataclass(frozen=True)
class ModularSum:
    """The sum r = Σ mᵢ·xᵢ mod q at each of some inputs, the right answer of a task in modular arithmetic.

        answer = fourier.ModularSum(grid.coordinates(), (1, 1), 113)
        answer.restricted(logits, keys), answer.excluded(logits, keys)

    Attributes:
        coordinates: x, whole numbers [input coordinate], for all inputs over which shares are computed.
        coefficients: m.
        period: q. A wave of frequency k, 1 ≤ k ≤ q/2, is cos or sin of w·r, w = 2πk/q. On the complete grid of p^m
            inputs the waves of q = p are orthonormal, as in Nanda et al. 2023. Where q does not divide p they are not,
            nor is their mean 0; so shares are computed in the span of the waves, orthonormalised and orthogonal to the
            constant: the part that waves share with the constant counts as the constant's.
    """

    coordinates: Shaped[Tensor, "input coordinate"]
    coefficients: tuple[int, ...]
    period: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "coordinates", parse_numbers(self.coordinates, "ModularSum: coordinates"))
        shape, numbers = list(self.coordinates.shape), self.coefficients
        whole = not self.coordinates.is_floating_point() and all(map(is_whole, numbers))
        if not whole or shape[1:] != [len(numbers)] or self.period < 2:
            raise CircuitsError(
                f"ModularSum: coordinates [input coordinate] with a coefficient for each, all whole numbers, and a "
                f"period from 2; got {self.coordinates.dtype} {shape}, {list(numbers)} and period {self.period}"
            )

    @cached_property
    def terms(self) -> Int[Tensor, "input coordinate"]:
        """Returns mᵢ·xᵢ mod q."""
        coefficients = torch.tensor([int(m) for m in self.coefficients], device=self.coordinates.device)
        return self.coordinates.long() * coefficients % self.period

    @cached_property
    def remainders(self) -> Int[Tensor, " input"]:
        """Returns the sum r of each input."""
        return self.terms.sum(1) % self.period

    @property
    def frequencies(self) -> tuple[int, ...]:
        """Returns all frequencies, 1 to q/2."""
        return tuple(range(1, self.period // 2 + 1))

    def waves(self, key: int) -> Float[Tensor, "input wave"]:
        """Returns cos and sin of w·r, of mean square 1 (over a period); for k = q/2 only the cosine."""
        return cos_sin(self.remainders, self._checked_keys([key])[0], self.period)

    def directions(self, keys: Sequence[int]) -> Float[Tensor, "input direction"]:
        """Returns an orthonormal basis of the waves of some frequencies, orthogonal to the constant."""
        return _orthonormalise_centred([self.waves(key) for key in self._checked_keys(keys)])

    def block(self, keys: Sequence[int]) -> Float[Tensor, "input direction"]:
        """Returns an orthonormal basis of the products over coordinates of {1, cos w·mᵢxᵢ, sin w·mᵢxᵢ}: 8 per frequency
        for two coordinates.
        """
        products = [wave_products(self.terms, key, self.period) for key in self._checked_keys(keys)]
        return _orthonormalise_centred(products)

    def restricted(
        self, logits: Float[Tensor, "input class"], keys: Sequence[int]
    ) -> Float[Tensor, "input class"]:
        """Returns the logits of the restricted loss: each class's mean plus its projection on the keys' waves.

        Nanda et al. 2023 (arXiv:2301.05217), section 5.1, with their code's two directions per key, and no product
        across frequencies.
        """
        logits = logits.double()
        return logits.mean(0) + share(logits, self.directions(keys))

    def excluded(
        self, logits: Float[Tensor, "input class"], keys: Sequence[int]
    ) -> Float[Tensor, "input class"]:
        """Returns the logits of the excluded loss: all but the projection on the keys' waves. The means stay."""
        return logits.double() - share(logits, self.directions(keys))

    def cosines(self, logits: Float[Tensor, "input class"]) -> CosineFit:
        """Fits the logits of classes c = 0..q-1 by a sum of cos(w(r - c)) over frequencies, by least squares.

        Nanda et al. 2023, section 4.2. Over all pairs of an input and a class, r - c takes each value equally often,
        whatever q is, so that the cosines are orthogonal and each coefficient is a mean.
        """
        if logits.shape != (len(self.remainders), self.period):
            raise CircuitsError(
                f"ModularSum.cosines: logits [input class] of {len(self.remainders)} inputs and classes 0-"
                f"{self.period - 1}, in this order; got {list(logits.shape)}"
            )
        logits = logits.double()
        # For an input with answer r, entry c is the difference r - c; as an index, entry d is also the class r - d.
        remainders = self.remainders.to(logits.device)
        difference = (remainders[:, None] - torch.arange(self.period, device=logits.device)) % self.period
        return CosineFit(logits.gather(1, difference).mean(0), difference, logits)

    def _checked_keys(self, keys: Sequence[int]) -> tuple[int, ...]:
        return parse_frequencies(keys, self.period, "ModularSum")


def share(
    values: Float[Tensor, " input *feature"], directions: Float[Tensor, "input direction"]
) -> Float[Tensor, " input *feature"]:
    """Returns the projection of values on orthonormal directions, float64 (how large: `variance_explained`)."""
    flat = values.double().reshape(len(values), -1)
    directions = directions.to(flat.device)
    return (directions @ (directions.T @ flat)).reshape(values.shape)


def regression(
    values: Float[Tensor, "input feature"], regressors: Float[Tensor, "input regressor"]
) -> Float[Tensor, "input feature"]:
    """Returns the least-squares fit of each feature by a constant and the regressors, float64."""
    centred = _centred(values)
    return values.double() - centred + share(centred, _orthonormalise_centred([regressors]))


def variance_explained(
    values: Float[Tensor, " input *feature"], regressors: Float[Tensor, "input regressor"]
) -> Float[Tensor, "*feature"]:
    """Returns the share of each feature's variance over inputs that the regressors and a constant explain (R²).

    The fit is by least squares, in float64; the share is 0 for a feature that does not vary.
    """
    centred = _centred(values)
    total = centred.square().sum(0)
    explained = share(centred, _orthonormalise_centred([regressors])).square().sum(0)
    return torch.where(total > 0, explained / torch.where(total > 0, total, 1.0), 0.0)


def _centred(values: Tensor) -> Tensor:
    """Returns values less their mean over inputs, float64."""
    # Less one of them first, so that equal values have no variance, and not that of their mean's rounding.
    values = values.double() - values[:1].double()
    return values - values.mean(0)


def _orthonormalise_centred(functions: Sequence[Tensor]) -> Tensor:
    """Returns an orthonormal basis of the span of some functions [input function], orthogonal to the constant."""
    together = torch.cat([one.double() for one in functions], 1)
    centred = _centred(together)
    norms = centred.norm(dim=0)
    varies = norms > _CONSTANT * together.norm(dim=0)
    basis, triangle = torch.linalg.qr(centred[:, varies] / norms[varies])
    rest = triangle.diagonal().abs()
    if len(rest) == triangle.shape[1] and bool((rest > _DEPENDENT).all()):
        return basis
    # A function that depends on those before it has any direction at all as its column, which may hold a part of those
    # after it: the columns that are left would not span them.
    within, sizes, _ = torch.linalg.svd(triangle, full_matrices=False)
    return basis @ within[:, sizes > _DEPENDENT]
