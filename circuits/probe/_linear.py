"""Fits linear probes of all sites, targets and controls in one pass over the examples, and scores them in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import intervene
from circuits.interventions.base import Intervention
from circuits.model.padding import refuse_padding
from circuits.model.surface import Surface
from circuits.probe._fit import ActivationStream, FitSettings, LinearMap, fit, score
from circuits.probe._result import Measured, ProbeResult, tabulate
from circuits.probe._scores import Scores, pooled
from circuits.probe._sites import ProbeSite, parse_sites
from circuits.probe._split import read_entries
from circuits.probe._targets import Target, read_targets
from circuits.validate import is_whole, read_run_tokens, read_seed

# Tokens per forward under chunk="auto": the activations at all spots of one chunk are in memory together.
AUTO_CHUNK = 8192


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
    chunk: int | str = "auto",
    seed: int = 0,
    draws: int = 1000,
) -> ProbeResult:
    """Fit a linear map from each site to each target on some examples, and score it on the others.

    Args:
        targets: a tensor or a dict of several, [batch] or [batch pos], or of vectors [batch 1 d] or [batch pos d]. What
            is given per example is the same at all its positions.
        kind: "regression", or "classification" of whole numbers from 0 (least squares on one-hot targets, the largest
            prediction wins); or a dict by target.
        sites: "resid_post", "z.1", a full hook name, or a list; each layer has a probe of its own. At z, q, k and v
            heads are taken side by side, or one by one where `heads` chooses some; scores and patterns are the query's
            row.
        positions: entries to fit and score, positions or a boolean mask [batch pos]. All share one probe, unless
            `per_position`.
        splits: name -> boolean mask [batch pos]; scores are given for each beside "all". Fits use all entries.
        test: what is held out: a fraction or a number of examples (drawn by `seed`), a mask [batch], indices or a
            slice.
        intercept: fit one; it is not penalised.
        ridge: None for least squares, of minimal norm where that is not unique; a penalty as in Σ(y − xw)² +
            ridge·|w|²; or several, of which each target takes the one with the least squared error in `folds`-fold
            cross-validation on the examples to fit, no example being in two folds.
        untrained: a model of the same architecture whose probes are a control. Edits do not act on it.
        shuffles: how many times targets are exchanged between examples (as a whole; among the examples to fit and among
            those held out) for a control, which is averaged over them. 0: none.
        interventions: in force in `model`, as are those of a block around.
        chunk: tokens per forward, at least one example. Results depend on it by rounding only.
        seed: of what is held out, folds and shuffles, and of the bootstrap over held-out examples (95%).
        draws: see `seed`.

    Source: least squares without intercept as in Gopalani, Lubana, Hu 2024, figure 6 and appendix K; the shuffled
    control and selectivity after Hewitt & Liang 2019 (arXiv:1909.03368).
    """
    surface = Surface.of(model)
    control = None if untrained is None else Surface.of(untrained)
    tokens, seed = read_run_tokens(tokens, "probe"), read_seed(seed, "probe")
    _check_count("shuffles", shuffles, 0)
    _check_count("draws", draws, 1)
    recipe = _read_recipe(intercept, ridge, folds)
    entries = read_entries(tokens, positions, splits, test, recipe.folds, seed, per_position)
    refuse_padding(surface, tokens, entries.used, "probe", "leave it out with positions=, a mask [batch pos]")
    wanted = read_targets(targets, kind, tokens)
    step = _examples_per_forward(chunk, tokens)
    alone = entries.positions if per_position else None
    spots = parse_sites(surface, sites, heads, alone)
    if isinstance(interventions, Intervention):
        interventions = (interventions,)
    seeds = np.random.SeedSequence([seed, 3]).generate_state(shuffles, np.uint64) >> 1
    groups = [entries.fit, entries.held_out]
    exchanged = [target.shuffled(groups, int(one)) for one in seeds for target in wanted]

    with intervene(model, *interventions):
        found = _probed(
            ActivationStream(surface, tokens, entries, step), spots, [*wanted, *exchanged], recipe
        )
    plain = None
    if control is not None:
        if parse_sites(control, sites, heads, alone) != spots:
            raise CircuitsError("probe: the untrained model has not the sites of the model")
        plain = _probed(ActivationStream(control, tokens, entries, step), spots, wanted, recipe)
    measured = [
        Measured(
            spot,
            target.name,
            found[spot].maps[index],
            found[spot].scores[index].counts(),
            found[spot].scores[index].found(),
            pooled([one.found() for one in found[spot].scores[index + len(wanted) :: len(wanted)]]),
            None if plain is None else plain[spot].scores[index].found(),
        )
        for spot in spots
        for index, target in enumerate(wanted)
    ]
    settings: dict[str, Any] = {
        "seed": seed,
        "draws": draws,
        "shuffles": shuffles,
        "intercept": intercept,
        "chunk": chunk,
    }
    settings |= {"ridge": list(recipe.ridges), "folds": recipe.folds}
    return ProbeResult(
        tabulate(measured, len(entries.held_out), len(entries.fit), seed, draws),
        {(one.spot.label, one.target): one.fitted for one in measured},
        _errors(found, wanted, recipe),
        settings,
    )


@dataclass(frozen=True)
class _Probed:
    """At one spot, per target."""

    maps: tuple[LinearMap, ...]
    errors: tuple[tuple[float, ...], ...]
    scores: list[Scores]


def _probed(
    stream: ActivationStream, spots: Sequence[ProbeSite], targets: Sequence[Target], recipe: FitSettings
) -> dict[ProbeSite, _Probed]:
    fitted = fit(stream, spots, targets, recipe)
    scores = score(stream, spots, targets, fitted)
    return {spot: _Probed(fitted[spot].maps, fitted[spot].errors, scores[spot]) for spot in spots}


def _errors(
    found: Mapping[ProbeSite, _Probed], targets: Sequence[Target], recipe: FitSettings
) -> pd.DataFrame:
    """What the choice of a penalty was made by; empty where there was none to make."""
    rows = [
        {"place": spot.label, "target": target.name, "ridge": ridge, "mse": error}
        for spot, one in found.items()
        for target, errors in zip(targets, one.errors, strict=False)
        for ridge, error in zip(recipe.ridges, errors, strict=True)
        if recipe.folds
    ]
    return pd.DataFrame(rows, columns=["place", "target", "ridge", "mse"])


def _read_recipe(intercept: Any, ridge: Any, folds: Any) -> FitSettings:
    """Folds are for choosing: of one penalty, or none, there are none."""
    given = 0.0 if ridge is None else ridge
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


def _examples_per_forward(chunk: Any, tokens: Tensor) -> int:
    if chunk == "auto":
        chunk = AUTO_CHUNK
    _check_count("chunk", chunk, 1)
    return max(1, int(chunk) // tokens[0].numel())
