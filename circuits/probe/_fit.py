"""Fits probes from sums over one pass of the examples, and scores them on held-out examples in a second pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating, recording
from circuits.model.state import running_rows
from circuits.model.surface import Surface
from circuits.probe._least_squares import NormalEquations
from circuits.probe._scores import Scores
from circuits.probe._sites import ProbeSite
from circuits.probe._split import Entries
from circuits.probe._targets import CLASSIFICATION, Target


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


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit. ridges: one penalty, or several from which cross-validation chooses for each target."""

    intercept: bool
    ridges: tuple[float, ...]
    folds: int


@dataclass(frozen=True)
class Fitted:
    """The fits at one site: a linear map per target, and cross-validated mean squared errors by target and penalty."""

    maps: tuple[LinearMap, ...]
    errors: tuple[tuple[float, ...], ...]


#: A function called with a chunk: (site, examples, chosen [example pos], x [entry d] float64, precision of x).
Use = Callable[[ProbeSite, Tensor, Tensor, Tensor, float], None]


@dataclass(frozen=True)
class ActivationStream:
    """Runs a model over a batch in chunks of `step` examples, without keeping activations."""

    surface: Surface
    prompts: Prompts
    entries: Entries
    step: int

    def each(self, sites: Sequence[ProbeSite], wanted: Tensor, use: Use) -> None:
        """Calls `use` with the vectors of the examples `wanted` at every site, chunk by chunk."""
        hooks = {site.hook for site in sites}
        with evaluating(self.surface.model), torch.no_grad(), recording(self.surface, hooks) as seen:
            for rows in wanted.split(self.step):
                seen.clear()
                # What an intervention holds for each example is cut to these rows.
                with running_rows(self.surface.model, rows, len(self.prompts)):
                    self.surface.call(self.prompts[rows])
                for site in sites:
                    if site.hook not in seen:
                        raise CircuitsError(f"probe: {site.hook} never fired; this model has it switched off")
                    chosen = self.entries.used[rows][:, site.positions]
                    x = site.vectors(seen[site.hook], self.prompts[rows])
                    # Apple's GPUs have no float64.
                    x = x.cpu() if x.device.type == "mps" else x
                    x = x[chosen.to(x.device)]
                    if not bool(x.isfinite().all()):
                        raise CircuitsError(
                            f"probe: {site.hook} is not finite everywhere; masked scores are not"
                        )
                    use(site, rows, chosen, x.double(), torch.finfo(x.dtype).eps)


def fit(
    stream: ActivationStream, sites: Sequence[ProbeSite], targets: Sequence[Target], settings: FitSettings
) -> dict[ProbeSite, Fitted]:
    """Fits probes for all sites and targets, in one pass over the examples to fit."""
    columns = _columns(targets)
    centre_y = torch.cat([target.centre for target in targets])
    sums: dict[ProbeSite, list[NormalEquations]] = {}

    def use(site: ProbeSite, examples: Tensor, chosen: Tensor, x: Tensor, eps: float) -> None:
        if site not in sums:
            centres = x.mean(0).nan_to_num(), centre_y.to(x.device)
            sums[site] = [NormalEquations.empty(*centres) for _ in range(max(1, settings.folds))]
        fold = stream.entries.fold[examples].unsqueeze(1).expand(chosen.shape)[chosen]
        target_values = [target.take(examples, site.positions, chosen) for target in targets]
        for number, part in enumerate(sums[site]):
            in_fold = fold == number
            x_in_fold = x[in_fold.to(x.device)]
            part.add(x_in_fold, eps)
            for target, columns_of_target, values in zip(targets, columns, target_values, strict=True):
                add = part.add_classes if target.kind == CLASSIFICATION else part.add_numbers
                add(columns_of_target, x_in_fold, values[in_fold].to(x.device))

    stream.each(sites, stream.entries.fit, use)
    return {site: _solve(parts, columns, settings) for site, parts in sums.items()}


def score(
    stream: ActivationStream,
    sites: Sequence[ProbeSite],
    targets: Sequence[Target],
    fitted: dict[ProbeSite, Fitted],
) -> dict[ProbeSite, list[Scores]]:
    """Scores fitted probes, in one pass over the held-out examples."""
    scores_by_site = {site: [Scores(target, site, stream.entries) for target in targets] for site in sites}

    def use(site: ProbeSite, examples: Tensor, chosen: Tensor, x: Tensor, eps: float) -> None:
        for scores, linear_map in zip(scores_by_site[site], fitted[site].maps, strict=True):
            scores.add(
                examples, chosen, x @ linear_map.weight.to(x.device) + linear_map.intercept.to(x.device)
            )

    stream.each(sites, stream.entries.held_out, use)
    return scores_by_site


def _columns(targets: Sequence[Target]) -> list[slice]:
    """Returns the columns of each target in the matrix of all targets."""
    columns: list[slice] = []
    for target in targets:
        start = columns[-1].stop if columns else 0
        columns.append(slice(start, start + target.width))
    return columns


def _solve(parts: list[NormalEquations], columns: list[slice], settings: FitSettings) -> Fitted:
    """Returns the linear map of each target, with the penalty that errs least over folds where there are several."""
    total = parts[0]
    for part in parts[1:]:
        total = total.with_sign(1, part)
    errors = torch.zeros(len(columns), len(settings.ridges), dtype=torch.float64)
    if settings.folds:
        for part in parts:
            other_folds = total.with_sign(-1, part).factored(settings.intercept)
            for index, ridge in enumerate(settings.ridges):
                error = part.squared_error(*other_folds.solve(ridge))
                errors[:, index] += torch.stack(
                    [error[columns_of_target].mean() for columns_of_target in columns]
                ).cpu()
    best = errors.argmin(1).tolist()
    factored = total.factored(settings.intercept)
    maps: dict[int, tuple[Tensor, Tensor]] = {
        index: factored.solve(settings.ridges[index]) for index in set(best)
    }
    rank = factored.rank
    linear_maps = tuple(
        LinearMap(
            maps[index][0][:, columns_of_target].cpu(),
            maps[index][1][columns_of_target].cpu(),
            settings.ridges[index],
            rank,
        )
        for index, columns_of_target in zip(best, columns, strict=True)
    )
    return Fitted(linear_maps, tuple(map(tuple, (errors / total.entries).tolist())))
