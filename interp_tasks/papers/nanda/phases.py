"""The phases of grokking in the curves of a run: memorisation, circuit formation, cleanup.

The rule, written down before it was applied to a trained model. All curves are read at the stored steps, on the linear
scale, between which they are straight lines; a share of a way is made once a curve does not fall back behind it.

1. Memorisation ends when the training loss has made 90% of its way from its first to its last value.
2. Cleanup begins when the test loss has made 10% of its way from its maximum to its last value, and
3. it ends when the test loss has made 90% of it.
4. Circuit formation is what lies between 1 and 2. Where 2 comes before 1 there is none: the answer was generalised
   before it was memorised.

Nanda et al. 2023 (arXiv:2301.05217, section 5.2) set the boundaries by eye: 1,400, 9,400 and 14,000 epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interp_tasks.measurement.crossings import crossing

#: Phases are looked for in curves of this many stored steps at least.
MIN_STEPS = 4
#: Curves that begin their way at their highest value, and at their lowest; the others at their first.
FROM_MAXIMUM, FROM_MINIMUM = ("test loss", "restricted loss", "held-out restricted loss"), ("excluded loss",)


@dataclass(frozen=True)
class Phases:
    """The steps that bound the phases; NaN for a phase that does not occur."""

    memorised: float
    cleanup: float
    end: float

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Name -> first and last step."""
        formation = (self.memorised, self.cleanup)
        return {
            "memorisation": (0.0, self.memorised),
            "circuit formation": formation if formation[0] < formation[1] else (math.nan, math.nan),
            "cleanup": (self.cleanup, self.end),
        }


def boundaries(losses: Mapping[str, Mapping[int, float]]) -> Phases | None:
    """Returns the phases by a run's losses, name -> step -> value; ``None`` for too few steps, or no split."""
    train, test = losses.get("train loss", {}), losses.get("test loss", {})
    if not train or len(test) < MIN_STEPS:
        return None
    steps = sorted(test)
    return find_phases(steps, [train[step] for step in steps], [test[step] for step in steps])


def find_phases(steps: Sequence[int], train: Sequence[float], test: Sequence[float]) -> Phases:
    """Finds the phases from the losses at ascending steps."""
    return Phases(made(steps, train, 0.9), made(steps, test, 0.1, "max"), made(steps, test, 0.9, "max"))


def made(steps: Sequence[int], curve: Sequence[float], share: float, start: str = "first") -> float:
    """Returns the step at which a curve has made a share of its change from ``start`` (first, max, min) to its end."""
    begin = {"first": 0, "max": int(np.argmax(curve)), "min": int(np.argmin(curve))}[start]
    values = np.asarray(curve, dtype=float)[begin:]
    return float(crossing(steps[begin:], values[None], share, values[:1], values[-1:])[0])


def begins(name: str) -> str:
    """Returns the start from which the change of a curve of this name is counted."""
    return "max" if name in FROM_MAXIMUM else "min" if name in FROM_MINIMUM else "first"


def changes(
    steps: Sequence[int], curve: Sequence[float], phases: Phases
) -> Mapping[str, tuple[float, float]]:
    """Returns the curve's value at the beginning and the end of each phase."""
    values = {}
    for name, ends in phases.parts.items():
        if any(map(math.isnan, ends)):
            values[name] = (math.nan, math.nan)
        else:
            first, last = np.interp(ends, steps, curve)
            values[name] = (float(first), float(last))
    return values
