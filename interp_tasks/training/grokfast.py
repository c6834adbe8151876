"""Grokfast: amplify the slow part of the gradient (Lee et al. 2024)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

QUEUE = "queue"


class GradientFilter(ABC):
    """g ← g + λ · (a mean of past gradients), in place, before clipping and the optimiser's step."""

    @torch.no_grad()
    def __call__(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.add_slow_part(name, parameter.grad)

    @abstractmethod
    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        """Remembers the gradient of one parameter, and amplifies it in place."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Returns all that is remembered, by keys that begin with the parameter's name."""

    @abstractmethod
    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state` gave of one parameter; the keys are without its name."""


class GrokfastEMA(GradientFilter):
    """h ← α h + (1 − α) g;  g ← g + λ h.

    The gain is 1 + λ for a constant gradient and 1 + λ (1 − α) / (1 + α) for one that alternates in sign.
    The MIIII paper's equation 13 prints another recurrence; its code computes this one.
    """

    def __init__(self, alpha: float, lamb: float, start: Literal["first-gradient", "zero"]) -> None:
        self.alpha = alpha
        self.lamb = lamb
        self.start = start
        self.averages: dict[str, Tensor] = {}

    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        if name not in self.averages:
            zero = self.start == "zero"
            self.averages[name] = torch.zeros_like(gradient) if zero else gradient.clone()
        average = self.averages[name].mul_(self.alpha).add_(gradient, alpha=1 - self.alpha)
        gradient.add_(average, alpha=self.lamb)

    def state(self) -> dict[str, Tensor]:
        return dict(self.averages)

    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.averages[name] = state[""]


class GrokfastMA(GradientFilter):
    """g ← g + λ · (mean of the last w gradients, this one included), from the w-th gradient on.

    The gain is 1 + λ for a constant gradient, and 1 for one that repeats after a divisor of w with mean 0. It keeps w
    gradients of every parameter. Their sum follows them by one addition and one subtraction a step, in float64, and
    is taken anew whenever the queue has gone round, so that rounding cannot pile up.
    """

    def __init__(self, window: int, lamb: float) -> None:
        self.window = window
        self.lamb = lamb
        #: ``[w, *shape]`` by parameter: gradient number t stands in row t mod w.
        self.queues: dict[str, Tensor] = {}
        #: float64, by parameter.
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        if name not in self.queues:
            self.queues[name] = gradient.new_zeros(self.window, *gradient.shape)
            self.sums[name] = torch.zeros_like(gradient, dtype=torch.float64)
            self.counts[name] = 0
        queue, total, row = self.queues[name], self.sums[name], self.counts[name] % self.window
        total += gradient
        total -= queue[row]
        queue[row] = gradient
        if row == self.window - 1:
            torch.sum(queue, 0, dtype=torch.float64, out=total)
        self.counts[name] += 1
        if self.counts[name] >= self.window:
            gradient.add_(total, alpha=self.lamb / self.window)

    def state(self) -> dict[str, Tensor]:
        averages = {}
        for name, queue in self.queues.items():
            averages[f"{name}/{QUEUE}"] = queue
            averages[f"{name}/sum"] = self.sums[name]
            averages[f"{name}/count"] = torch.tensor(self.counts[name])
        return averages

    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.queues[name], self.sums[name] = state[QUEUE], state["sum"]
        self.counts[name] = int(state["count"])
