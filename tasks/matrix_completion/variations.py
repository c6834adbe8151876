"""Matrix completion on other data than a model was trained on, and inputs that test whether it copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tasks.base import Batch, Split, Task
from tasks.matrix_completion.matrices import Matrices

#: Shares of hidden entries (Gopalani, Lubana, Hu 2024, section 3.2 and figure 3).
SHARES = tuple(round(0.10 + 0.05 * k, 2) for k in range(11))
#: Values at hidden entries in place of MASK (section 3.1.1, table 1).
REPLACEMENTS = (0.44, -0.24)
#: Largest change of the number of rows or columns from that of training.
REACH = 2


def variations(task: Matrices, make: type[Matrices]) -> dict[str, dict[str, Task]]:
    """Returns tasks by the varied property, then by name; each differs in that property alone.

    ``p_mask``: section 3.2. ``entries``: the law of the factors, as in appendix J.2 (Gaussian of s.d. 0.5, Laplace of
    diversity 0.25). ``rank``, ``rows``, ``columns``: figure 19.

    Args:
        make: the class of the variations; for a task of several sizes that of one size, the largest.
    """
    rows, columns = task.n, task.columns
    different = partial(varied, task, make)

    def sized(size: int, least: int) -> list[int]:
        return [near for near in range(size - REACH, size + REACH + 1) if near >= max(least, 1)]

    return {
        "p_mask": {f"p_mask {share:.2f}": different(p_mask=share, mask=None) for share in SHARES},
        "entries": {
            "as trained": task,
            "gaussian 0.5": different(law="factors", distribution="gaussian", scale=0.5),
            "laplace 0.25": different(law="factors", distribution="laplace", scale=0.25),
        },
        "rank": {
            f"rank {rank}": different(law="factors", rank=rank) for rank in range(1, min(rows, columns) + 1)
        },
        "rows": {f"{n}x{columns}": different(n=n, m=columns, mask=None) for n in sized(rows, task.rank)},
        "columns": {f"{rows}x{m}": different(n=rows, m=m, mask=None) for m in sized(columns, task.rank)},
    }


def varied(task: Matrices, make: type[Matrices], **settings: Any) -> Matrices:
    """Returns a task of class ``make`` with the fields that it shares with ``task``, except for these settings."""
    return make(**{**{name: getattr(task, name) for name in make.model_fields}, **settings})


def copying_inputs(
    task: Matrices, make: type[Matrices], n: int, seed: int, split: Split
) -> dict[str, tuple[Batch, Batch]]:
    """Returns inputs with another token at hidden entries, by name, twice: with copies of the inputs as targets, and
    with the matrix as targets.

    Section 3.1.1, table 1: hidden entries hold MASK (its "copy" is 0), or the value of the grid nearest to 0.44 or
    −0.24. Matrices are the task's own, or have independent entries, uniform on [-1, 1].
    """
    task_label = f"rank {task.rank}" if task.law == "factors" else "own"
    full = varied(task, make, law="entries", distribution="uniform", scale=1.0)
    inputs: dict[str, tuple[Batch, Batch]] = {}
    for kind, source in ((task_label, task), ("full rank", full)):
        batch = source.sample(n, seed=seed, split=split)
        hidden = batch.extras["hidden"]
        inputs[f"{kind}, MASK"] = replace(batch, targets=batch.targets.masked_fill(hidden, 0)), batch
        for value in REPLACEMENTS:
            token = int(task.encode(batch.targets.new_tensor(value)))
            nearest = float(task.decode(batch.tokens.new_tensor(token)))
            replaced_batch = replace(batch, tokens=batch.tokens.masked_fill(hidden, token))
            copied = replace(replaced_batch, targets=batch.targets.masked_fill(hidden, nearest))
            inputs[f"{kind}, {nearest:g}"] = copied, replaced_batch
    return inputs
