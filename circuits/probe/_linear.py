"""The verb `linear`: probes of all sites, targets and controls, fitted on some examples and scored on the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.apply import intervene
from circuits.interventions.base import Intervention
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts, read_prompts, refuse_padding
from circuits.probe._inputs import Entries, ProbeSite, Target, parse_entries, parse_sites, parse_targets
from circuits.probe._result import (
    FitSettings,
    LinearMap,
    Measured,
    ProbeResult,
    Scored,
    SiteFits,
    activations,
    counts,
    pooled,
    score,
    tabulate,
)
from circuits.validate import answers_former_names, is_whole, read_seed


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
    per_position: bool = False,
    splits: Any = None,
    test: Any = 0.25,
    intercept: bool = False,
    ridge: float | Sequence[float] | None = None,
    folds: int = 5,
    untrained: Any = None,
    shuffles: int = 1,
    interventions: Intervention | Iterable[Intervention] = (),
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
) -> ProbeResult:
    """Fits a linear map from each site to each target on some examples, and scores it on the others.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes. Padding is left out, and positions count in
            each prompt's own tokens; masks and targets [batch pos] are over the padded batch.
        targets: a tensor, an array or a list, or a dict of several, [batch] or [batch pos], or of vectors [batch 1 d]
            or [batch pos d]. A target per example is the same at all its positions.
        kind: "regression", or "classification" of whole numbers from 0 or booleans (least squares on one-hot targets,
            the largest prediction wins); or a dict by target.
        sites: "resid_post", "z.1", a full hook name, or a list; each layer has a probe of its own. At z, q, k and v
            the vectors of all heads are concatenated, or each head has a probe of its own where `heads` chooses some;
            at scores and pattern the vector is the query's row.
        positions: entries to fit and score, as positions or a boolean mask [batch pos].
        per_position: fit a probe for each position; otherwise all positions share one.
        splits: name -> boolean mask [batch pos]; each is scored on its own, in addition to "all". Fits use all entries.
        test: the held-out examples: a fraction or a number of examples (drawn by `seed`), a mask [batch], indices or a
            slice.
        intercept: whether to fit an intercept; it is not penalised.
        ridge: None for least squares, of minimal norm where that is not unique; a penalty as in Σ(y − xw)² +
            ridge·|w|²; or several, from which `folds`-fold cross-validation on the examples to fit chooses the one with
            the least squared error for each target; no example is in two folds.
        untrained: a model of the same architecture, whose probes are a control. Interventions do not act on it.
        shuffles: how many times targets are exchanged between examples (as a whole; among the examples to fit and among
            those held out) for a control, which is averaged over them. 0: none.
        interventions: edits in force in `model`, in addition to those of open blocks.
        batch_size: examples in a forward, by default as in `sweep`. Results depend on it by rounding only.
        seed: the seed of the held-out examples, the folds, the shuffles and the bootstrap.
        draws: the number of bootstrap resamples of the held-out examples, for 95% intervals.

    Source: least squares without intercept as in Gopalani, Lubana, Hu 2024, figure 6 and appendix K; the shuffled
    control and selectivity after Hewitt & Liang 2019 (arXiv:1909.03368).
    """
    surface = HookedModel.of(model)
    control = None if untrained is None else HookedModel.of(untrained)
    prompts, seed = read_prompts(surface, tokens, "probe"), read_seed(seed, "probe")
    surface.check_prompts(prompts, "probe: tokens")
    _check_count("shuffles", shuffles, 0)
    _check_count("draws", draws, 1)
    fit = _parse_fit_settings(intercept, ridge, folds)
    entries = parse_entries(prompts, positions, splits, test, fit.folds, seed, per_position)
    refuse_padding(surface, prompts, entries.used, "probe")
    named_targets = parse_targets(targets, kind, prompts)
    at = sites, heads, entries.positions if per_position else None
    shuffled = _shuffled(named_targets, entries, shuffles, seed)
    probed = _Probed(prompts, entries, parse_sites(surface, *at), named_targets, shuffled, fit)
    if control is not None:
        control.check_prompts(prompts, "probe: tokens, of the untrained model")
        if parse_sites(control, *at) != probed.sites:
            raise CircuitsError("probe: the untrained model has not the sites of the model")
    # The activations of a forward at all sites are in memory together.
    kept = 2 * len(probed.sites) * (surface.sizes["d_model"] or 1)
    size = rows_in_a_forward(surface, prompts.shape[1], batch_size, "probe", kept=kept)
    if isinstance(interventions, Intervention):
        interventions = (interventions,)
    with intervene(model, *interventions):
        probes, size = within_memory(size, partial(probed.fitted, surface, [*named_targets, *shuffled]))
    controls = None
    if control is not None:
        controls, _ = within_memory(size, partial(probed.fitted, control, named_targets))
    measured = probed.measured(probes, controls)
    settings = {
        "seed": seed,
        "draws": draws,
        "shuffles": shuffles,
        "intercept": intercept,
        "batch_size": size,
    }
    return ProbeResult(
        tabulate(measured, len(entries.held_out), len(entries.fit), seed, draws),
        {(one.site.label, one.target): one.fitted for one in measured},
        _errors(probes, named_targets, fit),
        settings | surface.settings | {"ridge": list(fit.ridges), "folds": fit.folds},
    )


def _shuffled(targets: Sequence[Target], entries: Entries, shuffles: int, seed: int) -> list[Target]:
    """Returns the targets exchanged between examples, all of them once for each shuffle."""
    seeds = np.random.SeedSequence([seed, 3]).generate_state(shuffles, np.uint64) >> 1
    groups = [entries.fit, entries.held_out]
    return [target.shuffled(groups, int(one)) for one in seeds for target in targets]


@dataclass(frozen=True)
class _Probe:
    """The probe of one target at one site; errors: the cross-validated one of each penalty."""

    fitted: LinearMap
    errors: tuple[float, ...]
    scored: Scored


@dataclass(frozen=True)
class _Probed:
    """What is probed: the examples, the sites, the targets with their shuffled controls, and how maps are fitted."""

    prompts: Prompts
    entries: Entries
    sites: Sequence[ProbeSite]
    targets: Sequence[Target]
    shuffled: Sequence[Target]
    fit: FitSettings

    def fitted(
        self, surface: HookedModel, targets: Sequence[Target], size: int
    ) -> tuple[dict[ProbeSite, list[_Probe]], int]:
        """Returns the probes of each target at each site, and how many examples were in a forward."""
        probes: dict[ProbeSite, list[_Probe]] = {}
        for site, vectors in activations(surface, self.prompts, self.entries, self.sites, size):
            chosen = self.entries.used[:, site.positions]
            fold = self.entries.fold[:, None].expand(chosen.shape)[chosen]
            fitted = fold >= 0
            x, kept = vectors.double(), fitted.to(vectors.device)
            fits = SiteFits(x[kept], fold[fitted], self.fit, torch.finfo(vectors.dtype).eps)
            probes[site] = []
            for target in targets:
                y = target.take(torch.arange(len(self.prompts)), site.positions, chosen)[fitted]
                linear_map, errors = fits.fit(y, target.width)
                scored = score(linear_map, x[~kept], target, site, self.entries)
                probes[site].append(_Probe(linear_map, errors, scored))
        return probes, size

    def measured(
        self, probes: Mapping[ProbeSite, list[_Probe]], untrained: Mapping[ProbeSite, list[_Probe]] | None
    ) -> list[Measured]:
        """Returns the scores of each target at each site, with those of its controls."""
        return [
            Measured(
                site,
                target.name,
                probes[site][index].fitted,
                counts(site, self.entries),
                probes[site][index].scored,
                pooled([one.scored for one in probes[site][index + len(self.targets) :: len(self.targets)]]),
                None if untrained is None else untrained[site][index].scored,
            )
            for site in self.sites
            for index, target in enumerate(self.targets)
        ]


def _errors(
    probes: Mapping[ProbeSite, Sequence[_Probe]], targets: Sequence[Target], settings: FitSettings
) -> pd.DataFrame:
    """Returns the cross-validated error of each penalty; empty where there was only one."""
    rows = [
        {"place": site.label, "target": target.name, "ridge": ridge, "mse": error}
        for site, here in probes.items()
        for target, one in zip(targets, here, strict=False)
        for ridge, error in zip(settings.ridges, one.errors, strict=True)
        if settings.folds
    ]
    return pd.DataFrame(rows, columns=["place", "target", "ridge", "mse"])


def _parse_fit_settings(intercept: Any, ridge: Any, folds: Any) -> FitSettings:
    """Reads the settings of the fit; with a single penalty there is no cross-validation."""
    given = 0.0 if ridge is None else ridge
    if isinstance(given, np.ndarray | Tensor):
        given = given.tolist()
    ridges = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    numbers = [
        one for one in ridges if isinstance(one, int | float | np.number) and not isinstance(one, bool)
    ]
    if not ridges or len(numbers) < len(ridges) or not all(0 <= one < np.inf for one in numbers):
        raise CircuitsError(f"probe: ridge={ridge!r}; give a penalty from 0, several to choose from, or None")
    if not is_whole(folds, 2):
        raise CircuitsError(f"probe: folds={folds!r}; cross-validation takes at least 2")
    return FitSettings(bool(intercept), tuple(map(float, ridges)), int(folds) if len(ridges) > 1 else 0)


def _check_count(name: str, value: Any, least: int) -> None:
    if not is_whole(value, least):
        raise CircuitsError(f"probe: {name}={value!r}; give a whole number, at least {least}")
