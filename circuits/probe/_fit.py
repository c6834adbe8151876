"""The two streamed passes of a probe: sums that fit it, then scores on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.errors import CircuitsError
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
        weight: [d k], for d numbers at the site (heads side by side) and k of the target, or classes; each column is a
            direction at the site.
        intercept: [k], zero where none was fitted.
        ridge: the penalty, 0 for least squares.
        rank: how many directions of the site held more than rounding. All float64, on the CPU.
    """

    weight: Tensor
    intercept: Tensor
    ridge: float
    rank: int

    def predict(self, x: Tensor) -> Tensor:
        """[... k] from activations [... d]; of classes the one with the largest number is the prediction."""
        return x.to(self.weight) @ self.weight + self.intercept


@dataclass(frozen=True)
class FitSettings:
    """How a probe is fitted. ridges: one penalty, or several to choose from, target by target, over the folds."""

    intercept: bool
    ridges: tuple[float, ...]
    folds: int


@dataclass(frozen=True)
class Fitted:
    """maps: one per target. errors: per target the held-out mean squared error of each penalty, over all folds."""

    maps: tuple[LinearMap, ...]
    errors: tuple[tuple[float, ...], ...]


#: What is done with a chunk: (spot, examples, chosen [example pos], x [entry d] float64, rounding error of x).
Use = Callable[[ProbeSite, Tensor, Tensor, Tensor, float], None]


@dataclass(frozen=True)
class ActivationStream:
    """Runs a model over a batch in chunks of `step` examples; nothing of a chunk is kept."""

    surface: Surface
    tokens: Tensor
    entries: Entries
    step: int

    def each(self, spots: Sequence[ProbeSite], wanted: Tensor, use: Use) -> None:
        """Hand the vectors at every spot, of the examples `wanted`, to `use`, chunk by chunk."""
        asked = torch.zeros(len(self.tokens), dtype=torch.bool)
        asked[wanted] = True
        hooks = {spot.hook for spot in spots}
        with evaluating(self.surface.model), torch.no_grad(), recording(self.surface, hooks) as seen:
            for start in range(0, len(self.tokens), self.step):
                rows = slice(start, min(start + self.step, len(self.tokens)))
                inside = asked[rows].nonzero().flatten()
                if not len(inside):
                    continue
                seen.clear()
                # The whole chunk, whoever is asked for: an intervention may hold something for each example.
                with running_rows(self.surface.model, rows, len(self.tokens)):
                    self.surface.model(self.tokens[rows].clone())
                for spot in spots:
                    if spot.hook not in seen:
                        raise CircuitsError(f"probe: {spot.hook} never fired; this model has it switched off")
                    chosen = self.entries.used[inside + start][:, spot.positions]
                    x = spot.vectors(seen[spot.hook], rows.stop - rows.start)
                    # Apple's GPUs have no float64.
                    x = x.cpu() if x.device.type == "mps" else x
                    x = x[inside.to(x.device)][chosen.to(x.device)]
                    if not bool(x.isfinite().all()):
                        raise CircuitsError(
                            f"probe: {spot.hook} is not finite everywhere; masked scores are not"
                        )
                    use(spot, inside + start, chosen, x.double(), torch.finfo(x.dtype).eps)


def fit(
    stream: ActivationStream, spots: Sequence[ProbeSite], targets: Sequence[Target], recipe: FitSettings
) -> dict[ProbeSite, Fitted]:
    """One pass over the examples to fit, for all spots and targets."""
    columns = _columns(targets)
    sums: dict[ProbeSite, list[NormalEquations]] = {}

    def use(spot: ProbeSite, examples: Tensor, chosen: Tensor, x: Tensor, eps: float) -> None:
        if spot not in sums:
            empty = (x.shape[1], columns[-1].stop, x.device)
            sums[spot] = [NormalEquations.empty(*empty) for _ in range(max(1, recipe.folds))]
        fold = stream.entries.fold[examples].unsqueeze(1).expand(chosen.shape)[chosen]
        taken = [target.take(examples, spot.positions, chosen) for target in targets]
        for number, part in enumerate(sums[spot]):
            mine = fold == number
            mine_x = x[mine.to(x.device)]
            part.add(mine_x, eps)
            for target, at, values in zip(targets, columns, taken, strict=True):
                add = part.add_classes if target.kind == CLASSIFICATION else part.add_numbers
                add(at, mine_x, values[mine].to(x.device))

    stream.each(spots, stream.entries.fit, use)
    return {spot: _solved(parts, columns, recipe) for spot, parts in sums.items()}


def score(
    stream: ActivationStream,
    spots: Sequence[ProbeSite],
    targets: Sequence[Target],
    fitted: dict[ProbeSite, Fitted],
) -> dict[ProbeSite, list[Scores]]:
    """One pass over the held-out examples."""
    found = {spot: [Scores(target, spot, stream.entries) for target in targets] for spot in spots}

    def use(spot: ProbeSite, examples: Tensor, chosen: Tensor, x: Tensor, eps: float) -> None:
        for scores, one in zip(found[spot], fitted[spot].maps, strict=True):
            scores.add(examples, chosen, x @ one.weight.to(x.device) + one.intercept.to(x.device))

    stream.each(spots, stream.entries.held_out, use)
    return found


def _columns(targets: Sequence[Target]) -> list[slice]:
    """Where each target's columns stand among those of all."""
    found: list[slice] = []
    for target in targets:
        start = found[-1].stop if found else 0
        found.append(slice(start, start + target.width))
    return found


def _solved(parts: list[NormalEquations], columns: list[slice], recipe: FitSettings) -> Fitted:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.with_sign(1, part)
    errors = torch.zeros(len(columns), len(recipe.ridges), dtype=torch.float64)
    if recipe.folds:
        for part in parts:
            rest = whole.with_sign(-1, part).factored(recipe.intercept)
            for index, ridge in enumerate(recipe.ridges):
                error = part.squared_error(*rest.solve(ridge))
                errors[:, index] += torch.stack([error[at].mean() for at in columns]).cpu()
    best = errors.argmin(1).tolist()
    factored = whole.factored(recipe.intercept)
    maps: dict[int, tuple[Tensor, Tensor]] = {
        index: factored.solve(recipe.ridges[index]) for index in set(best)
    }
    rank = factored.rank
    found = tuple(
        LinearMap(maps[index][0][:, at].cpu(), maps[index][1][at].cpu(), recipe.ridges[index], rank)
        for index, at in zip(best, columns, strict=True)
    )
    return Fitted(found, tuple(map(tuple, (errors / whole.entries).tolist())))
