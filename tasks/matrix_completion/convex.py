"""Solves the problems of ``nuclear_norm`` by CVXPY, one at a time: slower, and independent of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from tasks.errors import TaskError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from tasks.matrix_completion.nuclear_norm import Completion

#: Number of matrices that a process gets at a time.
PIECE = 8


def solve_by_cvxpy(
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
    *,
    solver: str = "CLARABEL",
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Completion:
    """Solves :func:`least_nuclear_norm` by CVXPY (Diamond, Boyd 2016), as one problem compiled once with parameters.

    Args:
        solver: ``"CLARABEL"`` or ``"SCS"`` (CVXPY's default for a nuclear norm).
        processes: worker processes, each with a compiled problem of its own.
        progress: called as progress(done, total).

    Returns:
        The completions; ``bound`` is the objective that the solver reports, no certificate.

    Raises:
        TaskError: for a penalty that is not positive; for a matrix that the solver does not solve; without CVXPY.
    """
    try:
        import cvxpy  # noqa: F401  (before workers start, which could not say it)
    except ImportError:
        raise TaskError("solve_by_cvxpy needs CVXPY: pip install 'cvxpy>=1.4'") from None
    import torch

    from tasks.matrix_completion.nuclear_norm import Completion, check_problem, objective

    observed = check_problem(values, hidden, penalty)
    known = (~hidden).double().cpu().numpy()
    jobs = list(zip(observed.cpu().numpy(), known, strict=True))
    problem = (observed.shape[1], observed.shape[2], penalty, solver)
    solutions: list[tuple[Any, float]] = []
    for solved in _results(jobs, problem, processes):
        solutions.append(solved)
        if progress is not None:
            progress(len(solutions), len(jobs))
    matrices = torch.stack([torch.from_numpy(matrix) for matrix, _ in solutions])
    if penalty is None:
        matrices = torch.where(hidden.cpu(), matrices, observed.cpu())
    return Completion(
        matrices,
        objective(matrices, observed.cpu(), hidden.cpu(), penalty),
        torch.tensor([value for _, value in solutions], dtype=torch.float64),
    )


def _results(
    jobs: list[tuple[Any, Any]], problem: tuple[int, int, float | None, str], processes: int
) -> Iterator[tuple[Any, float]]:
    """Yields the solution of each problem in order, over several processes where that is asked for."""
    if processes < 2:
        _compile(*problem)
        yield from map(_solve, jobs)
        return
    # Not "fork", which would copy torch's threads in an unknown state. A fork server imports once for all processes,
    # and only in the first call.
    served = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if served else "spawn")
    if served:
        context.set_forkserver_preload([__name__, "cvxpy"])
    # An executor, as a pool would restart a worker that fails to start for ever.
    with ProcessPoolExecutor(processes, context, _compile, problem) as pool:
        yield from pool.map(_solve, jobs, chunksize=PIECE)


#: The compiled problem of this process.
_COMPILED: dict[str, Any] = {}


def _compile(rows: int, columns: int, penalty: float | None, solver: str) -> None:
    """Compiles the problem once, with mask and matrix as parameters (disciplined parametrised programming, Agrawal et
    al. 2019).
    """
    import cvxpy

    completion = cvxpy.Variable((rows, columns))
    weight = cvxpy.Parameter((rows, columns), nonneg=True)
    target = cvxpy.Parameter((rows, columns))
    norm = cvxpy.normNuc(completion)
    difference = cvxpy.multiply(weight, completion) - target
    if penalty is None:
        problem = cvxpy.Problem(cvxpy.Minimize(norm), [difference == 0])
    else:
        problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(difference) + penalty * norm))
    if not problem.is_dcp(dpp=True):
        raise AssertionError("the problem would be compiled again for every matrix")
    _COMPILED.update(
        problem=problem,
        completion=completion,
        weight=weight,
        target=target,
        penalised=penalty is not None,
        options=OPTIONS[solver] | {"solver": solver},
    )


#: Tolerances that leave an objective right to well below 1e-4.
OPTIONS: dict[str, dict[str, Any]] = {
    "CLARABEL": {},
    "SCS": {"eps_abs": 1e-7, "eps_rel": 1e-7, "max_iters": 100_000},
}
SOLVERS = tuple(OPTIONS)


def _solve(job: tuple[Any, Any]) -> tuple[Any, float]:
    """Solves one matrix, 0 where hidden, with its mask of observed entries; returns (completion, the solver's
    objective).
    """
    observed, known = job
    weight = known / max(known.sum(), 1.0) ** 0.5 if _COMPILED["penalised"] else known
    _COMPILED["weight"].value = weight
    _COMPILED["target"].value = weight * observed
    problem = _COMPILED["problem"]
    problem.solve(**_COMPILED["options"])
    if problem.status not in ("optimal", "optimal_inaccurate"):
        raise TaskError(f"{_COMPILED['options']['solver']} gives up on a matrix: {problem.status}")
    return _COMPILED["completion"].value, float(problem.value)
