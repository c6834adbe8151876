"""Logits as a sum of cosines of the difference between the answer and the class."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
