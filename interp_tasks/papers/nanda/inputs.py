"""The complete grid of a task's inputs, the modular answers there, losses over its splits, activations there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of
from interp_tasks.measurement.subjects import read_npy
from interp_tasks.measurement.table import Row

if TYPE_CHECKING:
    from torch import Tensor

    from circuits.fourier import ModularSum
    from tasks import Task

LOSS, ACCURACY = "loss", "accuracy"
#: All inputs of the grid, and those that the model was, and was not, trained on.
SPLITS = ALL, TRAIN, TEST = "grid", "train", "test"
#: What a row is about whose model is as it is.
NONE = "none"
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
        operands, sizes: the position of each coordinate, and how many values it has.
        splits: ``grid`` (all of it), ``train`` and ``test`` -> rows of the grid; the last two only where it is known
            what the model was trained on.
    """

    tokens: Tensor
    position: int
    operands: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: Mapping[str, Tensor]
    answers: tuple[Answer, ...]

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


def measured(variant: str, metric: str, value: float, **more: Any) -> Row:
    """Returns a row about the unedited model, over the complete grid."""
    return {"variant": variant, "intervention": NONE, "metric": metric, "value": value, **more}


def scored(
    variant: str,
    intervention: str,
    scores: dict[tuple[str, str], float],
    clean: dict[tuple[str, str], float] | None = None,
    engine: str | None = None,
    **more: Any,
) -> Iterator[Row]:
    """Yields a row per metric and split, beside the unedited model's where something was edited."""
    for (metric, split), value in scores.items():
        row: Row = {"variant": variant, "intervention": intervention, "metric": metric, "split": split}
        row |= {"value": value, "engine": engine, **more}
        if clean is not None:
            row |= {"baseline": clean[metric, split], "effect": value - clean[metric, split]}
        yield row


def read_inputs(task: Task | None, train: Any = None, *, own_split: bool = True) -> Inputs:
    """Returns the grid of a task, with its modular answers.

    Args:
        train: the training inputs, as ``progress`` takes them; ``None``: those of the task's own split.
        own_split: whether the model was trained on the task's own split.

    Raises:
        UserError: for no task or for one without modular answers.
    """
    import torch

    from circuits.fourier import ModularSum

    if task is None:
        raise UserError(
            "progress needs a task with modular answers: leave --tokens out, or give --task NAME instead"
        )
    declared = task.modular_answers()
    if not declared or not hasattr(task, "input_grid"):
        raise UserError(
            f"task {task.name!r} declares no modular answers over a grid of inputs (modular_answers, input_grid)"
        )
    axes, tokens = task.grid_axes(), task.input_grid().tokens
    operands = tuple(int(axis.position or 0) for axis in axes)
    grid = grid_of(axes, tokens)
    tokens = tokens[list(grid.rows or ())]
    rows = {ALL: torch.arange(len(tokens))}
    if train is not None:
        in_train = read_training(train, len(tokens))
        rows |= {TRAIN: rows[ALL][in_train], TEST: rows[ALL][~in_train]}
    elif own_split:
        rows |= {split: rows_of(tokens, task.sample(None, split=split).tokens) for split in (TRAIN, TEST)}  # type: ignore[arg-type]
    coordinates = grid.coordinates()
    answers = tuple(
        Answer(name, ModularSum(coordinates, tuple(one.coefficients), one.modulus), torch.tensor(one.classes))
        for name, one in declared.items()
    )
    return Inputs(tokens, task.read_positions[-1], operands, grid.sizes, rows, answers)


def read_training(train: Any, size: int) -> Tensor:
    """Returns a mask over the grid's inputs from indices, a mask, or the ``.npy`` file of either.

    Raises:
        UserError: for anything else, and for indices outside the grid.
    """
    import numpy
    import torch

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


def rows_of(grid: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rows of the grid that examples are in, ``[example]``; those that are not on it are left out."""
    import torch

    row_of_input = {tuple(row): index for index, row in enumerate(grid.tolist())}
    found = [row_of_input[row] for row in map(tuple, tokens.tolist()) if row in row_of_input]
    return torch.tensor(found, dtype=torch.long)


def passes(model: Any, inputs: Inputs) -> Iterator[Tensor]:
    """Yields the tokens, a pass at a time, where the model is."""
    yield from inputs.tokens.to(next(model.parameters()).device).split(INPUTS_PER_PASS)


def activations(model: Any, inputs: Inputs, sites: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns float64 logits ``[input output]``, and at the read position the last layer's neurons and all patterns."""
    import torch

    from circuits import run

    layers = model.cfg.n_layers
    named = [f"mlp_post.{layers - 1}"] if "mlp_post" in sites else []
    named += [f"pattern.{layer}" for layer in range(layers)] if "pattern" in sites else []
    logits: list[Tensor] = []
    values: dict[str, list[Tensor]] = {name: [] for name in named}
    for tokens in passes(model, inputs):
        output, seen = run(model, tokens, cache=named)
        logits.append(output[:, inputs.position].double().cpu())
        for name in named:
            # A pattern is [input head query key], neurons are [input pos neuron].
            axis = 2 if name.startswith("pattern") else 1
            values[name].append(seen[name].select(axis, inputs.position).cpu().clone())
    return torch.cat(logits), {name: torch.cat(parts) for name, parts in values.items()}


def put_at(position: int, values: Tensor, axis: int) -> Any:
    """Returns a function that puts values at one position of an activation, whose ``axis`` has the positions."""

    def put(old: Tensor) -> Tensor:
        return old.index_copy(axis, old.new_tensor([position]).long(), values.to(old).unsqueeze(axis))

    return put
