"""Losses of a model over every input of its task's grid, and of what key frequencies carry of its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy
import torch
from torch import Tensor

from circuits import run
from circuits.fourier import ModularSum, gini, transform
from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import read_npy
from interp_tasks.measurement.table import Row
from interp_tasks.papers.grid import Answer, GridInputs
from interp_tasks.papers.nanda import (
    ACCURACY,
    ALL,
    ALL_WEIGHTS,
    EXCLUDED,
    FITTED,
    GINI,
    HELD_OUT,
    LOSS,
    NONE,
    OF_W_E,
    RESTRICTED,
    SQUARES,
    TEST,
    TRAIN,
)

#: A pass of the model takes so many inputs: few enough that memory is used again.
INPUTS_PER_PASS = 2048
#: Held-out logits of each tenth of a split's inputs are fitted on the other nine tenths.
FOLDS = 10


@dataclass(frozen=True)
class GridModel:
    """A model over every input of its task's grid.

    Attributes:
        splits: ``grid`` (all of it), ``train`` and ``test`` -> rows of the grid; the last two only where it is known
            what the model was trained on.
        logits: ``[input output]`` where the output is read, float64.
        neurons: the last layer's, there, ``[input neuron]``.
        patterns: layer -> attention from there ``[input head key]``.
    """

    model: Any
    inputs: GridInputs
    splits: Mapping[str, Tensor]
    logits: Tensor
    neurons: Tensor
    patterns: Mapping[int, Tensor]

    @classmethod
    def of(cls, model: Any, inputs: GridInputs, splits: Mapping[str, Tensor]) -> GridModel:
        layers, at = range(model.cfg.n_layers), inputs.task.read_positions[-1]
        last, parts = f"mlp_post.{layers[-1]}", []
        device = next(model.parameters()).device
        for tokens in inputs.tokens.to(device).split(INPUTS_PER_PASS):
            output, seen = run(model, tokens, cache=[last, *(f"pattern.{layer}" for layer in layers)])
            patterns = [seen[f"pattern.{layer}"][:, :, at].cpu().clone() for layer in layers]
            parts.append((output[:, at].double().cpu(), seen[last][:, at].cpu().clone(), *patterns))
        logits, neurons, *patterns = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(model, inputs, splits, logits, neurons, dict(enumerate(patterns)))

    @property
    def at(self) -> int:
        """Returns the position where the output is read."""
        return int(self.inputs.task.read_positions[-1])

    def run(self, edits: Callable[[slice], Sequence[Any]], first: int | None = None) -> Tensor:
        """Returns the output ``[input output]`` under the edits that are made for each slice of the inputs.

        Args:
            first: run on so many inputs alone.
        """
        tokens, parts = self.inputs.tokens[:first].to(next(self.model.parameters()).device), []
        for start in range(0, len(tokens), INPUTS_PER_PASS):
            rows = slice(start, min(start + INPUTS_PER_PASS, len(tokens)))
            parts.append(run(self.model, tokens[rows], *edits(rows))[:, self.at].double().cpu())
        return torch.cat(parts)

    def scores(self, logits: Tensor, answer: Answer) -> dict[tuple[str, str], float]:
        """Returns mean cross-entropy (in nats) and accuracy of logits ``[input remainder]``, by (metric, split)."""
        right = answer.sum.remainders
        losses = (logits.double().logsumexp(1) - logits.gather(1, right[:, None])[:, 0]).clamp(min=0)
        values = {LOSS: losses, ACCURACY: (logits.argmax(1) == right).double()}
        return {
            (metric, split): float(each[rows].mean())
            for metric, each in values.items()
            for split, rows in self.splits.items()
            if len(rows)
        }

    def scored(
        self, answer: Answer, intervention: str, logits: Tensor, variant: str | None = None, **columns: Any
    ) -> Iterator[Row]:
        """Yields a row per metric and split of logits ``[input remainder]``, beside the unedited model's.

        Args:
            variant: what the rows are about; the answer by default.
            columns: others of each row.
        """
        clean = self.scores(self.logits[:, answer.classes], answer)
        for (metric, split), value in self.scores(logits, answer).items():
            baseline = clean[metric, split]
            row: Row = {"variant": variant or answer.name, "intervention": intervention, "metric": metric}
            row |= {"split": split, "value": value, **columns}
            yield row if intervention == NONE else row | {"baseline": baseline, "effect": value - baseline}


def measured(variant: str, metric: str, value: float, **columns: Any) -> Row:
    """Returns a row about the unedited model, over the complete grid."""
    return {"variant": variant, "intervention": NONE, "metric": metric, "value": value, **columns}


def of_frequency(answer: Answer, key: int) -> str:
    return f"{answer.name}, frequency {key}"


def w_l(model: Any) -> Tensor:
    """Returns W_out·W_U of the last layer, ``[neuron output]``, float64: W_L of Nanda et al. 2023, transposed."""
    if model.cfg.attn_only:
        raise UserError("progress needs a model with an MLP: W_L is the map from its neurons to the logits")
    return (model.W_out[-1].detach().double() @ model.W_U.detach().double()).cpu()


# ---- the inputs that a model was trained on


def splits_of(inputs: GridInputs, train: Any = None, *, own_split: bool = True) -> dict[str, Tensor]:
    """Returns the rows of the grid in each split.

    Args:
        train: the training inputs, as ``progress`` takes them; ``None``: those of the task's own split.
        own_split: whether the model was trained on the task's own split.
    """
    rows = torch.arange(len(inputs.tokens))
    if train is not None:
        in_train = read_training(train, len(rows))
        return {ALL: rows, TRAIN: rows[in_train], TEST: rows[~in_train]}
    own = (TRAIN, TEST) if own_split else ()
    return {ALL: rows} | {of: inputs.rows_of(inputs.task.sample(None, split=of).tokens) for of in own}


def read_training(train: Any, size: int) -> Tensor:
    """Returns a mask over the grid's inputs from indices, a mask, or the ``.npy`` file of either."""
    is_file = isinstance(train, (str, PathLike))
    array = read_npy(str(train), "--train-inputs") if is_file else numpy.asarray(train)
    if array.dtype == bool and array.size == size:
        return torch.from_numpy(array.reshape(-1).copy())
    are_indices = array.dtype.kind in "iu" and array.ndim == 1 and array.size
    if not are_indices or not 0 <= array.min() <= array.max() < size:
        raise UserError(
            f"--train-inputs: give indices 0 to {size - 1} of the grid's inputs, or a mask of all {size}; got "
            f"{array.dtype} {list(array.shape)}"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(array.astype(numpy.int64))] = True
    return mask


# ---- what every checkpoint is measured by


def loss_rows(on_grid: GridModel, answer: Answer, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses of the logits: unedited, restricted, without keys, and fitted by cosines.

    Restricted logits and cosines come a second time, held out: fitted on other inputs of the same split. Fitted on all
    inputs, they hold the right answers of a model that has only memorised its training inputs.
    """
    logits, total = on_grid.logits[:, answer.classes], answer.sum
    yield from on_grid.scored(answer, NONE, logits)
    if not keys:
        return
    cosines = total.cosines(logits)
    yield from on_grid.scored(answer, RESTRICTED, total.restricted(logits, keys))
    yield from on_grid.scored(answer, EXCLUDED, total.excluded(logits, keys))
    yield from on_grid.scored(answer, FITTED, cosines.fitted(keys))
    splits = {
        split: rows for split, rows in on_grid.splits.items() if split in (TRAIN, TEST) and len(rows) > 1
    }
    held_out = replace(on_grid, splits=splits)
    for name, fit in ((RESTRICTED, fitted_waves), (FITTED, fitted_cosines)):
        edited = logits.clone()
        for rows in splits.values():
            for part in folds(rows):
                edited[part] = fit(total, logits, keys, rows[~torch.isin(rows, part)], part)
        yield from held_out.scored(answer, name + HELD_OUT, edited)
    yield measured(answer.name, "variance of logits explained by cosines", cosines.explained(keys))


def folds(rows: Tensor) -> Sequence[Tensor]:
    """Returns rows in parts of equal size, drawn at random, the same ones each time."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order].tensor_split(min(FOLDS, len(rows)))


def fitted_waves(total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor) -> Tensor:
    """Returns the logits of some rows by a constant and the keys' waves, by least squares on the rows ``fit``."""
    waves = torch.cat([torch.ones(len(logits), 1).double(), *(total.waves(key) for key in keys)], 1)
    # Waves of a small modulus may depend on each other.
    return waves[rows] @ torch.linalg.lstsq(waves[fit], logits[fit], driver="gelsd").solution


def fitted_cosines(
    total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor
) -> Tensor:
    """Returns the logits of some rows by the keys' cosines of r - c, by least squares on the rows ``fit``."""
    on_fit, on_rows = (
        replace(total, coordinates=total.coordinates[chosen]).cosines(logits[chosen])
        for chosen in (fit, rows)
    )
    return replace(on_rows, by_difference=on_fit.by_difference).fitted(keys)


def gini_rows(on_grid: GridModel, keys: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    """Yields Gini coefficients of Fourier components: of W_L over each answer's classes, of W_E over the digits."""
    for name, answer in on_grid.inputs.answers.items():
        norms = transform(w_l(on_grid.model)[:, answer.classes], 1).norm(dim=0)
        yield measured(name, GINI, gini(norms), site="mlp_post")
        yield measured(name, "key frequencies", float(len(keys[name])))
    norms = transform(on_grid.model.W_E[list(on_grid.inputs.axes[0].values)].detach()).norm(dim=1)
    yield measured(OF_W_E, GINI, gini(norms), site="embed")


def weight_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields the sum of all squared weights."""
    total = sum(float(weight.detach().double().square().sum()) for weight in on_grid.model.parameters())
    yield measured(ALL_WEIGHTS, SQUARES, total)
