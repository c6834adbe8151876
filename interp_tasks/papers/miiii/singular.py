"""Singular values and vectors of a table, and its frequencies beside those of its rows in random orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings import Array

#: Chance that white noise is called periodic, and that a table in no order has a significant frequency at all.
LEVEL = 0.05
#: Shares of a sum are compared with a bound up to rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Singular:
    """A table ``[row d]`` as Σ vectors · values · ..., not centred.

    Attributes:
        values: ``[k]``, largest first.
        vectors: ``[row k]``, the left singular vectors, functions of the rows; their signs are arbitrary.
    """

    values: Array
    vectors: Array

    @classmethod
    def of(cls, table: Array) -> Singular:
        left, sizes, _ = np.linalg.svd(table, full_matrices=False)
        return cls(sizes, left)

    def needed(self, share: float) -> int:
        """Returns the fewest leading singular values that reach a share of their sum ΣS; 0 for none."""
        grown = np.cumsum(self.values)
        if not grown[-1]:
            return 0
        return int((grown / grown[-1] < share - ROUNDING).sum()) + 1


def periodic(functions: Array) -> NDArray[np.bool_]:
    """Returns which functions ``[row k]`` of the rows, taken as a cycle, have one frequency that white noise has not.

    Of white noise over p rows the share of one frequency (cos and sin together) exceeds x with probability
    (1 − x)^((p − 3)/2); at ``LEVEL`` divided by the number of frequencies (Fisher 1929, Bonferroni) that is the bound.
    """
    from circuits.fourier import spectrum

    share = spectrum(functions, {"row": len(functions)}).bands().share.numpy()
    return np.asarray(share.max(0) > periodic_above(len(functions)))


def periodic_above(rows: int) -> float:
    """Returns the share of variance at the best frequency above which a function of ``rows`` rows is periodic."""
    return float(1 - (LEVEL / (rows // 2)) ** (2 / (rows - 3))) if rows > 3 else 1.0


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
        """Returns how often a random order has any frequency as strong as each; adjusted for all frequencies."""
        # Ties count against significance; rounding must not break them.
        hits = (self.strongest >= self.norms[:, None] * (1 - 1e-12)).sum(1)
        return np.asarray((1 + hits) / (1 + len(self.strongest)), dtype=float)

    @property
    def significant(self) -> NDArray[np.bool_]:
        return self.p_values <= LEVEL + 1e-9


def relabelled(table: Array, draws: int, seed: int) -> Relabelled:
    """Compares the frequencies of a table ``[row d]`` with those of its rows in ``draws`` random orders.

    The maximum over frequencies is what is compared (Westfall and Young 1993): if the rows are exchangeable, the chance
    that any frequency is significant is ``LEVEL`` at most, whatever the table's own covariance is.
    """
    rows = len(table)
    # The mean is in no frequency, and of a large one only rounding would be left.
    centred = table - table.mean(0)
    products = centred @ centred.T
    first, second = np.tril_indices(rows, -1)
    pairs, alone = 2 * products[first, second], np.trace(products)
    waves = autocorrelation_waves(rows)

    def norms(names: NDArray[np.int64]) -> Array:
        # ‖Σ_x w_x e^(−2πikx/p)‖² is a sum over pairs of rows, w_x · w_y cos(2πk(x − y)/p): an order only says how far
        # apart the rows of a pair are, and the dimensions are summed over once.
        apart = (names[first] - names[second]) % rows
        by_distance = np.bincount(apart, weights=pairs, minlength=rows)
        by_distance[0] += alone
        return np.asarray(np.sqrt(np.clip(waves @ by_distance, 0, None)), dtype=float)

    rng = np.random.default_rng([seed, 5])
    strongest = [norms(rng.permutation(rows)).max() for _ in range(draws)]
    return Relabelled(norms(np.arange(rows)), np.sort(np.array(strongest, dtype=float))[::-1])


def autocorrelation_waves(rows: int) -> Array:
    """Returns ``[frequency distance]``: the weight of the product of two rows at a distance in each power k ≥ 1."""
    k = np.arange(1, rows // 2 + 1)
    waves = np.cos(2 * np.pi * (np.outer(k, np.arange(rows)) % rows) / rows)
    # The highest frequency of an even period is one function, the others are two.
    functions = np.where(2 * k == rows, 1, 2)[:, None]
    return np.asarray(waves * functions / rows, dtype=float)
