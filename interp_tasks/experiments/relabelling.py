"""Which frequencies a table holds beyond what it would hold if the order of its rows meant nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interp_tasks.experiments.geometry import Array

#: Chance that a table whose rows stand in no order has a significant frequency at all.
LEVEL = 0.05
#: Numbers held at a time while rows are relabelled.
AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Relabelled:
    """The norms of a table's frequencies beside those of the same rows in random orders.

    Attributes:
        norms: ``[frequency]``, k = 1, 2, ...: √(‖cos part‖² + ‖sin part‖²) over all dimensions.
        strongest: ``[draw]``: the largest norm of any frequency in each random order, descending.
    """

    norms: Array
    strongest: Array

    @property
    def p_values(self) -> Array:
        """Of each frequency: how often a random order has any frequency as strong; adjusted for all frequencies."""
        # Ties count against significance; rounding must not break them.
        hits = (self.strongest >= self.norms[:, None] * (1 - 1e-12)).sum(1)
        return np.asarray((1 + hits) / (1 + len(self.strongest)), dtype=float)

    @property
    def threshold(self) -> float:
        """The norm above which p ≤ ``LEVEL``."""
        allowed = int(LEVEL * (1 + len(self.strongest)) + 1e-9) - 1
        return float(self.strongest[allowed]) if allowed >= 0 else float("inf")

    @property
    def significant(self) -> NDArray[np.bool_]:
        return self.p_values <= LEVEL + 1e-9


def relabelled(table: Array, draws: int, seed: int) -> Relabelled:
    """Compare the frequencies of a table ``[row d]`` with those of its rows in ``draws`` random orders.

    The maximum over frequencies is what is compared (Westfall and Young 1993): if the rows are exchangeable, the chance
    that any frequency is significant is ``LEVEL`` at most, whatever the table's own covariance is.
    """
    from circuits.fourier import basis, frequencies

    rows = len(table)
    waves = basis(rows).numpy()[1:]
    groups = frequencies(rows).numpy()[1:] - 1
    # A rotation of the dimensions changes no norm, and leaves at most as many as there are rows.
    left, sizes, _ = np.linalg.svd(table, full_matrices=False)
    compact = left * sizes
    rng = np.random.default_rng([seed, 5])
    step = max(1, AT_ONCE // (rows * max(rows, compact.shape[1])))
    strongest: list[Array] = []
    for start in range(0, draws, step):
        orders = np.argsort(rng.random((min(step, draws - start), rows)), axis=1)
        strongest.append(norms_of(waves[:, orders], compact, groups).max(0))
    largest = np.concatenate([*strongest, np.empty(0)])
    own = norms_of(waves[:, None], compact, groups)[:, 0]
    return Relabelled(own, np.sort(largest)[::-1])


def norms_of(waves: Array, table: Array, groups: NDArray[np.int64]) -> Array:
    """Of waves ``[wave order row]`` and a table ``[row d]``, the norm of each frequency ``[frequency order]``."""
    power = ((waves.reshape(-1, waves.shape[-1]) @ table) ** 2).sum(1).reshape(waves.shape[:2])
    summed = np.zeros((groups.max() + 1, waves.shape[1]))
    np.add.at(summed, groups, power)
    return np.asarray(np.sqrt(summed), dtype=float)
