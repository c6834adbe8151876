"""Linear probes of all sites, targets and controls, fitted on some examples and scored on the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_count, parse_seed
from circuits.errors import CircuitsError
from circuits.figures.results import probe_figure
from circuits.model.activation_recording import run_and_record
from circuits.model.batch_size import choose_batch_size, run_within_memory
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import check_no_unmasked_padding, parse_prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.model.types import ArrayLike, Figure, HeadsLike, PositionsLike, SitesLike, TokensLike
from circuits.probe._probe_inputs import (
    CLASSIFICATION,
    ProbeEntries,
    ProbeSite,
    Target,
    parse_entries,
    parse_sites,
    parse_targets,
)
from circuits.statistics import bootstrap_ratios, ratio
from circuits.table_printing import ci_names, interval_columns, metrics_asked_for, short_table_text

_EPS = torch.finfo(torch.float64).eps
#: Bytes of activations that are kept at a time; sites beyond are read in a further pass over the examples.
MOST_KEPT = 2**31


@check_renamed_args
def linear(
    model: nn.Module,
    tokens: TokensLike,
    targets: ArrayLike | Mapping[str, ArrayLike],
    sites: SitesLike = "resid_post",
    *,
    kind: str | Mapping[str, str] = "regression",
    heads: HeadsLike = None,
    positions: PositionsLike = None,
    splits: Mapping[str, ArrayLike] | None = None,
    test: float | slice | ArrayLike = 0.25,
    intercept: bool = False,
    ridge: float | None = None,
    untrained: nn.Module | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
) -> ProbeResult:
    """Fits a linear map from each site to each target on some examples, and scores it on the others.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes.
        targets: [batch], [batch pos], or vectors [batch 1 d] or [batch pos d]; or a dict of several.
        kind: "regression", or "classification" of whole numbers from 0 (one-hot least squares); or a dict by target.
        sites: "resid_post", "z.1", ..., or a list; each layer has its own probe. Vectors of heads are concatenated.
        heads: heads of the sites, each of which then has its own probe.
        positions: entries to fit and score, as positions or a boolean mask [batch pos].
        splits: name -> boolean mask [batch pos], scored on its own beside "all"; fits use all entries.
        test: the held-out examples: a fraction or number (drawn by `seed`), a mask [batch], indices or a slice.
        intercept: whether to fit an intercept, which is not penalised.
        ridge: a penalty, Σ(y − xw)² + ridge·|w|²; None: none.
        untrained: a model of the same architecture, whose probes are a control; open blocks of `model` do not edit it.
        batch_size: examples in a forward; by default by the model's size.
        seed: of the held-out examples, the exchange of targets and the bootstrap.
        draws: bootstrap resamples.

    Inside `intervene` the edits are in force. Sources: Gopalani, Lubana, Hu 2024, figure 6; Hewitt & Liang 2019.
    """
    draws, fitted, penalty = parse_count(draws, "probe"), bool(intercept), _parse_penalty(ridge)
    hooked, seed = HookedModel(model), parse_seed(seed, "probe")
    prompts = parse_prompts(hooked, tokens, "probe")
    entries = parse_entries(prompts, positions, splits, test, seed)
    chosen, named = parse_sites(hooked, sites, heads), parse_targets(targets, kind, prompts)
    control = None if untrained is None else HookedModel(untrained)
    if control is not None and parse_sites(control, sites, heads) != chosen:
        raise CircuitsError("probe: the untrained model has not the sites of the model")
    given = prompts, entries, chosen, (fitted, penalty)
    (drawn,) = np.random.SeedSequence([seed, 3]).generate_state(1, np.uint64) >> 1
    shuffled = [[one, one.shuffled([entries.fit, entries.held_out], int(drawn))] for one in named]
    probes, size = _fit_and_score_probes(hooked, *given, shuffled, batch_size)
    if control is not None:
        others, _ = _fit_and_score_probes(control, *given, [[one] for one in named], size)
        probes = [replace(one, untrained=other.value) for one, other in zip(probes, others, strict=True)]
    settings = {"seed": seed, "draws": draws, "batch_size": size, "intercept": fitted, "ridge": penalty}
    weights = {(one.site.label, one.target): one.fitted for one in probes}
    return ProbeResult(
        tabulate_scores(probes, entries, seed, draws), weights, settings | hooked.setting_if_unchecked
    )


def _parse_penalty(ridge: Any) -> float:
    """Returns the penalty of a ridge regression; 0 for none."""
    is_number = isinstance(ridge, int | float | np.number) and not isinstance(ridge, bool)
    if ridge is not None and not (is_number and 0 <= ridge < np.inf):
        raise CircuitsError(f"probe: ridge={ridge!r}; give one penalty from 0, or None")
    return float(ridge or 0)


def _fit_and_score_probes(
    hooked: HookedModel,
    prompts: Prompts,
    entries: ProbeEntries,
    sites: Sequence[ProbeSite],
    intercept_and_penalty: tuple[bool, float],
    targets: list[list[Target]],
    batch_size: int | None,
) -> tuple[list[ScoredProbe], int]:
    """Returns the probe of each target at each site, and how many examples were in a forward.

    Args:
        intercept_and_penalty: whether there is an intercept, and the penalty.
        targets: each alone, or with its shuffled control behind it.
    """
    hooked.check_prompts(prompts, "probe: tokens")
    check_no_unmasked_padding(hooked, prompts, entries.used, "probe")
    # The activations of a forward at all sites are in memory together.
    kept = 2 * len(sites) * (hooked.sizes["d_model"] or 1)
    most = choose_batch_size(hooked, prompts.shape[1], batch_size, "probe", kept=kept)
    examples, chosen, (intercept, ridge) = torch.arange(len(prompts)), entries.used, intercept_and_penalty
    fitted = torch.isin(examples, entries.fit)[:, None].expand(chosen.shape)[chosen]

    def fit_and_score_with_size(size: int) -> tuple[list[ScoredProbe], int]:
        probes: dict[ProbeSite, list[ScoredProbe]] = {}
        for site, vectors in site_vectors(hooked, prompts, entries, sites, size):
            x, here = vectors.double(), fitted.to(vectors.device)
            regression = Regression(x[here], intercept, torch.finfo(vectors.dtype).eps)
            probes[site] = []
            for one in targets:
                maps: list[LinearMap] = []
                for target in one:
                    y = target.at_entries(examples, chosen)[fitted].to(x.device)
                    weight, bias = regression.fit_weight_and_bias(y, target.width, ridge)
                    maps.append(LinearMap(weight.cpu(), bias.cpu(), ridge, regression.rank))
                scores = (score_by_example(*pair, x[~here], entries) for pair in zip(maps, one, strict=True))
                probes[site].append(ScoredProbe(site, one[0].name, maps[0], *scores))
        return [one for site in sites for one in probes[site]], size

    return run_within_memory(most, fit_and_score_with_size)


def site_vectors(
    hooked: HookedModel, prompts: Prompts, entries: ProbeEntries, sites: Sequence[ProbeSite], step: int
) -> Iterator[tuple[ProbeSite, Tensor]]:
    """Yields each site with its vectors at the entries in use, [entry d], in the order of examples and positions.

    Args:
        step: examples in a forward.
    """
    waiting = list(sites)
    while waiting:
        kept: dict[ProbeSite, list[Tensor]] = {site: [] for site in waiting}
        for rows in torch.arange(len(prompts)).split(step):
            seen = run_and_record(hooked, prompts, rows, {site.hook for site in kept}, "probe")
            for site, vectors in kept.items():
                vectors.append(_finite_vectors_in_use(site, seen, prompts[rows], entries.used[rows]))
            while len(kept) > 1 and sum(x.nbytes for parts in kept.values() for x in parts) > MOST_KEPT:
                kept.popitem()
        for site, vectors in kept.items():
            yield site, torch.cat(vectors)
        waiting = [site for site in waiting if site not in kept]


def _finite_vectors_in_use(
    site: ProbeSite, seen: dict[str, Tensor], prompts: Prompts, used: Tensor
) -> Tensor:
    x = site.vectors_of_activation(seen[site.hook], prompts)
    # Apple's GPUs have no float64.
    x = x.cpu() if x.device.type == "mps" else x
    x = x[used.to(x.device)]
    # Hugging Face's models mask scores with the lowest number.
    if not bool((x.abs() < torch.finfo(x.dtype).max / 2).all()):
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
        self._mean = _mean_from_first_entry(x) if intercept else x.new_zeros(x.shape[1])
        self._x = x - self._mean
        self._gram = self._x.T @ self._x

    @property
    def rank(self) -> int:
        """The number of directions with variance above rounding."""
        return self._directions_split_at_rounding[0].shape[1]

    def fit_weight_and_bias(self, y: Tensor, width: int, ridge: float) -> tuple[Tensor, Tensor]:
        """Returns weight [d width] and bias [width] that minimise Σ(y − xw − b)² + ridge·|w|²; b is not penalised.

        With ridge 0 this is the minimiser with the smallest |w|.

        Args:
            y: numbers [entry width], or classes [entry], which stand for one-hot rows.
        """
        mean_y = self._x.new_zeros(width)
        if self._intercept:
            mean_y = _mean_from_first_entry(y) if y.ndim == 2 else torch.bincount(y, minlength=width) / len(y)
        if y.ndim == 2:
            cross = self._x.T @ (y - mean_y)
        else:
            cross = self._x.new_zeros(width, self._x.shape[1]).index_add_(0, y, self._x).T
        if ridge:
            penalty = ridge * torch.eye(len(cross), dtype=cross.dtype, device=cross.device)
            weight = torch.linalg.solve(self._gram + penalty, cross)
        else:
            readable, inverse, hidden = self._directions_split_at_rounding
            weight = readable @ (inverse @ (readable.T @ cross))
            weight = weight - hidden @ (hidden.T @ weight)
        return weight, mean_y.to(weight) - self._mean @ weight

    @cached_property
    def _directions_split_at_rounding(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns directions with variance above rounding, as columns, the inverse of their Gram matrix, and an
        orthonormal basis of those without.

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
        shown = vectors[:, readable]
        inverse = torch.linalg.pinv(shown.T @ self._gram @ shown, hermitian=True)
        return shown, inverse, torch.linalg.qr(vectors[:, ~readable]).Q


def _mean_from_first_entry(x: Tensor) -> Tensor:
    """Returns the mean over entries, from the first one on: that of equal numbers is that number, without rounding."""
    return x[:1].sum(0) + (x - x[:1]).mean(0)


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
        return f"LinearMap(weight {list(self.weight.shape)}, ridge={self.ridge:g}, rank={self.rank})"

    def predict(self, x: Tensor) -> Tensor:
        """Returns predictions [... k] for activations [... d]; the predicted class has the largest number."""
        return x.to(self.weight) @ self.weight + self.intercept


_KEYS = ("site", "layer", "head", "target", "split", "metric", *ci_names("value"))
_CONTROLS = ("shuffled", *ci_names("selectivity"), "untrained", *ci_names("over_untrained"))
COLUMNS = (*_KEYS, *_CONTROLS, "n", "entries", "fit_n", "ridge", "rank")
#: What `print` shows.
SHOWN = (*_KEYS, "shuffled", "untrained")
_WHOLE = ("layer", "head", "n", "entries", "fit_n", "rank")


@dataclass(frozen=True)
class ProbeResult:
    """The results of linear probes.

    Attributes:
        frame: one row per site and layer (and head), target, split and metric. `value` with its interval is
            on held-out examples, `n` of them with `entries` entries in the split; the probe was fitted on `fit_n`
            examples with penalty `ridge` (0: least squares), in a space of `rank` dimensions. `shuffled` is the same
            metric of a probe fitted to, and scored on, targets exchanged between examples, `selectivity` = value −
            shuffled; `untrained` that of a probe on the untrained model, `over_untrained` = value − untrained; both
            differences have paired intervals. For mse, negative differences mean a better probe. NaN: there is no such
            control, or no entry.
        weights: (place, target) -> `LinearMap`; places are "resid_post.2", "z.1.3" (head 3).
        settings: seed, draws and so on.
    """

    frame: pd.DataFrame
    weights: Mapping[tuple[str, str], LinearMap]
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        return short_table_text(self.frame, SHOWN)

    def plot(self, metric: str | Sequence[str] | None = None) -> Figure:
        """Returns a plotly figure with a panel per metric and target: values over layers, with intervals as bands.

        Shuffled targets are dotted, the untrained model is dashed.
        """
        return probe_figure(self.frame[self.frame["metric"].isin(metrics_asked_for(self.frame, metric))])


#: (split, metric) -> sums and counts [example], float64, of the held-out examples in order.
Scored = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]


def score_by_example(fitted: LinearMap, target: Target, x: Tensor, entries: ProbeEntries) -> Scored:
    """Returns the sums and counts of each metric by held-out example, so that any set of examples can be pooled.

    mse: the mean over entries and the d numbers of each. r2: 1 − Σ(y − p)² / Σ(y − ȳ)², ȳ the mean of each number over
    the held-out entries of the split, the sums over all d numbers. cosine, abs_cosine: mean over entries of cos(p, y)
    and of its absolute value, of vectors only; entries whose target is the zero vector do not count, a prediction of
    zero has cosine 0. accuracy: the share of entries whose class has the largest prediction.

    Args:
        x: features of the held-out entries, [entry d] float64.
    """
    held_out = entries.held_out
    chosen = entries.used[held_out]
    true = target.at_entries(held_out, chosen)
    examples = torch.arange(len(held_out))[:, None].expand(chosen.shape)[chosen]
    # Classes in parts, as there may be a vocabulary of them.
    predicted = [
        part.argmax(1) if target.kind == CLASSIFICATION else part
        for part in (fitted.predict(rows.cpu()) for rows in x.split(max(1, 2**22 // target.width)))
    ]
    found: Scored = {}
    for name, mask in entries.splits.items():
        inside = mask[held_out][chosen]
        for metric, (sums, counts) in _entry_metrics(
            torch.cat(predicted)[inside], true[inside], target
        ).items():
            totals = torch.zeros(2, len(held_out), dtype=torch.float64)
            totals.index_add_(1, examples[inside], torch.stack([sums, counts]))
            found[name, metric] = totals[0].numpy(), totals[1].numpy()
    return found


def _entry_metrics(predicted: Tensor, true: Tensor, target: Target) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by metric what each entry adds to its sum and its count."""
    ones = torch.ones(len(true), dtype=torch.float64)
    if target.kind == CLASSIFICATION:
        return {"accuracy": ((predicted == true).double(), ones)}
    error, spread = (predicted - true).square().sum(1), (true - _mean_from_first_entry(true)).square().sum(1)
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


@dataclass(frozen=True)
class ScoredProbe:
    """The probe of one target at one site, its scores and those of its controls; None: there is no such control."""

    site: ProbeSite
    target: str
    fitted: LinearMap
    value: Scored
    shuffled: Scored | None = None
    untrained: Scored | None = None


def tabulate_scores(
    probes: Sequence[ScoredProbe], entries: ProbeEntries, seed: int, draws: int
) -> pd.DataFrame:
    """Tabulates scores, with percentile bootstrap intervals over held-out examples; all rows share the resamples."""
    n, used = len(entries.held_out), entries.used[entries.held_out]
    counts_of = {name: int((mask[entries.held_out] & used).sum()) for name, mask in entries.splits.items()}
    rows: list[dict[str, Any]] = []
    series: list[tuple[np.ndarray, np.ndarray]] = []
    for one in probes:
        place: dict[str, Any] = {"site": one.site.site.name, "layer": one.site.site.layer}
        place |= {"head": one.site.head, "target": one.target, "n": n, "fit_n": len(entries.fit)}
        place |= {"ridge": one.fitted.ridge, "rank": one.fitted.rank}
        for split, metric in one.value:
            rows.append({**place, "split": split, "metric": metric, "entries": counts_of[split]})
            no_entries = (np.zeros(n), np.zeros(n))
            for scored in (one.value, one.shuffled, one.untrained):
                series.append(no_entries if scored is None else scored[split, metric])
    sums, counts = (np.stack(part) for part in zip(*series, strict=True))
    value = ratio(sums.sum(1), counts.sum(1)).reshape(-1, 3)
    resampled = bootstrap_ratios(sums, counts, seed, draws).reshape(draws, -1, 3)
    estimates = interval_columns("value", value[:, 0], resampled[..., 0])
    for control, name, difference in ((1, "shuffled", "selectivity"), (2, "untrained", "over_untrained")):
        drawn = resampled[..., 0] - resampled[..., control]
        estimates |= {name: value[:, control]}
        estimates |= interval_columns(difference, value[:, 0] - value[:, control], drawn)
    frame = pd.DataFrame(rows).assign(**estimates)[list(COLUMNS)]
    return frame.astype(dict.fromkeys(_WHOLE, "Int64"))
