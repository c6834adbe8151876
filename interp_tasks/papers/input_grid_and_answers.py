"""Every input of a task's grid, once, and the modular answers there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from circuits.fourier import Grid, ModularSum
    from tasks import GridAxis


@dataclass(frozen=True)
class AnswerOnGrid:
    """One modular answer of a task.

    Attributes:
        sum: the answer at every input of the grid.
        classes: ``[remainder]``: the output column of each.
    """

    name: str
    sum: ModularSum
    classes: Tensor


@dataclass(frozen=True)
class GridInputs:
    """Every input of a task's grid, once.

    Attributes:
        tokens: ``[input pos]``, in the order of the grid's cells; inputs with a digit that is on no axis, such as 0
            where digits are multiplied, are left out.
    """

    task: Any
    axes: tuple[GridAxis, ...]
    grid: Grid
    tokens: Tensor

    @classmethod
    def of(cls, task: Any, caller_name: str, coordinates: int | None = None) -> GridInputs:
        """Returns the inputs of a task.

        Args:
            caller_name: whose inputs they are, for the error.
            coordinates: how many the grid must have; any number by default.
        """
        from circuits.fourier import Grid

        axes = () if task is None else task.grid_axes()
        known = bool(axes) and all(axis.position is not None for axis in axes) and hasattr(task, "input_grid")
        if not known or coordinates not in (None, len(axes)):
            of = "" if coordinates is None else f" of {coordinates} coordinates"
            raise UserError(
                f"{caller_name} needs a task with a grid of inputs{of} (grid_axes with positions, and input_grid())"
            )
        tokens = task.input_grid().tokens
        found = fourier_grid_of_inputs(axes, tokens)
        return cls(task, axes, Grid(found.axes), tokens[list(found.rows or ())])

    @property
    def operand_positions(self) -> list[int]:
        """Returns the position of each coordinate in the tokens."""
        return [int(axis.position or 0) for axis in self.axes]

    def rows_on_grid(self, tokens: Tensor) -> Tensor:
        """Returns the rows that examples ``[example pos]`` are; those that are not on the grid are left out."""
        import torch

        row_of_input = {tuple(row): at for at, row in enumerate(self.tokens.tolist())}
        found = [row_of_input[row] for row in map(tuple, tokens.tolist()) if row in row_of_input]
        return torch.tensor(found, dtype=torch.long)

    @cached_property
    def answers(self) -> Mapping[str, AnswerOnGrid]:
        """Returns the modular answers by name."""
        import torch

        from circuits.fourier import ModularSum

        declared, at = self.task.modular_answers(), self.grid.coordinates()
        if not declared:
            raise UserError(f"task {self.task.name!r} declares no modular answers (modular_answers)")
        return {
            name: AnswerOnGrid(
                name, ModularSum(at, tuple(one.coefficients), one.modulus), torch.tensor(one.classes)
            )
            for name, one in declared.items()
        }


def fourier_grid_of_inputs(axes: Sequence[GridAxis], tokens: Tensor) -> Grid:
    """Returns the grid of the coordinates in a task's inputs, with the rows of ``tokens`` that its cells are."""
    from circuits.fourier import Grid

    positions = {axis.name: int(axis.position or 0) for axis in axes}
    return Grid.of_inputs(tokens, positions, [axis.values for axis in axes])
