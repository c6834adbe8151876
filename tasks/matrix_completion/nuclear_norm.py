"""Completes matrices with the least nuclear norm, a batch at once, each with a certificate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.errors import TaskError

#: Number of matrices that are solved together: more do not fit a processor's cache.
CHUNK = 64
#: Largest number of steps; no known problem needs half as many.
MAX_STEPS = 100
#: Step length as a share of that to the boundary of the cone, and share of the duality gap that a step aims to leave.
TO_THE_EDGE, SIGMA = 0.95, 0.2
JITTER = 1e-9


@dataclass(frozen=True)
class Completion:
    """Solutions of one convex problem per matrix.

    Attributes:
        matrices: the completions.
        objective: its minimised value.
        bound: lower bound on the objective (the value of a feasible point of the dual).
    """

    matrices: Float[Tensor, "batch rows columns"]
    objective: Float[Tensor, " batch"]
    bound: Float[Tensor, " batch"]


def least_nuclear_norm(
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
    tolerance: float = 1e-5,
) -> Completion:
    """Returns the completion U of least nuclear norm ‖U‖_*, the sum of its singular values.

    Candès, Recht 2009: minimise ‖U‖_* where U agrees with the observed entries. With a ``penalty`` λ: minimise
    mean over observed entries of (U − X)² + λ ‖U‖_* (over no entries the mean is 0); Gopalani, Lubana, Hu 2024,
    section 3.2 and appendix B.

    A primal-dual interior-point method in float64 on the usual semidefinite form, minimise ½ tr W, W ⪰ 0, with U the
    upper right block of W; its dual is to maximise ⟨Y, X⟩ − λ |Ω| ‖Y‖² / 4 over Y with ‖Y‖₂ ≤ 1 that are 0 at
    hidden entries, times λ where there is one. Steps are Newton's, in the direction of Helmberg, Rendl,
    Vanderbei, Wolkowicz 1996.

    Args:
        values: hidden entries are not read.
        penalty: λ; ``None``: observed entries are kept.
        tolerance: objective − bound is at most this, relative to the objective.

    Raises:
        TaskError: for a penalty that is not positive; for observed values that are not finite.
    """
    observed = check_and_zero_fill(values, hidden, penalty)
    chunks = [
        _solve_chunk(x, h, penalty, tolerance)
        for x, h in zip(observed.split(CHUNK), hidden.split(CHUNK), strict=True)
    ]
    matrices, objective, bound = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return Completion(matrices, objective, bound)


def check_and_zero_fill(values: Tensor, hidden: Tensor, penalty: float | None) -> Tensor:
    """Returns the observed values in float64, 0 where hidden."""
    if penalty is not None and not penalty > 0:
        raise TaskError(f"penalty {penalty:g} must be above 0 (None keeps the observed entries as they are)")
    observed = values.double().masked_fill(hidden, 0)
    if not observed.isfinite().all():
        raise TaskError("observed values must be finite numbers")
    return observed


def nuclear_norm_objective(
    matrices: Float[Tensor, "batch rows columns"],
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
) -> Float[Tensor, " batch"]:
    """Returns the objective that :func:`least_nuclear_norm` minimises."""
    norm = torch.linalg.svdvals(matrices).sum(1)
    if penalty is None:
        return norm
    error = (matrices - values).square().masked_fill(hidden, 0).sum((1, 2))
    return error / (~hidden).sum((1, 2)).clamp(min=1) + penalty * norm


def _solve_chunk(
    observed: Tensor, hidden: Tensor, penalty: float | None, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (matrices, objective, bound) of one chunk; ``observed`` is 0 at hidden entries."""
    largest = torch.linalg.svdvals(observed)[:, 0]
    scale = torch.where(largest > 0, largest, 1.0)[:, None, None]
    known = (~hidden).sum((1, 2)).double()
    # In units of the largest singular value of the observed matrix.
    soft = torch.zeros_like(known) if penalty is None else penalty * known / 2 / scale[:, 0, 0]
    matrices, bound = torch.empty_like(observed), torch.empty_like(known)
    working = torch.arange(len(observed), device=observed.device)
    state = _SolverState.feasible_start(observed / scale, ~hidden, soft)
    for _ in range(MAX_STEPS):
        completed, dual, gap = state.completion_bound_and_gap(keep_observed=penalty is None)
        # Where all observed entries are 0 the objective is 0, so the gap is absolute.
        done = gap <= tolerance * (gap + dual).clamp(min=0.1)
        matrices[working[done]], bound[working[done]] = completed[done], dual[done]
        if done.all():
            break
        working, state = working[~done], state.select(~done)
        state.take_newton_step()
    else:
        raise TaskError(
            f"{len(working)} matrices are not solved to a tolerance of {tolerance:g}: ask for a larger one"
        )
    unit = scale[:, 0, 0] if penalty is None else penalty * scale[:, 0, 0]
    matrices = matrices * scale
    if penalty is None:
        matrices = torch.where(hidden, matrices, observed)
    return matrices, nuclear_norm_objective(matrices, observed, hidden, penalty), bound * unit


@dataclass
class _SolverState:
    """Iterates of a chunk: W, and Y with its slack S = ½ [[1, −Y], [−Yᵀ, 1]] ⪰ 0; complementary at the solution."""

    observed: Tensor  # [batch n m]
    known: Tensor  # [batch n m], boolean
    soft: Tensor  # [batch]: U + soft · Y = X where known
    primal: Tensor  # W [batch n+m n+m]
    dual: Tensor  # Y [batch n m]

    @classmethod
    def feasible_start(cls, observed: Tensor, known: Tensor, soft: Tensor) -> _SolverState:
        """Returns the feasible start: U = X with hidden entries 0, which has largest singular value 1, and Y = 0."""
        rows, columns = observed.shape[1:]
        eye = torch.eye(rows + columns, dtype=observed.dtype, device=observed.device)
        return cls(observed, known, soft, 2 * eye + _from_off_diagonal(observed), torch.zeros_like(observed))

    def select(self, chosen: Tensor) -> _SolverState:
        return _SolverState(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def completion_bound_and_gap(self, keep_observed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (completion, lower bound, objective − bound), for ‖U‖_*, or for that plus the mean error over λ."""
        rows = self.observed.shape[1]
        completed = self.primal[:, :rows, rows:]
        if keep_observed:
            completed = torch.where(self.known, self.observed, completed)
        bound = (self.dual * self.observed).sum((1, 2)) - self.soft / 2 * self.dual.square().sum((1, 2))
        reached = torch.linalg.svdvals(completed).sum(1)
        # The mean squared error over λ, in the units of this chunk, is that over 2 · soft.
        error = (completed - self.observed).square().masked_fill(~self.known, 0).sum((1, 2))
        reached = reached + torch.where(self.soft > 0, error / (2 * self.soft), 0)
        return completed, bound, reached - bound

    def take_newton_step(self) -> None:
        """Takes one Newton step towards the central path, so long that primal and dual stay positive definite."""
        rows, columns = self.observed.shape[1:]
        size = rows + columns
        eye = torch.eye(size, dtype=self.observed.dtype, device=self.observed.device)
        slack = (eye - _from_off_diagonal(self.dual)) / 2
        target = SIGMA * (self.primal * slack).sum((1, 2), keepdim=True) / size
        inverse = torch.linalg.inv(slack)
        residual = self.observed - self.soft[:, None, None] * self.dual - target * inverse[:, :rows, rows:]
        dual_move = self._newton_direction(inverse, residual.masked_fill(~self.known, 0))
        slack_move = -_from_off_diagonal(dual_move) / 2
        curvature = self.primal @ slack_move @ inverse
        primal_move = target * inverse - self.primal - (curvature + curvature.mT) / 2
        primal_step, dual_step = _step_length(self.primal, primal_move), _step_length(slack, slack_move)
        if bool((self.soft > 0).any()):
            # U + soft · Y = X stays true only where both steps have the same length.
            primal_step = dual_step = torch.minimum(primal_step, dual_step)
        self.primal = self.primal + primal_step[:, None, None] * primal_move
        self.dual = self.dual + dual_step[:, None, None] * dual_move

    def _newton_direction(self, inverse: Tensor, right_hand_side: Tensor) -> Tensor:
        """Returns the Newton step of Y, from one linear system in the observed entries."""
        batch, rows, columns = self.observed.shape
        first, second = slice(None, rows), slice(rows, None)
        blocks = ((first, first), (first, second), (second, second))
        a, u, b = (self.primal[:, s, t].contiguous() for s, t in blocks)
        p, k, r = (inverse[:, s, t].contiguous() for s, t in blocks)
        # [batch i j k l]; the system is symmetric.
        system = a[:, :, None, :, None] * r[:, None, :, None, :]
        system += p[:, :, None, :, None] * b[:, None, :, None, :]
        system += u[:, :, None, None, :] * k.mT[:, None, :, :, None]
        system += k[:, :, None, None, :] * u.mT[:, None, :, :, None]
        system = system.reshape(batch, rows * columns, rows * columns)
        known = self.known.flatten(1).to(system.dtype)
        system *= known[:, :, None] / 4 * known[:, None]
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += 1 - known + self.soft[:, None]
        # Near the solution the system may lose definiteness by rounding; the certificate is computed without it.
        diagonal *= 1 + JITTER
        factor = _cholesky_or_raise(system)
        return torch.cholesky_solve(right_hand_side.flatten(1)[..., None], factor).view_as(right_hand_side)


def _from_off_diagonal(block: Tensor) -> Tensor:
    """Returns [[0, block], [blockᵀ, 0]]."""
    batch, rows, columns = block.shape
    matrix = block.new_zeros(batch, rows + columns, rows + columns)
    matrix[:, :rows, rows:], matrix[:, rows:, :rows] = block, block.mT
    return matrix


def _step_length(matrix: Tensor, move: Tensor) -> Tensor:
    """Returns the step length along ``move``, up to 1, that keeps ``matrix`` well inside the cone, ``[batch]``."""
    factor = _cholesky_or_raise(matrix)
    half = torch.linalg.solve_triangular(factor, move, upper=False)
    scaled = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    lowest = torch.linalg.eigvalsh((scaled + scaled.mT) / 2)[:, 0]
    return (TO_THE_EDGE / (-lowest).clamp(min=TO_THE_EDGE)).clamp(max=1)


def _cholesky_or_raise(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.any():
        raise TaskError("the tolerance is smaller than rounding allows: ask for a larger one, such as 1e-5")
    return factor


def solve_by_cvxpy(
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
) -> Completion:
    """Solves :func:`least_nuclear_norm` by CVXPY (Diamond, Boyd 2016), as one problem compiled once with parameters.

    Returns the completions; ``bound`` is the objective that the solver, CLARABEL, reports, no certificate.

    Raises:
        TaskError: for a penalty that is not positive; for a matrix that the solver does not solve.
    """
    import cvxpy

    observed, known = check_and_zero_fill(values, hidden, penalty).cpu(), (~hidden).double().cpu()
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
        problem.solve(solver="CLARABEL")
        if problem.status not in ("optimal", "optimal_inaccurate"):
            raise TaskError(f"CLARABEL gives up on a matrix: {problem.status}")
        matrices[at], bounds[at] = torch.from_numpy(completion.value), float(problem.value)
    if penalty is None:
        matrices = torch.where(hidden.cpu(), matrices, observed)
    return Completion(matrices, nuclear_norm_objective(matrices, observed, hidden.cpu(), penalty), bounds)
