"""Sums of coordinates modulo a number, and the share of an activation or of logits that their waves carry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._clusters import THRESHOLD, Clusters, check_threshold
from circuits.harmonics import cos_sin, products


@dataclass(frozen=True)
class CosineFit:
    """Logits, fitted by α_0 + Σ_k α_k cos(w_k (r - c)), w_k = 2πk/q; see `ModularSum.cosines`.

    Attributes:
        by_difference: the mean logit of class c = r - d mod q, [d], d = 0..q-1: all that a function of r - c can
            explain.
        difference: r - c mod q of each input and class.
        logits: what is fitted. float64.
    """

    by_difference: Float[Tensor, " difference"]
    difference: Int[Tensor, "input class"]
    logits: Float[Tensor, "input class"]

    @cached_property
    def coefficients(self) -> Float[Tensor, " frequency"]:
        """α_k, k = 0..q/2, in logits; k = 0 is the mean."""
        period = len(self.by_difference)
        d = torch.arange(period)
        k = torch.arange(period // 2 + 1)
        waves = ((k[:, None] * d) % period).double().mul(2 * math.pi / period).cos()
        return waves @ self.by_difference / waves.square().sum(1)

    def plot(self, keys: Iterable[int] = ()) -> Any:
        """A plotly figure: the coefficient of each frequency, as bars; `keys` are marked."""
        from circuits.figures.components import cosines_figure

        return cosines_figure(self.coefficients, len(self.by_difference), keys)

    def fitted(self, keys: Iterable[int]) -> Float[Tensor, "input class"]:
        """The mean and the cosines of some frequencies."""
        period = len(self.by_difference)
        d = torch.arange(period)
        curve = self.coefficients[0].expand(period).clone()
        for key in keys:
            curve += self.coefficients[key] * ((key * d) % period).double().mul(2 * math.pi / period).cos()
        return curve[self.difference]

    def explained(self, keys: Iterable[int], of: str = "all") -> float:
        """Of the variance of the logits over inputs and classes, the share that cosines of some frequencies explain.

        Args:
            of: "all", about the mean of all; "classes", about each input's own mean over the classes, which no softmax
                sees. 0 where there is no variance.
        """
        centre = self.logits.mean(1, keepdim=True) if of == "classes" else self.logits.mean()
        whole = float((self.logits - centre).square().mean())
        period = len(self.by_difference)
        kept = sum(
            float(self.coefficients[key]) ** 2 * (1.0 if 2 * key == period else 0.5) for key in set(keys)
        )
        return kept / whole if whole > 0 else 0.0


#: Of the norm of a function of mean square 1: what is below it lies in the span of the others.
_DEPENDENT = 1e-6


@dataclass(frozen=True)
class ModularSum:
    """The sum r = Σ mᵢ·xᵢ mod q at each of some inputs: what a model of modular arithmetic answers.

        answer = fourier.ModularSum(grid.coordinates(), (1, 1), 113)
        answer.restricted(logits, keys), answer.excluded(logits, keys)

    Attributes:
        coordinates: x, whole numbers [input coordinate], of all inputs on which shares are to be taken.
        coefficients: m.
        period: q. A wave of frequency k, 1 ≤ k ≤ q/2, is cos or sin of w·r, w = 2πk/q. On the complete grid of p^m
            inputs the waves of q = p are orthonormal, as in Nanda et al. 2023. Where q does not divide p they are not,
            nor is their mean 0; so shares are taken in the span of the waves, made orthonormal and orthogonal to the
            constant. What waves have in common with the constant stays with the constant.
    """

    coordinates: Shaped[Tensor, "input coordinate"]
    coefficients: tuple[int, ...]
    period: int

    def __post_init__(self) -> None:
        if self.coordinates.is_floating_point() or not all(isinstance(m, int) for m in self.coefficients):
            raise CircuitsError(
                f"ModularSum: coordinates and coefficients are whole numbers; got {self.coordinates.dtype} and "
                f"{list(self.coefficients)}"
            )
        shape = list(self.coordinates.shape)
        if len(shape) != 2 or shape[1] != len(self.coefficients) or self.period < 2:
            raise CircuitsError(
                f"ModularSum: coordinates [input coordinate] with a coefficient for each, and a period from 2; got "
                f"{shape}, {len(self.coefficients)} coefficients, period {self.period}"
            )

    @cached_property
    def terms(self) -> Int[Tensor, "input coordinate"]:
        """mᵢ·xᵢ mod q."""
        return self.coordinates.long() * torch.tensor(self.coefficients) % self.period

    @cached_property
    def remainders(self) -> Int[Tensor, " input"]:
        """r."""
        return self.terms.sum(1) % self.period

    @property
    def frequencies(self) -> tuple[int, ...]:
        """1 .. q/2."""
        return tuple(range(1, self.period // 2 + 1))

    def waves(self, key: int) -> Float[Tensor, "input wave"]:
        """cos and sin of w·r, of mean square 1 (over a period); of k = q/2 only the cosine."""
        return cos_sin(self.remainders, self._checked([key])[0], self.period)

    def directions(self, keys: Sequence[int]) -> Float[Tensor, "input direction"]:
        """An orthonormal basis of the waves of some frequencies, orthogonal to the constant."""
        return _orthonormal([self.waves(key) for key in self._checked(keys)])

    def block(self, keys: Sequence[int]) -> Float[Tensor, "input direction"]:
        """The same of all products over the coordinates of {1, cos w·mᵢxᵢ, sin w·mᵢxᵢ}: for two, 8 per frequency."""
        return _orthonormal([products(self.terms, key, self.period) for key in self._checked(keys)])

    def restricted(
        self, logits: Float[Tensor, "input class"], keys: Sequence[int]
    ) -> Float[Tensor, "input class"]:
        """Each class's mean over the inputs and its share in the waves of the keys: the logits of the restricted loss.

        Nanda et al. 2023 (arXiv:2301.05217), section 5.1, with their code's two directions per key, and no product
        across frequencies.
        """
        logits = logits.double()
        return logits.mean(0) + share(logits, self.directions(keys))

    def excluded(
        self, logits: Float[Tensor, "input class"], keys: Sequence[int]
    ) -> Float[Tensor, "input class"]:
        """The logits without that share: those of the excluded loss. The means stay."""
        return logits.double() - share(logits, self.directions(keys))

    def clusters(
        self, neurons: Float[Tensor, "input neuron"], threshold: float | int = THRESHOLD
    ) -> Clusters:
        """Each neuron with the frequency whose block explains most of its variance, by least squares.

        On the complete grid of q values per coordinate `fourier.clusters`; this is for any modulus on any grid.
        """
        check_threshold(threshold)
        centred = neurons.double() - neurons.double().mean(0)
        whole = centred.square().sum(0)
        powers = [(self.block([key]).T @ centred).square().sum(0) for key in self.frequencies]
        shares = torch.where(whole > 0, torch.stack(powers) / torch.where(whole > 0, whole, 1.0), 0.0)
        best = shares.max(0)
        found = torch.where(best.values > 0, best.indices, -1)
        return Clusters(self.frequencies, found, best.values, float(threshold))

    def cosines(self, logits: Float[Tensor, "input class"]) -> CosineFit:
        """The logits of classes c = 0..q-1 as a sum of cos(w(r - c)) over frequencies, by least squares.

        Nanda et al. 2023, section 4.2. Over all pairs of an input and a class, r - c takes each value equally often,
        whatever q is, so that the cosines are orthogonal and each coefficient is a mean.
        """
        if logits.shape != (len(self.remainders), self.period):
            raise CircuitsError(
                f"ModularSum.cosines: logits [input class] of {len(self.remainders)} inputs and classes 0-"
                f"{self.period - 1}, in this order; got {list(logits.shape)}"
            )
        logits = logits.double()
        # Of an input with answer r: at c the difference r - c, and, the other way round, at d the class r - d.
        difference = (self.remainders[:, None] - torch.arange(self.period)) % self.period
        return CosineFit(logits.gather(1, difference).mean(0), difference, logits)

    def plot(self) -> Any:
        """A plotly figure: the sum at each input, of two coordinates; else how many inputs have each sum."""
        from circuits.figures.components import sum_figure

        return sum_figure(self.coordinates, self.remainders, self.coefficients, self.period)

    def _checked(self, keys: Sequence[int]) -> list[int]:
        found = list(dict.fromkeys(keys))
        if not found or not all(isinstance(key, int) and 1 <= key <= self.period // 2 for key in found):
            raise CircuitsError(
                f"ModularSum: keys are frequencies from 1 to {self.period // 2} for period {self.period}; got "
                f"{list(keys)}"
            )
        return found


def share(
    values: Float[Tensor, " input *feature"], directions: Float[Tensor, "input direction"]
) -> Float[Tensor, " input *feature"]:
    """The projection of values on orthonormal directions, float64."""
    flat = values.double().reshape(len(values), -1)
    return (directions @ (directions.T @ flat)).reshape(values.shape)


def regression(
    values: Float[Tensor, "input feature"], regressors: Float[Tensor, "input regressor"]
) -> Float[Tensor, "input feature"]:
    """What a constant and the regressors make of each feature, by least squares, float64."""
    mean = values.double().mean(0)
    return mean + share(values.double() - mean, _orthonormal([regressors.double()]))


def variance_explained(
    values: Float[Tensor, " input *feature"], regressors: Float[Tensor, "input regressor"]
) -> Float[Tensor, "*feature"]:
    """Of the variance of each feature over the inputs, the share that the regressors and a constant explain (R²).

    By least squares, in float64; 0 for a feature that does not vary.
    """
    values = values.double()
    centred = values - values.mean(0)
    whole = centred.square().sum(0)
    explained = share(centred, _orthonormal([regressors.double()])).square().sum(0)
    return torch.where(whole > 0, explained / torch.where(whole > 0, whole, 1.0), 0.0)


def _orthonormal(functions: Sequence[Tensor]) -> Tensor:
    """An orthonormal basis of some functions [input function], less the constant."""
    constant = torch.ones(len(functions[0]), 1, dtype=torch.float64)
    together = torch.cat([constant, *functions], 1)
    basis, triangle = torch.linalg.qr(together)
    independent = triangle.diagonal().abs() > _DEPENDENT * together.norm(dim=0)
    independent[0] = False
    return basis[:, independent]
