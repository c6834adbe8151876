"""Completion of least nuclear norm, for a batch of matrices at once, each with a certificate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.errors import TaskError

#: Matrices that are worked on together: more do not fit a processor's cache.
CHUNK = 64
#: No problem has been seen to need half as many steps.
MAX_STEPS = 100
#: Of the way to the edge of the cone that a step goes, and of the gap that it aims to leave.
TO_THE_EDGE, SIGMA = 0.95, 0.2
JITTER = 1e-9


@dataclass(frozen=True)
class Completion:
    """Solutions of one convex problem per matrix.

    Attributes:
        matrices: the completions.
        objective: what was minimised, at them.
        bound: no completion has a lower objective (the value of a feasible point of the dual).
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
    """The completion U of least nuclear norm ‖U‖_*: the sum of its singular values.

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
    observed = check_problem(values, hidden, penalty)
    found = [
        _solve(x, h, penalty, tolerance)
        for x, h in zip(observed.split(CHUNK), hidden.split(CHUNK), strict=True)
    ]
    matrices, objective, bound = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Completion(matrices, objective, bound)


def check_problem(values: Tensor, hidden: Tensor, penalty: float | None) -> Tensor:
    """The observed values in float64, 0 where hidden.

    Raises:
        TaskError: for what :func:`least_nuclear_norm` refuses.
    """
    if penalty is not None and not penalty > 0:
        raise TaskError(f"penalty {penalty:g} must be above 0 (None keeps the observed entries as they are)")
    observed = values.double().masked_fill(hidden, 0)
    if not observed.isfinite().all():
        raise TaskError("observed values must be finite numbers")
    return observed


def objective(
    matrices: Float[Tensor, "batch rows columns"],
    values: Float[Tensor, "batch rows columns"],
    hidden: Bool[Tensor, "batch rows columns"],
    penalty: float | None = None,
) -> Float[Tensor, " batch"]:
    """Returns what :func:`least_nuclear_norm` minimises."""
    norm = torch.linalg.svdvals(matrices).sum(1)
    if penalty is None:
        return norm
    error = (matrices - values).square().masked_fill(hidden, 0).sum((1, 2))
    return error / (~hidden).sum((1, 2)).clamp(min=1) + penalty * norm


def _solve(
    observed: Tensor, hidden: Tensor, penalty: float | None, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(matrices, objective, bound) of one chunk; ``observed`` is 0 at hidden entries."""
    largest = torch.linalg.svdvals(observed)[:, 0]
    scale = torch.where(largest > 0, largest, 1.0)[:, None, None]
    known = (~hidden).sum((1, 2)).double()
    # In units of the largest singular value of what is observed.
    soft = torch.zeros_like(known) if penalty is None else penalty * known / 2 / scale[:, 0, 0]
    matrices, bound = torch.empty_like(observed), torch.empty_like(known)
    working = torch.arange(len(observed))
    state = _State.start(observed / scale, ~hidden, soft)
    for _ in range(MAX_STEPS):
        completed, dual, gap = state.certificate(keep_observed=penalty is None)
        # Where there is nothing to complete the objective is 0: the gap is then absolute.
        done = gap <= tolerance * (gap + dual).clamp(min=0.1)
        matrices[working[done]], bound[working[done]] = completed[done], dual[done]
        if done.all():
            break
        working, state = working[~done], state.of(~done)
        state.step()
    else:
        raise TaskError(
            f"{len(working)} matrices are not solved to a tolerance of {tolerance:g}: ask for a larger one"
        )
    unit = scale[:, 0, 0] if penalty is None else penalty * scale[:, 0, 0]
    matrices = matrices * scale
    if penalty is None:
        matrices = torch.where(hidden, matrices, observed)
    return matrices, objective(matrices, observed, hidden, penalty), bound * unit


@dataclass
class _State:
    """Iterates of a chunk: W, and Y with its slack S = ½ [[1, −Y], [−Yᵀ, 1]] ⪰ 0; complementary at the solution."""

    observed: Tensor  # [batch n m]
    known: Tensor  # [batch n m], boolean
    soft: Tensor  # [batch]: U + soft · Y = X where known
    primal: Tensor  # W [batch n+m n+m]
    dual: Tensor  # Y [batch n m]

    @classmethod
    def start(cls, observed: Tensor, known: Tensor, soft: Tensor) -> _State:
        """U = X with hidden entries 0, which has largest singular value 1, and Y = 0: both feasible."""
        rows, columns = observed.shape[1:]
        eye = torch.eye(rows + columns, dtype=observed.dtype, device=observed.device)
        return cls(
            observed,
            known,
            soft,
            2 * eye + _off_diagonal(observed),
            torch.zeros_like(observed),
        )

    def of(self, chosen: Tensor) -> _State:
        return _State(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def certificate(self, keep_observed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(completion, lower bound, objective − bound), both of ‖U‖_*, or of that plus the mean error over λ."""
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

    def step(self) -> None:
        rows, columns = self.observed.shape[1:]
        size = rows + columns
        eye = torch.eye(size, dtype=self.observed.dtype, device=self.observed.device)
        slack = (eye - _off_diagonal(self.dual)) / 2
        aim = SIGMA * (self.primal * slack).sum((1, 2), keepdim=True) / size
        inverse = torch.linalg.inv(slack)
        right = self.observed - self.soft[:, None, None] * self.dual - aim * inverse[:, :rows, rows:]
        move = self._newton(inverse, right.masked_fill(~self.known, 0))
        towards = -_off_diagonal(move) / 2
        bent = self.primal @ towards @ inverse
        moved = aim * inverse - self.primal - (bent + bent.mT) / 2
        primal_step, dual_step = _room(self.primal, moved), _room(slack, towards)
        if bool((self.soft > 0).any()):
            # U + soft · Y = X holds along the way only where both go equally far.
            primal_step = dual_step = torch.minimum(primal_step, dual_step)
        self.primal = self.primal + primal_step[:, None, None] * moved
        self.dual = self.dual + dual_step[:, None, None] * move

    def _newton(self, inverse: Tensor, right: Tensor) -> Tensor:
        """The change of Y that a Newton step takes: one linear system in the observed entries."""
        batch, rows, columns = self.observed.shape
        a, u, b = (self.primal[:, s, t].contiguous() for s, t in _blocks(rows))
        p, k, r = (inverse[:, s, t].contiguous() for s, t in _blocks(rows))
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
        # Near the solution rounding may take the system's definiteness; the certificate is computed without it.
        diagonal *= 1 + JITTER
        factor = _cholesky(system)
        return torch.cholesky_solve(right.flatten(1)[..., None], factor).view_as(right)


def _blocks(rows: int) -> tuple[tuple[slice, slice], ...]:
    """Upper left, upper right, lower right."""
    first, second = slice(None, rows), slice(rows, None)
    return (first, first), (first, second), (second, second)


def _off_diagonal(block: Tensor) -> Tensor:
    """[[0, block], [blockᵀ, 0]]."""
    batch, rows, columns = block.shape
    whole = block.new_zeros(batch, rows + columns, rows + columns)
    whole[:, :rows, rows:], whole[:, rows:, :rows] = block, block.mT
    return whole


def _room(matrix: Tensor, move: Tensor) -> Tensor:
    """How far, up to 1, ``matrix`` may go along ``move`` and stay well inside the positive definite cone: [batch]."""
    factor = _cholesky(matrix)
    half = torch.linalg.solve_triangular(factor, move, upper=False)
    whole = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    lowest = torch.linalg.eigvalsh((whole + whole.mT) / 2)[:, 0]
    return (TO_THE_EDGE / (-lowest).clamp(min=TO_THE_EDGE)).clamp(max=1)


def _cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.any():
        raise TaskError("the tolerance is smaller than rounding allows: ask for a larger one, such as 1e-5")
    return factor
