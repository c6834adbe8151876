"""Completions of least nuclear norm: against one vectorised CVXPY problem per matrix with the same solver.

    python benchmarks/nuclear_norm.py [--matrices 256] [--n 7] [--rank 2] [--penalty 0.0005] [--repeats 5]

The peer builds a CVXPY problem for each matrix, all its entries in one constraint or one sum, and solves it. Beside it:
the problem compiled once whose parameters change, and the
batched interior-point method on one thread. All solve the same matrices; objectives must agree to 1e-4, relative.
Prints seconds, and ratios to the peer: medians over interleaved repeats, with their range.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch

import tasks
from tasks.matrix_completion.nuclear_norm import least_nuclear_norm, nuclear_norm_objective, solve_by_cvxpy


def one_problem_each(values: torch.Tensor, hidden: torch.Tensor, penalty: float | None) -> torch.Tensor:
    import cvxpy

    found = []
    for matrix, mask in zip(values.numpy(), (~hidden).double().numpy(), strict=True):
        completion = cvxpy.Variable(matrix.shape)
        difference = cvxpy.multiply(mask, completion) - mask * matrix
        if penalty is None:
            problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.normNuc(completion)), [difference == 0])
        else:
            error = cvxpy.sum_squares(difference) / mask.sum()
            problem = cvxpy.Problem(cvxpy.Minimize(error + penalty * cvxpy.normNuc(completion)))
        problem.solve(solver="CLARABEL")
        found.append(torch.from_numpy(completion.value))
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--matrices", type=int, default=256)
    parser.add_argument("--n", type=int, default=7)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--penalty", type=float)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = tasks.get("matrix-completion", n=options.n, rank=options.rank)
    batch = task.sample(options.matrices)
    values, hidden = (x.unflatten(1, (options.n, options.n)) for x in (batch.targets, batch.extras["hidden"]))
    values, penalty = values.double(), options.penalty

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "a problem each": lambda: one_problem_each(values, hidden, penalty),
        "compiled once": lambda: solve_by_cvxpy(values, hidden, penalty).matrices,
        "batched": lambda: least_nuclear_norm(values, hidden, penalty).matrices,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    reference = None
    for _ in range(options.repeats):
        for name, solve in ways.items():
            start = time.perf_counter()
            matrices = solve()
            seconds[name].append(time.perf_counter() - start)
            reached = nuclear_norm_objective(matrices, values, hidden, penalty)
            reference = reached if reference is None else reference
            torch.testing.assert_close(reached, reference, rtol=1e-4, atol=1e-6)
    peer = seconds["a problem each"]
    print(
        f"{options.matrices} matrices {options.n}×{options.n}, rank {options.rank}, CLARABEL, lambda {penalty}"
    )
    for name, own in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(peer, own, strict=True)]
        print(
            f"{name:24} {statistics.median(own):8.2f} s   "
            f"{statistics.median(ratios):5.1f}× [{min(ratios):.1f}, {max(ratios):.1f}]"
        )


if __name__ == "__main__":
    main()
