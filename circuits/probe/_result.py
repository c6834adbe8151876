"""Linear maps fitted by least squares, and the scores of their predictions as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating, recording
from circuits.model.state import running_rows
from circuits.probe._inputs import CLASSIFICATION, Entries, ProbeSite, Target
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tables import short_table

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


# fmt: off
COLUMNS = (
    "site", "layer", "head", "position", "target", "split", "metric", "value", "value_ci_low", "value_ci_high",
    "shuffled", "selectivity", "selectivity_ci_low", "selectivity_ci_high",
    "untrained", "over_untrained", "over_untrained_ci_low", "over_untrained_ci_high",
    "n", "entries", "fit_n", "ridge", "rank",
)
#: What `print` shows.
SHOWN = (
    "site", "layer", "head", "position", "target", "split", "metric", "value", "value_ci_low", "value_ci_high",
    "shuffled", "untrained",
)
# fmt: on
_WHOLE = ("layer", "head", "position", "n", "entries", "fit_n", "rank")


@dataclass(frozen=True)
class ProbeResult:
    """The results of linear probes.

    Attributes:
        frame: one row per site and layer (and head, position), target, split and metric. `value` with its interval is
            on held-out examples, `n` of them with `entries` entries in the split; the probe was fitted on `fit_n`
            examples with penalty `ridge` (0: least squares), in a space of `rank` dimensions. `shuffled` is the same
            metric of a probe fitted to, and scored on, targets exchanged between examples, `selectivity` = value −
            shuffled; `untrained` that of a probe on the untrained model, `over_untrained` = value − untrained; both
            differences have paired intervals. For mse, negative differences mean a better probe. NaN: there is no such
            control, or no entry.
        weights: (place, target) -> `LinearMap`; places are "resid_post.2", "z.1.3" (head 3), "resid_post.2@4" (position
            4).
        errors: the cross-validated mean squared error of each of several penalties: place, target, ridge, mse.
        settings: seed, folds, draws and so on.
    """

    frame: pd.DataFrame
    weights: Mapping[tuple[str, str], LinearMap]
    errors: pd.DataFrame
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        return short_table(self.frame, SHOWN)

    def plot(self, metric: str | Sequence[str] | None = None) -> Any:
        """Returns a plotly figure with a panel per metric and target: values over layers, with intervals as bands.

        Shuffled targets are dotted, the untrained model is dashed.
        """
        from circuits.figures.results import probe_figure

        known = list(dict.fromkeys(self.frame["metric"]))
        chosen = known if metric is None else [metric] if isinstance(metric, str) else list(metric)
        for one in chosen:
            if one not in known:
                raise CircuitsError(f"plot: no metric {one!r}; it has {', '.join(known)}")
        return probe_figure(self.frame[self.frame["metric"].isin(chosen)])


#: (split, metric) -> sums and counts [example], float64, of the held-out examples in order.
Scored = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]


def score(fitted: LinearMap, x: Tensor, target: Target, site: ProbeSite, entries: Entries) -> Scored:
    """Returns the sums and counts of each metric by held-out example, so that any set of examples can be pooled.

    mse: the mean over entries and the d numbers of each. r2: 1 − Σ(y − p)² / Σ(y − ȳ)², ȳ the mean of each number over
    the held-out entries of the split, the sums over all d numbers. cosine, abs_cosine: mean over entries of cos(p, y)
    and of its absolute value, of vectors only; entries whose target is the zero vector do not count, a prediction of
    zero has cosine 0. accuracy: the share of entries whose class has the largest prediction.

    Args:
        x: features of the held-out entries, [entry d] float64.
    """
    held_out = entries.held_out
    chosen = entries.used[held_out][:, site.positions]
    true = target.take(held_out, site.positions, chosen)
    examples = torch.arange(len(held_out))[:, None].expand(chosen.shape)[chosen]
    # Classes in parts, as there may be a vocabulary of them.
    predicted = [
        part.argmax(1) if target.kind == CLASSIFICATION else part
        for part in (fitted.predict(rows.cpu()) for rows in x.split(max(1, 2**22 // target.width)))
    ]
    found: Scored = {}
    for name, mask in entries.splits.items():
        inside = mask[held_out][:, site.positions][chosen]
        for metric, (sums, counts) in _measured(torch.cat(predicted)[inside], true[inside], target).items():
            totals = torch.zeros(2, len(held_out), dtype=torch.float64)
            totals.index_add_(1, examples[inside], torch.stack([sums, counts]))
            found[name, metric] = totals[0].numpy(), totals[1].numpy()
    return found


def _measured(predicted: Tensor, true: Tensor, target: Target) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by metric what each entry adds to its sum and its count."""
    ones = torch.ones(len(true), dtype=torch.float64)
    if target.kind == CLASSIFICATION:
        return {"accuracy": ((predicted == true).double(), ones)}
    # From the first one on, so that the mean of equal numbers is that number, and their spread 0 and no rounding.
    mean = true[:1].sum(0) + (true - true[:1]).mean(0)
    error, spread = (predicted - true).square().sum(1), (true - mean).square().sum(1)
    found = {"mse": (error, ones * target.width), "r2": (spread - error, spread)}
    if target.width == 1:  # a cosine would be the sign
        return found
    lengths = predicted.norm(dim=1) * true.norm(dim=1)
    cosine = torch.where(lengths > 0, (predicted * true).sum(1) / lengths, 0.0)
    directed = (true.norm(dim=1) > 0).double()
    return found | {
        "cosine": (cosine * directed, directed),
        "abs_cosine": (cosine.abs() * directed, directed),
    }


def counts(site: ProbeSite, entries: Entries) -> dict[str, int]:
    """Returns the number of held-out entries by split."""
    used = entries.used[entries.held_out][:, site.positions]
    return {
        name: int((mask[entries.held_out][:, site.positions] & used).sum())
        for name, mask in entries.splits.items()
    }


def pooled(draws: Sequence[Scored]) -> Scored | None:
    """Averages the sums and counts of several draws, example by example; None if there is no draw."""
    if not draws:
        return None
    return {
        key: (np.mean([one[key][0] for one in draws], 0), np.mean([one[key][1] for one in draws], 0))
        for key in draws[0]
    }


@dataclass(frozen=True)
class Measured:
    """One probe's scores, and those of its controls; None where there is no such control."""

    site: ProbeSite
    target: str
    fitted: LinearMap
    entries: Mapping[str, int]  # by split
    value: Scored
    shuffled: Scored | None
    untrained: Scored | None


def tabulate(measured: Sequence[Measured], n: int, fit_n: int, seed: int, draws: int) -> pd.DataFrame:
    """Tabulates scores, with percentile bootstrap intervals over held-out examples; all rows share the resamples."""
    rows: list[dict[str, Any]] = []
    series: list[tuple[np.ndarray, np.ndarray]] = []
    for one in measured:
        description: dict[str, Any] = {
            "site": one.site.site.name,
            "layer": one.site.site.layer,
            "head": one.site.head,
            "position": one.site.position,
            "target": one.target,
            "n": n,
            "fit_n": fit_n,
            "ridge": one.fitted.ridge,
            "rank": one.fitted.rank,
        }
        for split, metric in one.value:
            rows.append({**description, "split": split, "metric": metric, "entries": one.entries[split]})
            no_entries = (np.zeros(n), np.zeros(n))
            for scored in (one.value, one.shuffled, one.untrained):
                series.append(no_entries if scored is None else scored[split, metric])
    sums, counts = (np.stack(part) for part in zip(*series, strict=True))
    value = ratio(sums.sum(1), counts.sum(1)).reshape(-1, 3)
    resampled = bootstrap(sums, counts, seed, draws).reshape(draws, -1, 3)
    estimates = {"value": value[:, 0], "shuffled": value[:, 1], "untrained": value[:, 2]}
    estimates["value_ci_low"], estimates["value_ci_high"] = interval(resampled[..., 0], LEVEL)
    for control, name in ((1, "selectivity"), (2, "over_untrained")):
        estimates[name] = value[:, 0] - value[:, control]
        bounds = interval(resampled[..., 0] - resampled[..., control], LEVEL)
        estimates[f"{name}_ci_low"], estimates[f"{name}_ci_high"] = bounds
    frame = pd.DataFrame(rows).assign(**estimates)[list(COLUMNS)]
    return frame.astype(dict.fromkeys(_WHOLE, "Int64"))
