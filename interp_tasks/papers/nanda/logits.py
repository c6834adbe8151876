"""Measures what key frequencies carry of a model's logits: restricted and excluded loss, and the fitted cosines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import Row
from interp_tasks.papers.nanda.inputs import NONE, TEST, TRAIN, Answer, Inputs, measured, scored

if TYPE_CHECKING:
    from torch import Tensor

    from circuits.fourier import ModularSum

#: What was done to the logits.
RESTRICTED, EXCLUDED = "restricted to key frequencies", "key frequencies excluded"
FITTED = "cosines of key frequencies"
#: Fitted on other inputs of the same split than those that are scored; the published ones are fitted on all inputs.
RESTRICTED_HELD_OUT, FITTED_HELD_OUT = f"{RESTRICTED}, held out", f"{FITTED}, held out"
GINI, SQUARES, ALL_WEIGHTS = "gini", "sum of squared weights", "all weights"
#: Held-out logits of each tenth of a split's inputs are fitted on the other nine tenths.
FOLDS = 10


def of_frequency(answer: str, key: int) -> str:
    return f"{answer}, frequency {key}"


def rows_of_losses(inputs: Inputs, answer: Answer, logits: Tensor, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses of the logits ``[input remainder]``: unedited, restricted, without keys, and fitted."""
    clean = inputs.scores(logits, answer)
    yield from scored(answer.name, NONE, clean)
    if not keys:
        return
    total = answer.sum
    fit = total.cosines(logits)
    edits = {RESTRICTED: total.restricted(logits, keys), EXCLUDED: total.excluded(logits, keys)}
    for name, edited in (edits | {FITTED: fit.fitted(keys)}).items():
        yield from scored(answer.name, name, inputs.scores(edited, answer), clean)
    yield from rows_of_held_out(inputs, answer, logits, keys, clean)
    yield measured(answer.name, "variance of logits explained by cosines", fit.explained(keys))


def rows_of_held_out(
    inputs: Inputs, answer: Answer, logits: Tensor, keys: Sequence[int], clean: dict[tuple[str, str], float]
) -> Iterator[Row]:
    """Yields scores of restricted logits and cosines, both fitted on other inputs of the same split.

    Fitted on all inputs, they hold the right answers of a model that has only memorised its training inputs.
    """
    import torch

    splits = {
        split: rows for split, rows in inputs.splits.items() if split in (TRAIN, TEST) and len(rows) > 1
    }
    held_out = replace(inputs, splits=splits)
    for name, fit in ((RESTRICTED_HELD_OUT, restricted), (FITTED_HELD_OUT, cosines)):
        edited = logits.double().clone()
        for rows in splits.values():
            for part in folds(rows):
                edited[part] = fit(answer.sum, logits.double(), keys, rows[~torch.isin(rows, part)], part)
        yield from scored(answer.name, name, held_out.scores(edited, answer), clean)


def folds(rows: Tensor) -> Sequence[Tensor]:
    """Returns rows in parts of equal size, drawn at random, the same ones each time."""
    import torch

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order].tensor_split(min(FOLDS, len(rows)))


def restricted(total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor) -> Tensor:
    """Returns the logits of some rows by a constant and the keys' waves, by least squares on the rows ``fit``."""
    import torch

    waves = torch.cat([torch.ones(len(logits), 1).double(), *(total.waves(key) for key in keys)], 1)
    # Waves of a small modulus may depend on each other.
    solution = torch.linalg.lstsq(waves[fit], logits[fit], driver="gelsd").solution
    return waves[rows] @ solution


def cosines(total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor) -> Tensor:
    """Returns the logits of some rows by the keys' cosines of r - c, by least squares on the rows ``fit``."""
    on_fit, on_rows = (
        replace(total, coordinates=total.coordinates[chosen]).cosines(logits[chosen])
        for chosen in (fit, rows)
    )
    return replace(on_rows, by_difference=on_fit.by_difference).fitted(keys)


def rows_of_weights(model: Any, digits: Sequence[int]) -> Iterator[Row]:
    """Yields the Gini coefficient of W_E's Fourier components over the digits, and the sum of squared weights."""
    from circuits.fourier import gini, transform

    norms = transform(model.W_E[list(digits)].detach()).norm(dim=1)
    yield measured("W_E", GINI, gini(norms), site="embed")
    total = sum(float(weight.detach().double().square().sum()) for weight in model.parameters())
    yield measured(ALL_WEIGHTS, SQUARES, total)
