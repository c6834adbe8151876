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
from circuits.probe._fit import FitSettings, LinearMap, SiteFits, activations
from circuits.probe._inputs import Entries, ProbeSite, Target, parse_sites, read_entries, read_targets
from circuits.probe._result import Measured, ProbeResult, Scored, counts, pooled, score, tabulate
from circuits.validate import RENAMED, is_whole, read_seed, refuse_removed


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
    **removed: Any,
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
    refuse_removed("probe", removed, RENAMED)
    surface = HookedModel.of(model)
    control = None if untrained is None else HookedModel.of(untrained)
    prompts, seed = read_prompts(surface, tokens, "probe"), read_seed(seed, "probe")
    surface.check_prompts(prompts, "probe: tokens")
    if control is not None:
        control.check_prompts(prompts, "probe: tokens, of the untrained model")
    _check_count("shuffles", shuffles, 0)
    _check_count("draws", draws, 1)
    fit_settings = _read_fit_settings(intercept, ridge, folds)
    entries = read_entries(prompts, positions, splits, test, fit_settings.folds, seed, per_position)
    refuse_padding(surface, prompts, entries.used, "probe")
    named_targets = read_targets(targets, kind, prompts)
    separate_positions = entries.positions if per_position else None
    probe_sites = parse_sites(surface, sites, heads, separate_positions)
    if isinstance(interventions, Intervention):
        interventions = (interventions,)
    seeds = np.random.SeedSequence([seed, 3]).generate_state(shuffles, np.uint64) >> 1
    groups = [entries.fit, entries.held_out]
    shuffled = [target.shuffled(groups, int(one)) for one in seeds for target in named_targets]

    if control is not None and parse_sites(control, sites, heads, separate_positions) != probe_sites:
        raise CircuitsError("probe: the untrained model has not the sites of the model")
    # The activations of a forward at all sites are in memory together.
    kept = 2 * len(probe_sites) * (surface.sizes["d_model"] or 1)
    size = rows_in_a_forward(surface, prompts.shape[1], batch_size, "probe", kept=kept)

    def fitted(of: HookedModel, on: Sequence[Target], size: int) -> tuple[dict[ProbeSite, list[_Probe]], int]:
        return _fit_and_score(of, prompts, entries, size, probe_sites, on, fit_settings), size

    with intervene(model, *interventions):
        every = [*named_targets, *shuffled]
        probes, size = within_memory(size, partial(fitted, surface, every))
    untrained_probes = None
    if control is not None:
        untrained_probes, _ = within_memory(size, partial(fitted, control, named_targets))
    measured = [
        Measured(
            site,
            target.name,
            probes[site][index].fitted,
            counts(site, entries),
            probes[site][index].scored,
            pooled([one.scored for one in probes[site][index + len(named_targets) :: len(named_targets)]]),
            None if untrained_probes is None else untrained_probes[site][index].scored,
        )
        for site in probe_sites
        for index, target in enumerate(named_targets)
    ]
    settings: dict[str, Any] = {
        "seed": seed,
        "draws": draws,
        "shuffles": shuffles,
        "intercept": intercept,
        "batch_size": size,
    }
    settings |= surface.settings | {"ridge": list(fit_settings.ridges), "folds": fit_settings.folds}
    return ProbeResult(
        tabulate(measured, len(entries.held_out), len(entries.fit), seed, draws),
        {(one.site.label, one.target): one.fitted for one in measured},
        _errors(probes, named_targets, fit_settings),
        settings,
    )


@dataclass(frozen=True)
class _Probe:
    """The probe of one target at one site; errors: the cross-validated one of each penalty."""

    fitted: LinearMap
    errors: tuple[float, ...]
    scored: Scored


def _fit_and_score(
    surface: HookedModel,
    prompts: Prompts,
    entries: Entries,
    step: int,
    sites: Sequence[ProbeSite],
    targets: Sequence[Target],
    settings: FitSettings,
) -> dict[ProbeSite, list[_Probe]]:
    """Returns the probes of each target at each site."""
    probes: dict[ProbeSite, list[_Probe]] = {}
    for site, vectors in activations(surface, prompts, entries, sites, step):
        chosen = entries.used[:, site.positions]
        fold = entries.fold[:, None].expand(chosen.shape)[chosen]
        fitted = fold >= 0
        x, kept = vectors.double(), fitted.to(vectors.device)
        fits = SiteFits(x[kept], fold[fitted], settings, torch.finfo(vectors.dtype).eps)
        probes[site] = []
        for target in targets:
            y = target.take(torch.arange(len(prompts)), site.positions, chosen)[fitted]
            linear_map, errors = fits.fit(y, target.width)
            probes[site].append(
                _Probe(linear_map, errors, score(linear_map, x[~kept], target, site, entries))
            )
    return probes


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


def _read_fit_settings(intercept: Any, ridge: Any, folds: Any) -> FitSettings:
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
