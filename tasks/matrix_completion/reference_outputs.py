"""Outputs of known methods on the examples of a batch, to compare models of matrix completion with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tasks.base import Batch
from tasks.matrix_completion import completion
from tasks.matrix_completion.convex import solve_by_cvxpy
from tasks.matrix_completion.nuclear_norm import least_nuclear_norm
from tasks.matrix_completion.recoverability import unrecoverable

#: The regularised problems of the paper (appendix B), and the two λ that only its code lists.
PENALTIES = (0.0005, 0.001, 0.0015, 0.00175, 0.002, 0.005, 0.01)
NUCLEAR_NORM = "nuclear norm"

#: What solves for the least nuclear norm.
Solver = Literal["batched", "cvxpy"]
#: A function from a batch to an output in the shape of a model's: [batch pos 1].
Method = Callable[[Batch], Tensor]
Filling = Callable[[Tensor, Tensor], Tensor]


def on_batches(fill: Filling, rows: int, columns: int) -> Method:
    """Turns a method of filling in matrices into one on batches; it computes in float64."""

    def output(batch: Batch) -> Tensor:
        values, hidden = as_matrices(batch, rows, columns)
        return fill(values, hidden).flatten(1)[..., None]

    return output


def as_matrices(batch: Batch, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns (values in float64, hidden), both [batch rows columns]; hidden values are NaN, as no method may read
    them.
    """
    hidden = batch.extras["hidden"].unflatten(1, (rows, columns))
    values = batch.targets.double().unflatten(1, (rows, columns))
    return values.masked_fill(hidden, float("nan")), hidden


def convex_baselines(rows: int, columns: int, solver: Solver = "batched") -> dict[str, Method]:
    """Returns completions of least nuclear norm, with equality and with each published penalty.

    Args:
        solver: all matrices at once with a certificate, or one at a time by CVXPY.
    """
    fill = partial(_nuclear_norm, solver=solver)
    solvers: dict[str, Filling] = {NUCLEAR_NORM: fill}
    for penalty in PENALTIES:
        solvers[f"{NUCLEAR_NORM}, lambda {penalty:g}"] = partial(fill, penalty=penalty)
    return {name: on_batches(fill, rows, columns) for name, fill in solvers.items()}


def candidate_methods(rows: int, columns: int, rank: int) -> dict[str, Method]:
    """Returns methods of filling in hidden entries, from zero to those that are exact at the true rank."""
    als, descent = completion.alternating_least_squares, completion.gradient_descent
    fillings: dict[str, Filling] = {
        "zero": completion.zeros,
        "nuclear norm": _nuclear_norm,
        "rank-1 ratio": completion.anchor_ratio,
        "row regression": completion.row_regression,
        "column regression": completion.column_regression,
        **{f"ALS, {counted(steps)}": partial(als, rank=rank, steps=steps) for steps in (1, 2, 5, 100)},
        "ALS, 100 steps, ridge 0.01": partial(als, rank=rank, steps=100, ridge=0.01),
        **{
            f"gradient descent, {counted(steps)}": partial(descent, rank=rank, steps=steps)
            for steps in (1, 10, 100)
        },
    }
    return {name: on_batches(fill, rows, columns) for name, fill in fillings.items()}


def counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def kinds_of_hidden_entries(batch: Batch, rows: int, columns: int, rank: int) -> dict[str, Tensor]:
    """Returns boolean ``[batch pos]`` by name. At rank 1: the entries that the observed ones determine, and the others.

    Among the determined ones, ``one anchor`` are those that three observed entries give (x_il · x_kj / x_kl), and
    ``longer path`` those that need more.
    """
    hidden = batch.extras["hidden"]
    if rank > 1:
        return {"hidden": hidden}
    values, matrices = as_matrices(batch, rows, columns)
    lost = unrecoverable(matrices).flatten(1)
    recoverable = hidden & ~lost
    near = completion.has_anchor(values.nan_to_num(), matrices).flatten(1)
    return {
        "recoverable": recoverable,
        "one anchor": recoverable & near,
        "longer path": recoverable & ~near,
        "unrecoverable": lost,
    }


def nuclear_norms(output: Tensor, rows: int, columns: int) -> Tensor:
    """Returns ‖output‖_* of each example, as a matrix."""
    matrices = output.squeeze(-1).unflatten(1, (rows, columns))
    return torch.linalg.svdvals(matrices.float() if matrices.dtype.itemsize < 4 else matrices).sum(1)


def _nuclear_norm(
    values: Tensor, hidden: Tensor, penalty: float | None = None, solver: Solver = "batched"
) -> Tensor:
    solve = least_nuclear_norm if solver == "batched" else solve_by_cvxpy
    return solve(values, hidden, penalty).matrices
