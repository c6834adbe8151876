"""The verb `linear`: probes of all sites, targets and controls, fitted on some examples and scored on the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.model.edit_state import running_rows
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import check_no_padding, parse_prompts
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating, recording
from circuits.probe._inputs import Entries, ProbeSite, Target, parse_entries, parse_sites, parse_targets
from circuits.probe._result import LinearMap, Probe, ProbeResult, pooled, score, tabulate
from circuits.validate import answers_former_names, is_whole, parse_seed

_EPS = torch.finfo(torch.float64).eps
#: Bytes of activations that are kept at a time; sites beyond are read in a further pass over the examples.
MOST_KEPT = 2**31


@answers_former_names
def linear(
    model: Any,
    tokens: Any,
    targets: Any,
    sites: Any = "resid_post",
    *,
    kind: Any = "regression",
    heads: Any = None,
    positions: Any = None,
    splits: Any = None,
    test: Any = 0.25,
    intercept: bool = False,
    ridge: float | None = None,
    untrained: Any = None,
    shuffles: int = 1,
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
        shuffles: how often targets are exchanged between examples, for the control of that name.
        batch_size: as in `sweep`.
        seed: of the held-out examples, shuffles and bootstrap.
        draws: bootstrap resamples.

    Inside `intervene` the edits are in force. Sources: Gopalani, Lubana, Hu 2024, figure 6; Hewitt & Liang 2019.
    """
    _check_numbers(draws, shuffles, ridge)
    surface, seed = HookedModel.of(model), parse_seed(seed, "probe")
    prompts = parse_prompts(surface, tokens, "probe")
    entries = parse_entries(prompts, positions, splits, test, seed)
    chosen, named = parse_sites(surface, sites, heads), parse_targets(targets, kind, prompts)
    control = None if untrained is None else HookedModel.of(untrained)
    if control is not None and parse_sites(control, sites, heads) != chosen:
        raise CircuitsError("probe: the untrained model has not the sites of the model")
    probing = _Probing(prompts, entries, chosen, bool(intercept), float(ridge or 0))
    drawn = np.random.SeedSequence([seed, 3]).generate_state(int(shuffles), np.uint64) >> 1
    groups = [entries.fit, entries.held_out]
    shuffled = [[one, *(one.shuffled(groups, int(draw)) for draw in drawn)] for one in named]
    probes, size = probing.run(surface, batch_size, shuffled)
    if control is not None:
        others, _ = probing.run(control, size, [[one] for one in named])
        probes = [replace(one, untrained=other.value) for one, other in zip(probes, others, strict=True)]
    settings: dict[str, Any] = {"seed": seed, "draws": int(draws), "shuffles": int(shuffles)}
    settings |= {"batch_size": size, "intercept": probing.intercept, "ridge": probing.ridge}
    settings |= surface.settings
    weights = {(one.site.label, one.target): one.fitted for one in probes}
    return ProbeResult(tabulate(probes, entries, seed, int(draws)), weights, settings)


def _check_numbers(draws: Any, shuffles: Any, ridge: Any) -> None:
    for name, value, least in (("draws", draws, 1), ("shuffles", shuffles, 0)):
        if not is_whole(value, least):
            raise CircuitsError(f"probe: {name}={value!r}; give a whole number, at least {least}")
    if ridge is not None and (
        isinstance(ridge, bool) or not isinstance(ridge, int | float) or not ridge >= 0
    ):
        raise CircuitsError(f"probe: ridge={ridge!r}; give one penalty from 0, or None")


@dataclass(frozen=True)
class _Probing:
    """What is probed: the examples, their entries and the sites, and how maps are fitted."""

    prompts: Prompts
    entries: Entries
    sites: Sequence[ProbeSite]
    intercept: bool
    ridge: float

    def run(
        self, surface: HookedModel, batch_size: int | None, targets: list[list[Target]]
    ) -> tuple[list[Probe], int]:
        """Returns the probe of each target at each site, and how many examples were in a forward.

        Args:
            targets: each with its shuffled controls behind it.
        """
        surface.check_prompts(self.prompts, "probe: tokens")
        check_no_padding(surface, self.prompts, self.entries.used, "probe")
        # The activations of a forward at all sites are in memory together.
        kept = 2 * len(self.sites) * (surface.sizes["d_model"] or 1)
        size = rows_in_a_forward(surface, self.prompts.shape[1], batch_size, "probe", kept=kept)
        return within_memory(size, partial(self._fitted, surface, targets))

    def _fitted(
        self, surface: HookedModel, targets: list[list[Target]], size: int
    ) -> tuple[list[Probe], int]:
        examples, entries = torch.arange(len(self.prompts)), self.entries
        chosen = entries.used
        fitted = torch.isin(examples, entries.fit)[:, None].expand(chosen.shape)[chosen]
        probes: dict[ProbeSite, list[Probe]] = {}
        for site, vectors in activations(surface, self.prompts, entries, self.sites, size):
            x, here = vectors.double(), fitted.to(vectors.device)
            regression = Regression(x[here], self.intercept, torch.finfo(vectors.dtype).eps)
            probes[site] = []
            for one in targets:
                maps: list[LinearMap] = []
                for target in one:
                    y = target.take(examples, chosen)[fitted].to(x.device)
                    weight, bias = regression.solve(y, target.width, self.ridge)
                    maps.append(LinearMap(weight.cpu(), bias.cpu(), self.ridge, regression.rank))
                own, *shuffled = (score(*pair, x[~here], entries) for pair in zip(maps, one, strict=True))
                probes[site].append(Probe(site, one[0].name, maps[0], own, pooled(shuffled)))
        return [one for site in self.sites for one in probes[site]], size


def activations(
    surface: HookedModel, prompts: Prompts, entries: Entries, sites: Sequence[ProbeSite], step: int
) -> Iterator[tuple[ProbeSite, Tensor]]:
    """Yields each site with its vectors at the entries in use, [entry d], in the order of examples and positions.

    Args:
        step: examples in a forward.
    """
    model, waiting = surface.model, list(sites)
    while waiting:
        kept: dict[ProbeSite, list[Tensor]] = {site: [] for site in waiting}
        for rows in torch.arange(len(prompts)).split(step):
            # What an intervention holds for each example is cut to these rows.
            cut = running_rows(model, rows, len(prompts))
            with (
                evaluating(model),
                torch.no_grad(),
                recording(surface, {site.hook for site in kept}) as seen,
                cut,
            ):
                surface.call(prompts[rows])
            for site, vectors in kept.items():
                vectors.append(_vectors(site, seen, prompts[rows], entries.used[rows]))
            while len(kept) > 1 and sum(x.nbytes for parts in kept.values() for x in parts) > MOST_KEPT:
                kept.popitem()
        for site, vectors in kept.items():
            yield site, torch.cat(vectors)
        waiting = [site for site in waiting if site not in kept]


def _vectors(site: ProbeSite, seen: dict[str, Tensor], prompts: Prompts, used: Tensor) -> Tensor:
    if site.hook not in seen:
        raise CircuitsError(f"probe: {site.hook} never fired; this model has it switched off")
    x = site.vectors(seen[site.hook], prompts)
    # Apple's GPUs have no float64.
    x = x.cpu() if x.device.type == "mps" else x
    x = x[used.to(x.device)]
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
