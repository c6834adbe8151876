"""Solves least squares and ridge regression from sums over entries, whose size does not grow with their number.

For features X [entry d] and targets Y [entry column], a linear fit and its squared error on the same entries depend
only on the sums X'X, X'Y, Σx, Σy and Σy². They are float64, of differences from a centre near the means, so that an
offset costs no digits. Sums over parts of the data can be added and subtracted: a cross-validation fold is left out by
subtracting its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float64).eps


@dataclass
class NormalEquations:
    """Sums over entries of the features x and targets y, less their centres.

    Attributes:
        centre_x, centre_y: what is subtracted, [d] and [column].
        gram: products of [x, 1], [d+1 d+1].
        unit: the same, of rows divided by the norm of x before centring. A direction is readable if rounding in each
            entry does not hide it here, where an entry with a massive activation counts no more than another.
        cross: products of y and [x, 1], [column d+1].
        squares: Σy² [column].
        eps: the relative precision of the features.
    """

    centre_x: Tensor
    centre_y: Tensor
    gram: Tensor
    unit: Tensor
    cross: Tensor
    squares: Tensor
    eps: float = 0.0

    @classmethod
    def empty(cls, centre_x: Tensor, centre_y: Tensor) -> NormalEquations:
        """Returns sums over no entry, about centres [d] and [column], float64."""
        width, columns = len(centre_x) + 1, len(centre_y)
        gram, unit = centre_x.new_zeros(2, width, width)
        return cls(
            centre_x, centre_y, gram, unit, centre_x.new_zeros(columns, width), centre_x.new_zeros(columns)
        )

    @property
    def entries(self) -> int:
        return round(float(self.gram[-1, -1]))

    def add(self, x: Tensor, eps: float) -> None:
        """Adds features [entry d], float64; `add_numbers` and `add_classes` add their targets."""
        features = self._features(x)
        self.gram += features.T @ features
        lengths = x.norm(dim=1, keepdim=True)
        features = torch.where(lengths > 0, features / lengths, 0.0)
        self.unit += features.T @ features
        self.eps = max(self.eps, eps)

    def add_numbers(self, columns: slice, x: Tensor, y: Tensor) -> None:
        """Adds targets y [entry column], float64."""
        y = y - self.centre_y[columns]
        self.cross[columns] += y.T @ self._features(x)
        self.squares[columns] += y.square().sum(0)

    def add_classes(self, columns: slice, x: Tensor, y: Tensor) -> None:
        """Adds classes y [entry], each the index of its column (of centre 0), without forming the one-hot matrix."""
        self.cross[columns].index_add_(0, y, self._features(x))
        self.squares[columns] += torch.bincount(y, minlength=columns.stop - columns.start).to(self.squares)

    def with_sign(self, sign: int, part: NormalEquations) -> NormalEquations:
        """Returns these sums plus the part's (sign 1), or minus them (sign −1)."""
        names = ("gram", "unit", "cross", "squares")
        sums = {name: getattr(self, name) + sign * getattr(part, name) for name in names}
        return replace(self, **sums, eps=max(self.eps, part.eps))

    def factored(self, intercept: bool) -> Factored:
        """Returns the normal equations about the means where there is an intercept, else about 0."""
        offset_x, offset_y, offset_unit = (
            -sums[:, -1] / total.clamp(min=_EPS) if intercept else centre
            for sums, total, centre in (
                (self.gram[:-1], self.gram[-1, -1], self.centre_x),
                (self.cross, self.gram[-1, -1], self.centre_y),
                (self.unit[:-1], self.unit[-1, -1], self.centre_x),
            )
        )
        raw = _moved(self.unit, self.centre_x, self.centre_x)
        return Factored(
            _moved(self.gram, offset_x, offset_x),
            _moved(torch.cat([self.cross, self.gram[-1:]]), offset_y, offset_x),
            _moved(self.unit, offset_unit, offset_unit),
            raw.diagonal().sqrt(),
            self.centre_x - offset_x,
            self.centre_y - offset_y,
            max(_EPS * max(self.entries, len(raw)), self.eps**2),
        )

    def squared_error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Returns Σ (y − x @ weight − bias)² [column], for a map weight [d column], bias [column]."""
        offset = self.centre_x @ weight + bias - self.centre_y
        weight = torch.cat([weight, offset[None]])
        errors = self.squares - 2 * (weight.T * self.cross).sum(1) + (weight * (self.gram @ weight)).sum(0)
        return errors.clamp(min=0)

    def _features(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x - self.centre_x, (0, 1), value=1.0)


@dataclass(frozen=True)
class Factored:
    """Normal equations: sums X'X [d d] and Y'X [column d] about the means.

    Attributes:
        unit: X'X of rows of unit norm; directions in which it is at most `tolerance`, relative to `scale`, hold only
            rounding errors.
        scale: [d], the root of the sum of squares of each feature in such rows, which bounds the rounding errors.
    """

    gram: Tensor
    cross: Tensor
    unit: Tensor
    scale: Tensor
    mean_x: Tensor
    mean_y: Tensor
    tolerance: float

    @property
    def rank(self) -> int:
        return self._directions[0].shape[1]

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Returns weight [d column] and bias [column] that minimise Σ(y − xw − b)² + ridge·|w|²; b is not penalised.

        With ridge 0 this is the minimiser with the smallest |w|.
        """
        if ridge:
            spectrum, vectors = self._spectrum
            weight = vectors @ ((self.cross @ vectors) / (spectrum.clamp(min=0) + ridge)).T
        else:
            readable, hidden = self._directions
            inverse = torch.linalg.pinv(readable.T @ self.gram @ readable, hermitian=True)
            weight = readable @ (inverse @ (readable.T @ self.cross.T))
            weight = weight - hidden @ (hidden.T @ weight)
        return weight, self.mean_y - self.mean_x @ weight

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh((self.gram + self.gram.T) / 2)

    @cached_property
    def _directions(self) -> tuple[Tensor, Tensor]:
        """Returns directions with variance above rounding, and an orthonormal basis of those without, as columns."""
        scale = torch.where(self.scale > 0, self.scale, 1.0)
        scaled = self.unit / scale / scale[:, None]
        spectrum, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
        readable, vectors = spectrum > self.tolerance, vectors / scale[:, None]
        return vectors[:, readable], torch.linalg.qr(vectors[:, ~readable]).Q


def _moved(sums: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns the products of u + left and v + right, [a b], from those of [u, 1] and [v, 1], [a+1 b+1]."""
    u, v, count = sums[:-1, -1], sums[-1, :-1], sums[-1, -1]
    return sums[:-1, :-1] + torch.outer(u, right) + torch.outer(left, v + count * right)
