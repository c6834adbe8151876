"""Solves least squares and ridge regression from sums over entries, whose size does not grow with their number.

For features X [entry d] and targets Y [entry column], a linear fit and its squared error on the same entries depend
only on the sums X'X, X'Y, Σx, Σy and Σy². They are float64. Sums over parts of the data can be added and subtracted: a
cross-validation fold is left out by subtracting its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NormalEquations:
    """Sums over entries: gram X'X [d d], cross Y'X [column d], x Σx [d], y Σy [column], squares Σy² [column].

    Attributes:
        eps: the relative precision of the features, which enters the tolerance for the rank.
    """

    gram: Tensor
    cross: Tensor
    x: Tensor
    y: Tensor
    squares: Tensor
    entries: int = 0
    eps: float = 0.0

    @classmethod
    def empty(cls, width: int, columns: int, device: torch.device) -> NormalEquations:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(zeros(width, width), zeros(columns, width), zeros(width), zeros(columns), zeros(columns))

    def add(self, x: Tensor, eps: float) -> None:
        """Adds features [entry d], float64; `add_numbers` and `add_classes` add their targets."""
        self.gram += x.T @ x
        self.x += x.sum(0)
        self.entries += len(x)
        self.eps = max(self.eps, eps)

    def add_numbers(self, columns: slice, x: Tensor, y: Tensor) -> None:
        """Adds targets y [entry column], float64."""
        self.cross[columns] += y.T @ x
        self.y[columns] += y.sum(0)
        self.squares[columns] += y.square().sum(0)

    def add_classes(self, columns: slice, x: Tensor, y: Tensor) -> None:
        """Adds classes y [entry], each the index of its column, without forming the one-hot matrix."""
        self.cross[columns].index_add_(0, y, x)
        counts = torch.bincount(y, minlength=columns.stop - columns.start).to(self.y)
        self.y[columns] += counts
        self.squares[columns] += counts

    def with_sign(self, sign: int, part: NormalEquations) -> NormalEquations:
        """Returns these sums plus the part's (sign 1), or minus them (sign −1)."""
        return NormalEquations(
            self.gram + sign * part.gram,
            self.cross + sign * part.cross,
            self.x + sign * part.x,
            self.y + sign * part.y,
            self.squares + sign * part.squares,
            self.entries + sign * part.entries,
            max(self.eps, part.eps),
        )

    def factored(self, intercept: bool) -> Factored:
        """Factors X'X, centred where there is an intercept, as V diag(λ) V'."""
        mean_x, mean_y = (total / max(1, self.entries) * intercept for total in (self.x, self.y))
        gram = self.gram - self.entries * torch.outer(mean_x, mean_x)
        cross = self.cross - self.entries * torch.outer(mean_y, mean_x)
        spectrum, vectors = torch.linalg.eigh((gram + gram.T) / 2)
        # Centring cancels rounded terms, so the scale is the largest eigenvalue before it, up to a factor of 2.
        largest = float(torch.maximum(spectrum[-1], self.entries * mean_x.square().sum()))
        share = max(torch.finfo(torch.float64).eps * max(self.entries, len(self.x)), self.eps**2)
        return Factored(spectrum.clamp(min=0), vectors, cross @ vectors, mean_x, mean_y, share * largest)

    def squared_error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Returns Σ (y − x @ weight − bias)² [column], for a map weight [d column], bias [column]."""
        fitted = (
            (weight * (self.gram @ weight)).sum(0) + 2 * bias * (self.x @ weight) + self.entries * bias**2
        )
        return self.squares - 2 * (weight.T * self.cross).sum(1) - 2 * bias * self.y + fitted


@dataclass(frozen=True)
class Factored:
    """Normal equations in the eigenbasis of X'X. Directions with λ up to `tolerance` hold only rounding errors."""

    spectrum: Tensor  # [d]
    vectors: Tensor  # [d d]
    projected: Tensor  # [column d]
    mean_x: Tensor
    mean_y: Tensor
    tolerance: float

    @property
    def rank(self) -> int:
        return int((self.spectrum > self.tolerance).sum())

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Returns weight [d column] and bias [column] that minimise Σ(y − xw − b)² + ridge·|w|²; b is not penalised.

        With ridge 0 this is the minimiser with the smallest |w|.
        """
        inverse = 1 / (self.spectrum + ridge)
        if ridge == 0:
            inverse = torch.where(self.spectrum > self.tolerance, inverse, 0.0)
        weight = self.vectors @ (self.projected * inverse).T
        return weight, self.mean_y - self.mean_x @ weight
