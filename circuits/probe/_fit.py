"""Fits linear maps from activations, which are read in one pass over the examples, and predicts with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating, recording
from circuits.model.state import running_rows
from circuits.probe._inputs import Entries, ProbeSite

_EPS = torch.finfo(torch.float64).eps
# Bytes of activations that are kept at a time; sites beyond are read in a further pass over the examples.
MOST_KEPT = 2**31


@dataclass(frozen=True)
class LinearMap:
    """A fitted probe: prediction = x @ weight + intercept.

    Attributes:
        weight: [d k], for d numbers at the site (heads concatenated) and k numbers or classes of the target; each
            column is a direction at the site.
        intercept: [k], zero where none was fitted.
        ridge: the penalty, 0 for least squares.
        rank: the number of directions at the site with variance above rounding.

    All are float64, on the CPU.
    """

    weight: Tensor
    intercept: Tensor
    ridge: float
    rank: int

    def __repr__(self) -> str:
        shapes = f"weight {list(self.weight.shape)}, intercept {list(self.intercept.shape)}"
        return f"LinearMap({shapes}, ridge={self.ridge:g}, rank={self.rank})"

    def predict(self, x: Tensor) -> Tensor:
        """Returns predictions [... k] for activations [... d]; the predicted class has the largest number."""
        return x.to(self.weight) @ self.weight + self.intercept


def activations(
    surface: HookedModel, prompts: Prompts, entries: Entries, sites: Sequence[ProbeSite], step: int
) -> Iterator[tuple[ProbeSite, Tensor]]:
    """Yields each site with its vectors at the entries in use, [entry d], in the order of examples and positions.

    Args:
        step: examples in a forward.
    """
    waiting = list(sites)
    while waiting:
        kept: dict[ProbeSite, list[Tensor]] = {site: [] for site in waiting}
        for rows in torch.arange(len(prompts)).split(step):
            seen = _run(surface, prompts, rows, {site.hook for site in kept})
            for site, vectors in kept.items():
                vectors.append(_vectors(site, seen, prompts[rows], entries.used[rows]))
            while (
                len(kept) > 1 and sum(one.nbytes for vectors in kept.values() for one in vectors) > MOST_KEPT
            ):
                kept.popitem()
        for site, vectors in kept.items():
            yield site, torch.cat(vectors)
        waiting = [site for site in waiting if site not in kept]


def _run(surface: HookedModel, prompts: Prompts, rows: Tensor, hooks: set[str]) -> dict[str, Tensor]:
    model = surface.model
    # What an intervention holds for each example is cut to these rows.
    cut = running_rows(model, rows, len(prompts))
    with evaluating(model), torch.no_grad(), recording(surface, hooks) as seen, cut:
        surface.call(prompts[rows])
    return seen


def _vectors(site: ProbeSite, seen: dict[str, Tensor], prompts: Prompts, used: Tensor) -> Tensor:
    if site.hook not in seen:
        raise CircuitsError(f"probe: {site.hook} never fired; this model has it switched off")
    x = site.vectors(seen[site.hook], prompts)
    # Apple's GPUs have no float64.
    x = x.cpu() if x.device.type == "mps" else x
    x = x[used[:, site.positions].to(x.device)]
    if not bool(x.isfinite().all()):
        raise CircuitsError(f"probe: {site.hook} is not finite everywhere; masked scores are not")
    return x


class Regression:
    """Features [entry d] from which any target of these entries is fitted, with one penalty or another.

    Args:
        x: float64.
        eps: the relative precision in which the features came. Directions whose variance it may have made are left out
            of least squares, as fitting them would be fitting to rounding errors.
    """

    def __init__(self, x: Tensor, intercept: bool, eps: float) -> None:
        self._raw, self._intercept, self._eps = x, intercept, eps
        self._mean = _mean(x) if intercept else x.new_zeros(x.shape[1])
        self._x = x - self._mean
        self._gram = self._x.T @ self._x

    @property
    def rank(self) -> int:
        """The number of directions with variance above rounding."""
        return self._directions[0].shape[1]

    def solve(self, y: Tensor, width: int, ridge: float) -> tuple[Tensor, Tensor]:
        """Returns weight [d width] and bias [width] that minimise Σ(y − xw − b)² + ridge·|w|²; b is not penalised.

        With ridge 0 this is the minimiser with the smallest |w|.

        Args:
            y: numbers [entry width], or classes [entry], which stand for one-hot rows.
        """
        mean_y = self._x.new_zeros(width)
        if self._intercept:
            mean_y = _mean(y) if y.ndim == 2 else torch.bincount(y, minlength=width) / len(y)
        if y.ndim == 2:
            cross = self._x.T @ (y - mean_y)
        else:
            cross = self._x.new_zeros(width, self._x.shape[1]).index_add_(0, y, self._x).T
        if ridge:
            penalty = ridge * torch.eye(len(cross), dtype=cross.dtype, device=cross.device)
            weight = torch.linalg.solve(self._gram + penalty, cross)
        else:
            readable, hidden = self._directions
            inverse = torch.linalg.pinv(readable.T @ self._gram @ readable, hermitian=True)
            weight = readable @ (inverse @ (readable.T @ cross))
            weight = weight - hidden @ (hidden.T @ weight)
        return weight, mean_y.to(weight) - self._mean @ weight

    @cached_property
    def _directions(self) -> tuple[Tensor, Tensor]:
        """Returns directions with variance above rounding, and an orthonormal basis of those without, as columns.

        In rows of unit norm, as rounding is relative and an entry with a massive activation would hide the others'.
        """
        weights = self._raw.norm(dim=1, keepdim=True).reciprocal()
        weights = torch.where(weights.isfinite(), weights, 0.0)
        scale = (self._raw * weights).norm(dim=0)
        scale = torch.where(scale > 0, scale, 1.0)
        centre = self._mean
        if self._intercept:
            squares = weights.square()
            centre = centre + (self._x * squares).sum(0) / squares.sum().clamp(min=_EPS)
        scaled = (self._raw - centre) * weights / scale
        spectrum, vectors = torch.linalg.eigh(scaled.T @ scaled)
        readable = spectrum > max(_EPS * max(scaled.shape), self._eps**2)
        vectors = vectors / scale[:, None]
        return vectors[:, readable], torch.linalg.qr(vectors[:, ~readable]).Q


def _mean(x: Tensor) -> Tensor:
    """Returns the mean over entries, from the first one on: that of equal numbers is that number, without rounding."""
    return x[:1].sum(0) + (x - x[:1]).mean(0)


def squared_error(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns Σ(y − xw − b)² over entries and columns, of numbers [entry column] or classes [entry]."""
    predicted = x @ weight + bias
    if y.ndim == 2:
        return (y - predicted).square().sum()
    return predicted.square().sum() - 2 * predicted.gather(1, y[:, None]).sum() + len(y)


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit. ridges: one penalty, or several from which cross-validation chooses for each target."""

    intercept: bool
    ridges: tuple[float, ...]
    folds: int


class SiteFits:
    """The fits at one site, to any target.

    Args:
        x: features of the entries to fit, [entry d] float64.
        fold: the cross-validation fold of each entry.
        eps: as in `Regression`.
    """

    def __init__(self, x: Tensor, fold: Tensor, settings: FitSettings, eps: float) -> None:
        self._x, self._fold, self._settings = x, fold.to(x.device), settings
        self._all = Regression(x, settings.intercept, eps)
        self._without = [
            Regression(x[self._fold != number], settings.intercept, eps) for number in range(settings.folds)
        ]

    def fit(self, y: Tensor, width: int) -> tuple[LinearMap, tuple[float, ...]]:
        """Returns the map to a target, and the mean squared error over the folds of each penalty, the least of which
        is taken.
        """
        y, ridges = y.to(self._x.device), self._settings.ridges
        errors = torch.zeros(len(ridges), dtype=torch.float64)
        for number, regression in enumerate(self._without):
            left_out = self._fold == number
            for index, ridge in enumerate(ridges):
                fitted = regression.solve(y[~left_out], width, ridge)
                errors[index] += squared_error(self._x[left_out], y[left_out], *fitted).cpu()
        ridge = ridges[int(errors.argmin())]
        weight, bias = self._all.solve(y, width, ridge)
        return LinearMap(weight.cpu(), bias.cpu(), ridge, self._all.rank), tuple(
            (errors / (width * len(y))).tolist()
        )
