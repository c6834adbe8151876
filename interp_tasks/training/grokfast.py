"""Grokfast: amplify the slow part of the gradient (Lee et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor


class GrokfastEMA:
    """h ← α h + (1 − α) g;  g ← g + λ h, in place on the gradients, before the optimiser's step.

    The gain is 1 + λ for a constant gradient and 1 + λ (1 − α) / (1 + α) for one that alternates in sign.
    The MIIII paper's equation 13 prints another recurrence; its code computes this one.
    """

    def __init__(self, alpha: float, lamb: float, start: Literal["first-gradient", "zero"]) -> None:
        self.alpha = alpha
        self.lamb = lamb
        self.start = start
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if name not in self.averages:
                zero = self.start == "zero"
                self.averages[name] = torch.zeros_like(gradient) if zero else gradient.clone()
            average = self.averages[name].mul_(self.alpha).add_(gradient, alpha=1 - self.alpha)
            gradient.add_(average, alpha=self.lamb)
