"""Where a metric changes abruptly from a plateau to its final level. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Drop:
    """An abrupt change; steps are logged ones.

    Attributes:
        onset: the last step before a tenth of the way from ``plateau`` to ``final`` is made.
        end: the first step after nine tenths of it are.
        plateau, final: the levels before and after, in the metric's units.
    """

    onset: int
    end: int
    plateau: float
    final: float


def detect_drop(
    steps: Sequence[int], values: Sequence[float | None], direction: Literal["down", "up"]
) -> Drop | None:
    """Placeholder."""
    raise NotImplementedError
