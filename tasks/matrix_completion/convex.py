"""Solves the problems of ``nuclear_norm`` by CVXPY, one at a time: slower, and independent of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tasks.errors import TaskError
from tasks.matrix_completion.nuclear_norm import Completion, check_problem, objective

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

#: Tolerances that leave an objective right to well below 1e-4.
OPTIONS: dict[str, dict[str, Any]] = {
    "CLARABEL": {},
    "SCS": {"eps_abs": 1e-7, "eps_rel": 1e-7, "max_iters": 100_000},
}


def solve_by_cvxpy(
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
    solver: str = "CLARABEL",
) -> Completion:
    """Solves :func:`least_nuclear_norm` by CVXPY (Diamond, Boyd 2016), as one problem compiled once with parameters.

    Returns the completions; ``bound`` is the objective that the solver reports, no certificate.

    Args:
        solver: ``"CLARABEL"`` or ``"SCS"`` (CVXPY's default for a nuclear norm).

    Raises:
        TaskError: for a penalty that is not positive; for a matrix that the solver does not solve.
    """
    import cvxpy

    observed, known = check_problem(values, hidden, penalty).cpu(), (~hidden).double().cpu()
    shape = observed.shape[1:]
    completion, target = cvxpy.Variable(shape), cvxpy.Parameter(shape)
    weight = cvxpy.Parameter(shape, nonneg=True)
    norm, difference = cvxpy.normNuc(completion), cvxpy.multiply(weight, completion) - target
    if penalty is None:
        problem = cvxpy.Problem(cvxpy.Minimize(norm), [difference == 0])
    else:
        problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(difference) + penalty * norm))
    matrices, bounds = torch.empty_like(observed), observed.new_empty(len(observed))
    for at, (matrix, mask) in enumerate(zip(observed, known, strict=True)):
        scale = 1.0 if penalty is None else max(float(mask.sum()), 1.0) ** 0.5
        weight.value, target.value = (mask / scale).numpy(), (mask / scale * matrix).numpy()
        problem.solve(solver=solver, **OPTIONS[solver])
        if problem.status not in ("optimal", "optimal_inaccurate"):
            raise TaskError(f"{solver} gives up on a matrix: {problem.status}")
        matrices[at], bounds[at] = torch.from_numpy(completion.value), float(problem.value)
    if penalty is None:
        matrices = torch.where(hidden.cpu(), matrices, observed)
    return Completion(matrices, objective(matrices, observed, hidden.cpu(), penalty), bounds)
