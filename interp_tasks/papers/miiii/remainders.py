"""Computes classes of inputs: remainders of a task's modular answers, of its digits and of other linear forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import GridAxis, ModularAnswer

#: Metrics and other words of rows.
SHARE, UNIQUE, ADJUSTED = "share of variance", "share beyond the other answers", "share less chance"
TOGETHER = "all answers"
SERVING, BEST, SEVERAL, SPREAD, SPREAD_OF_ALL = (
    "neurons serving it",
    "neurons serving it most",
    "neurons serving several",
    "answers per neuron",
    "answers per neuron, of all",
)
DIGIT, DIGITS, ANSWER, OTHER_FORMS, NEURONS = ("digit", "digits", "answer", "other forms", "neurons")
ACCURACY, LOSS = "accuracy of ", "loss of "
OWN, OTHERS, SELECTIVE = "damage to itself", "damage to the others", "damage to itself minus the others"
SIZE = "taken away"
WITHOUT, CONTROL = "without ", "control of "


@dataclass(frozen=True)
class Inputs:
    """Inputs that lie on the task's grid.

    Attributes:
        tokens: ``[input pos]``.
        at: ``[input coordinate]``, the index of each coordinate's value in its axis.
        axes, answers: the task's.
    """

    tokens: Tensor
    at: Tensor
    axes: tuple[GridAxis, ...]
    answers: Mapping[str, ModularAnswer]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(axis.values) for axis in self.axes)

    def remainders(self, name: str) -> Tensor:
        """Returns the right remainder of an answer, ``[input]``."""
        answer = self.answers[name]
        return self.form(answer.coefficients, answer.modulus)

    def form(
        self, coefficients: tuple[int, ...], modulus: int, shuffles: tuple[Tensor, ...] | None = None
    ) -> Tensor:
        """Returns a linear form of the coordinates modulo ``modulus``, ``[input]``.

        Args:
            shuffles: of each coordinate the number that stands for each of its values instead.
        """
        import torch

        at = self.at
        if shuffles is not None:
            at = torch.stack([shuffle[column] for shuffle, column in zip(shuffles, at.T, strict=True)], 1)
        return (at * torch.tensor(coefficients)).sum(1) % modulus

    def digits(self, modulus: int, shuffles: tuple[Tensor, ...] | None = None) -> list[Tensor]:
        """Returns each coordinate modulo ``modulus``, ``[input]`` each."""
        each = [tuple(int(at == place) for at in range(len(self.axes))) for place in range(len(self.axes))]
        return [self.form(one, modulus, shuffles) for one in each]

    def other_forms(self, name: str, most: int) -> list[tuple[int, ...]]:
        """Returns at most ``most`` coefficient tuples, evenly spread, whose forms have other classes than the answer.

        Forms that are multiples of each other have the same classes.
        """
        answer = self.answers[name]
        q, (first, *rest) = answer.modulus, answer.coefficients
        if len(rest) != 1 or first % q == 0:
            return []
        every: list[tuple[int, ...]] = [(first, other) for other in range(1, q) if other != rest[0] % q]
        step = max(1, len(every) // most)
        return every[::step][:most]

    def shuffles(self, seed: int) -> tuple[Tensor, ...]:
        """Returns a random permutation of the values of each coordinate."""
        import torch

        from tasks import generator

        return tuple(
            torch.randperm(size, generator=generator(seed, "shuffled digits", place))
            for place, size in enumerate(self.sizes)
        )


def read_inputs(subject: LoadedCheckpoint, noun: str) -> Inputs:
    """Returns the complete grid of the checkpoint's task.

    Raises:
        UserError: for no task, for a task without modular answers.
    """
    task: Any = subject.task
    if task is None:
        raise UserError(f"{noun} needs a task: leave --tokens out, or give --task NAME instead")
    answers = task.modular_answers()
    if not answers:
        raise UserError(f"task {task.name!r} declares no modular answers, which {noun} is about")
    axes = task.grid_axes()
    every = Inputs(task.input_grid().tokens, located(task.input_grid().tokens, axes), axes, answers)
    return on_grid(every)


def sampled(subject: LoadedCheckpoint, inputs: Inputs) -> Inputs:
    """Returns the examples of the subject that are on the grid."""
    tokens = subject.tokens.cpu()
    return on_grid(Inputs(tokens, located(tokens, inputs.axes), inputs.axes, inputs.answers))


def on_grid(inputs: Inputs) -> Inputs:
    """Returns the inputs all of whose coordinates have a value in its axis."""
    rows = (inputs.at >= 0).all(1)
    return Inputs(inputs.tokens[rows], inputs.at[rows], inputs.axes, inputs.answers)


def located(tokens: Tensor, axes: tuple[GridAxis, ...]) -> Tensor:
    """Returns the index of each coordinate's value in its axis ``[input coordinate]``, -1 where it is not in it."""
    import torch

    columns = []
    for axis in axes:
        match = tokens[:, int(axis.position or 0)][:, None] == torch.tensor(axis.values)
        columns.append(torch.where(match.any(1), match.long().argmax(1), -1))
    return torch.stack(columns, 1)
