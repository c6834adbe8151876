"""Singular values and vectors of a table, and how many of them are needed. Arrays of numpy; no model, no task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interp_tasks.measurement.embeddings.geometry import Array

#: Chance that white noise of the length of a singular vector is called periodic.
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

    def needed(self, share: float, power: int = 1) -> int:
        """Returns the fewest leading singular values that reach a share of ΣS (``power`` 1) or ΣS² (2); 0 for none."""
        grown = np.cumsum(self.values**power)
        if not grown[-1]:
            return 0
        return int((grown / grown[-1] < share - ROUNDING).sum()) + 1

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of S / ΣS (Roy and Vetterli 2007): k equal values have k; 0 of nothing."""
        return spread_over(self.values)


def spread_over(values: Array) -> float:
    """Returns the effective number of equal parts of non-negative values: exp of the entropy of their shares."""
    total = values.sum()
    if not total:
        return 0.0
    shares = values[values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


@dataclass(frozen=True)
class Periodicity:
    """The strongest frequency of each function ``[k]``, its share of the variance, and whether white noise has less."""

    frequency: NDArray[np.int64]
    share: Array
    periodic: NDArray[np.bool_]


def periodicity(functions: Array) -> Periodicity:
    """Measures how periodic functions ``[row k]`` of the rows, taken as a cycle, are.

    Of white noise over p rows the share of one frequency (cos and sin together) exceeds x with probability
    (1 − x)^((p − 3)/2); at ``LEVEL`` divided by the number of frequencies (Fisher 1929, Bonferroni) that is the bound.
    """
    from circuits.fourier import spectrum

    bands = spectrum(functions, {"row": len(functions)}).bands()
    share = bands.share.numpy()
    best = share.argmax(0)
    largest = np.take_along_axis(share, best[None], 0)[0]
    return Periodicity(np.array(bands.labels)[best], largest, largest > periodic_above(len(functions)))


def periodic_above(rows: int) -> float:
    """Returns the share of variance at the best frequency above which a function of ``rows`` rows is periodic."""
    return float(1 - (LEVEL / (rows // 2)) ** (2 / (rows - 3))) if rows > 3 else 1.0
