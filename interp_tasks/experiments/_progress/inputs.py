"""The complete grid of a task's inputs, the modular answers there, and losses over its splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._progress.table import ACCURACY, LOSS, SPLITS
from interp_tasks.measurement.subjects import read_npy

if TYPE_CHECKING:
    from torch import Tensor

    from circuits.fourier import ModularSum
    from tasks import Task

ALL, TRAIN, TEST = SPLITS
#: A pass of the model takes so many inputs: few enough that memory is used again.
INPUTS_PER_PASS = 2048


@dataclass(frozen=True)
class Answer:
    """One modular answer of a task.

    Attributes:
        sum: the answer at every input of the grid.
        classes: ``[remainder]``: the output column of each.
    """

    name: str
    sum: ModularSum
    classes: Tensor


@dataclass(frozen=True)
class Inputs:
    """Every input of a task's grid, once.

    Attributes:
        tokens: ``[input pos]``, in the order of the grid's cells.
        position: where the output is read.
        operands: the position of each coordinate.
        sizes: how many values each coordinate has.
        splits: ``grid`` (all of it), ``train`` and ``test`` -> rows of the grid; the last two only where it is known
            what the model was trained on.
    """

    tokens: Tensor
    position: int
    operands: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: Mapping[str, Tensor]
    answers: tuple[Answer, ...]

    def losses(self, logits: Tensor, answer: Answer) -> Tensor:
        """Returns cross-entropy ``[input]``, in nats and float64, of logits ``[input remainder]``."""
        right = logits.gather(1, answer.sum.remainders[:, None])[:, 0]
        return (logits.double().logsumexp(1) - right).clamp(min=0)

    def scores(self, logits: Tensor, answer: Answer) -> dict[tuple[str, str], float]:
        """Returns mean ``loss`` and ``accuracy`` by (metric, split)."""
        values = {
            LOSS: self.losses(logits, answer),
            ACCURACY: (logits.argmax(1) == answer.sum.remainders).double(),
        }
        return {
            (metric, split): float(each[rows].mean())
            for metric, each in values.items()
            for split, rows in self.splits.items()
            if len(rows)
        }


def read_inputs(
    task: Task | None, chosen: Sequence[str] = (), train: Any = None, *, own_split: bool = True
) -> Inputs:
    """Returns the grid of a task, with all its modular answers or the chosen ones.

    Args:
        train: the training inputs, as ``progress`` takes them; ``None``: those of the task's own split.
        own_split: whether the model was trained on the task's own split.

    Raises:
        UserError: for no task, for one without modular answers, for an answer it does not have.
    """
    import torch

    from circuits.fourier import Grid, ModularSum

    if task is None:
        raise UserError(
            "progress needs a task with modular answers: leave --tokens out, or give --task NAME instead"
        )
    declared = task.modular_answers()
    if not declared or not hasattr(task, "input_grid"):
        raise UserError(
            f"task {task.name!r} declares no modular answers over a grid of inputs (modular_answers, input_grid)"
        )
    wrong = [name for name in chosen if name not in declared]
    if wrong:
        raise UserError(f"--answer {wrong[0]!r}: task {task.name!r} has {', '.join(declared)}")
    every: Any = task
    tokens = every.input_grid().tokens
    axes = task.grid_axes()
    grid = Grid.of_inputs(
        tokens, {axis.name: int(axis.position or 0) for axis in axes}, [axis.values for axis in axes]
    )
    tokens = tokens[list(grid.rows or ())]
    rows = {ALL: torch.arange(len(tokens))}
    if train is not None:
        in_train = read_training(train, len(tokens))
        rows |= {TRAIN: rows[ALL][in_train], TEST: rows[ALL][~in_train]}
    elif own_split:
        rows |= {split: rows_of(tokens, task.sample(None, split=split).tokens) for split in (TRAIN, TEST)}  # type: ignore[arg-type]
    answers = tuple(
        Answer(
            name,
            ModularSum(grid.coordinates(), tuple(one.coefficients), one.modulus),
            torch.tensor(one.classes),
        )
        for name, one in declared.items()
        if not chosen or name in chosen
    )
    operands = tuple(int(axis.position or 0) for axis in axes)
    return Inputs(tokens, task.read_positions[-1], operands, grid.sizes, rows, answers)


def read_training(train: Any, size: int) -> Tensor:
    """Returns a mask over the grid's inputs from indices, a mask, or the ``.npy`` file of either.

    Raises:
        UserError: for anything else, and for indices outside the grid.
    """
    import numpy
    import torch

    array = (
        read_npy(str(train), "--train-inputs") if isinstance(train, (str, PathLike)) else numpy.asarray(train)
    )
    if array.dtype == bool and array.size == size:
        return torch.from_numpy(array.reshape(-1).copy())
    if (
        array.dtype.kind not in "iu"
        or array.ndim != 1
        or not array.size
        or not 0 <= array.min() <= array.max() < size
    ):
        raise UserError(
            f"--train-inputs: give indices 0 to {size - 1} of the grid's inputs, or a mask of all {size}; got "
            f"{array.dtype} {list(array.shape)}"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(array.astype(numpy.int64))] = True
    return mask


def rows_of(grid: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rows of the grid that examples are in, ``[example]``; those that are not on it are left out."""
    import torch

    row_of_input = {tuple(row): index for index, row in enumerate(grid.tolist())}
    return torch.tensor(
        [row_of_input[row] for row in map(tuple, tokens.tolist()) if row in row_of_input], dtype=torch.long
    )


def passes(model: Any, inputs: Inputs) -> Iterator[Tensor]:
    """Yields the tokens, a pass at a time, where the model is."""
    yield from inputs.tokens.to(next(model.parameters()).device).split(INPUTS_PER_PASS)
