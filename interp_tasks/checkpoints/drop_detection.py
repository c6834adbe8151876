"""Finds the drop of a metric: its abrupt change from a plateau to its final level. Imports no torch.

The rule, in order:

1. F, the final level, is the median of the last tenth of the logged values.
2. A first guess of the plateau P is the level before the best split of the run into two constant levels, by
   least absolute deviation, each value weighted by the steps it stands for. (Starting from the worst value
   instead ends in training's first steps, where the loss of an untrained read-out falls to the plateau.)
3. The crossing c is the first lasting passage of the midpoint of P and F; P becomes the median of the values
   logged between c/10 and c/2; both are repeated until they agree.
4. Onset is the last logged step before c at which less than 10% of the way from P to F is made, end the first
   one from c on at which more than 90% is.
5. It is no drop if P and F differ by less than 30% of P (accuracies: by less than 0.3), if the metric moved
   about as fast along its plateau as in the middle of its drop (a steady decay), or if the plateau is shorter
   than three logged values or a hundredth of the run (training's first steps).
6. Where theory gives the plateau T (matrix completion: the variance of an entry, the error of a model that copies
   what it sees and guesses the rest), a drop begins on it and gets past half of it. It is none if P is further from T
   than counts as a change in 5, 30% of T: a fall from above *onto* the plateau, or from a level that was reached
   before; nor if F has not come at least half of the way from T to a perfect score (0 for a loss, 1 for an accuracy):
   a fall onto the plateau that ends there, or a run that stays with most of what it had to explain.

"Lasting" means that the median of the next few logged values is past the level too, and that of those before
is not: neither a spike (a slingshot, a lucky evaluation) nor a metric that has yet to rise to its plateau is
taken for a crossing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Steps = Sequence[int] | NDArray[np.int64]
    Values = Sequence[float | int | None] | Sequence[float] | Array

MIN_VALUES = 8
#: Splits tried for the first guess; more do not move it.
MAX_SPLITS = 50
LEAST_CHANGE = 0.3
#: Speed along the plateau over speed from 30% to 70% of the drop. A straight line has 1, exp(-t) 2, a loss
#: that sinks by a quarter before it drops 0.4, an S-curve from a level plateau less than 0.1.
STEADY = 0.75
#: The crossing's least share of the run.
EARLIEST = 0.01
#: The share of the way from the plateau by theory to a perfect score that a drop makes at least.
LEAST_WAY = 0.5


@dataclass(frozen=True)
class Drop:
    """An abrupt change; its steps are logged ones.

    Attributes:
        onset: the last step before a tenth of the way from ``plateau`` to ``final`` is made.
        end: the first step after nine tenths of it are.
        plateau, final: the levels before and after, in the metric's units.
        crossing: the first step after half of the way.
        middle: the last step before three tenths of it, the first after seven.
    """

    onset: int
    end: int
    plateau: float
    final: float
    crossing: int
    middle: tuple[int, int]

    @property
    def sharpness(self) -> float:
        """Speed in the middle of the drop, in shares of the change per e-fold of training, whatever the run's length.

        0.4 · crossing / (steps from three tenths to seven): the slope of the curve over ln(step) at the crossing, of
        a change from 0 to 1. 1 / (1 + (step/c)^k) has about k/4, and no log is fine enough for an instant one.
        """
        return 0.4 * self.crossing / (self.middle[1] - self.middle[0])


def final_level(curve: Sequence[float] | Array) -> float:
    """Returns the median of the last tenth of finite values in order of their steps, of three at least."""
    import numpy as np

    return float(np.median(curve[-max(3, len(curve) // 10) :]))


def detect_drop(
    steps: Steps, values: Values, direction: Literal["down", "up"], theoretical_plateau: float | None = None
) -> Drop | None:
    """Returns the drop in a logged metric; ``None`` if there is none, :func:`detect_drop_or_reason` says why.

    Args:
        steps: ascending, any spacing.
        values: one per step (JSON may have made a float an int); ``None``, NaN and infinities are skipped.
        direction: ``"down"`` for a loss, ``"up"`` for an accuracy.
        theoretical_plateau: what theory gives, in the metric's units; ``None``: it gives none.

    Raises:
        ValueError: if the two differ in length, or steps do not ascend.
    """
    found = detect_drop_or_reason(steps, values, direction, theoretical_plateau)
    return found if isinstance(found, Drop) else None


def detect_drop_or_reason(
    steps: Steps, values: Values, direction: Literal["down", "up"], theoretical_plateau: float | None = None
) -> Drop | str:
    """Returns the drop, or which condition a metric without one fails, in words; see :func:`detect_drop`."""
    import numpy as np

    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps and {len(values)} values")
    logged = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(logged)
    at = np.asarray(steps, dtype=np.float64)[is_finite]
    if (np.diff(at) <= 0).any():
        raise ValueError("steps must ascend")
    # Seen as a fall, whichever way the metric goes.
    curve = logged[is_finite] if direction == "down" else -logged[is_finite]
    sign, moves = (1, "fall") if direction == "down" else (-1, "rise")
    if len(curve) < MIN_VALUES:
        return f"{len(curve)} values are logged, a drop is told from {MIN_VALUES} at least (train.log_every)"
    (before, ahead, around), final = _medians_before_ahead_around(curve), final_level(curve)
    found = _plateau_and_crossing_or_reason(at, curve, before, ahead, final)
    if isinstance(found, str):
        return f"it does not {moves}{found}, yet; train longer (a larger train.steps)"
    plateau, crossing = found
    if at[crossing] < EARLIEST * at[-1]:
        return f"it {moves}s in the first hundredth of the run, off no plateau"
    change = plateau - final
    levels = f"from {sign * plateau:.4g} to {sign * final:.4g}"
    if change < (LEAST_CHANGE * abs(plateau) if direction == "down" else LEAST_CHANGE):
        least = f"{LEAST_CHANGE:.0%} of the plateau" if direction == "down" else f"{LEAST_CHANGE:g}"
        return f"it goes {levels}, by less than {least}; train longer (a larger train.steps)"
    # As a fall, from the plateau by theory to a perfect score.
    perfect, begin = 0.0 if sign > 0 else -1.0, theoretical_plateau and sign * theoretical_plateau
    if begin is not None and (
        abs(plateau - begin) > LEAST_CHANGE * (begin - perfect)
        or final - perfect > (1 - LEAST_WAY) * (begin - perfect)
    ):
        return (
            f"it goes {levels}; a drop goes from the plateau by theory, {theoretical_plateau:.4g}, to less than "
            "half of it; train longer (a larger train.steps)"
        )
    flat = _plateau_indices(at, crossing)
    if len(flat) < 3:
        return (
            f"it is half-way from the first values to the last by step {at[crossing]:.0f}, "
            "too early to tell a plateau before (train.log_every)"
        )
    first, last = _fall_bounds(curve, ahead, around, crossing, plateau - 0.3 * change, plateau - 0.7 * change)
    early, late = flat[: len(flat) // 2], flat[-(len(flat) // 2) :]
    speed = (np.median(curve[early]) - np.median(curve[late])) / (np.median(at[late]) - np.median(at[early]))
    if speed > STEADY * 0.4 * change / (at[last] - at[first]):
        return f"it {moves}s about as fast before its middle as in it: gradually, off no plateau"
    onset, end = _fall_bounds(curve, ahead, around, crossing, plateau - 0.1 * change, plateau - 0.9 * change)
    return Drop(
        onset=int(at[onset]),
        end=int(at[end]),
        plateau=sign * plateau,
        final=sign * final,
        crossing=int(at[crossing]),
        middle=(int(at[first]), int(at[last])),
    )


def _medians_before_ahead_around(curve: Array) -> tuple[Array, Array, Array]:
    """Returns the medians that tell a lasting change from a spike: of values before each, from each on, around each.

    Of as many values as there are at the ends, NaN where there are none.
    """
    import pandas

    # So many values make a passage lasting: odd, 3 in a very short log, 5 to 15 by its length.
    window = 3 if len(curve) < 20 else min(15, max(5, len(curve) // 50 | 1))
    values = pandas.Series(curve)
    before = values.rolling(window, min_periods=1).median().shift()
    ahead = values[::-1].rolling(window, min_periods=1).median()[::-1]
    around = values.rolling(window, min_periods=1, center=True).median()
    return before.to_numpy(), ahead.to_numpy(), around.to_numpy()


def _plateau_and_crossing_or_reason(
    steps: Array, curve: Array, before: Array, ahead: Array, final: float
) -> tuple[float, int] | str:
    """Returns the plateau of a fall and the index at which its middle is passed, or how it does not fall."""
    import numpy as np

    plateau, crossing = _level_before_best_split(steps, curve), -1
    for _ in range(20):
        if not plateau > final:
            return ""
        middle = (plateau + final) / 2
        passed = (curve < middle) & (ahead < middle) & (before > middle)
        if not passed.any():
            return " lastingly"
        previous, crossing = crossing, int(passed.argmax())
        if crossing == previous:
            break
        plateau = float(np.median(curve[_plateau_indices(steps, crossing)]))
    return plateau, crossing


def _fall_bounds(
    curve: Array, ahead: Array, around: Array, crossing: int, start: float, end: float
) -> tuple[int, int]:
    """Returns where a fall leaves one level and reaches another: the last index before the crossing at which it is
    above the first, smoothed (or the first of all), and the first from the crossing on at which it is lastingly below
    the second (or the last of all).
    """
    above = (around[:crossing] > start).nonzero()[0]
    below = ((curve < end) & (ahead < end))[crossing:].nonzero()[0]
    return int(above[-1]) if len(above) else 0, crossing + int(below[0]) if len(below) else len(curve) - 1


def first_index_lastingly_below(values: Sequence[float] | Array, level: float) -> int | None:
    """Returns the first index at which finite values are below a level lastingly, as a drop's steps are."""
    import numpy as np

    curve = np.asarray(values, dtype=np.float64)
    below = ((curve < level) & (_medians_before_ahead_around(curve)[1] < level)).nonzero()[0]
    return int(below[0]) if len(below) else None


def plateau_steps(steps: Steps, drop: Drop) -> Array:
    """Returns the logged steps that a drop's plateau is taken over."""
    import numpy as np

    at = np.asarray(steps, dtype=np.float64)
    return at[_plateau_indices(at, int(np.searchsorted(at, drop.crossing)))]


def _plateau_indices(steps: Array, crossing: int) -> NDArray[np.int64]:
    """Returns the indices between a tenth and a half of the crossing, or all before it in a coarse log."""
    import numpy as np

    step = steps[crossing]
    inside = np.flatnonzero((steps >= step / 10) & (steps <= step / 2))
    return inside if len(inside) >= 3 else np.arange(crossing)


def _level_before_best_split(steps: Array, curve: Array) -> float:
    """Returns the higher level in the best description of the curve as one level and then a lower one."""
    import numpy as np

    edges = np.concatenate([steps[:1], (steps[1:] + steps[:-1]) / 2, steps[-1:]])
    weights = np.maximum(np.diff(edges), 1e-9)
    splits = np.unique(np.linspace(1, len(curve) - 1, MAX_SPLITS).astype(int))
    # Sorted once: the weighted median of a part is where the weights of that part alone, in this order, reach half.
    order = np.argsort(curve, kind="stable")
    is_first = order < splits[:, None]
    levels = []
    for chosen in (is_first, ~is_first):
        reached = np.cumsum(weights[order] * chosen, axis=1)
        levels.append(curve[order[(reached >= reached[:, -1:] / 2).argmax(1)]])
    best, level = np.inf, -np.inf
    for split, before, after in zip(splits, *levels, strict=True):
        cost = (
            np.abs(curve[:split] - before) @ weights[:split] + np.abs(curve[split:] - after) @ weights[split:]
        )
        if before > after and cost < best:
            best, level = cost, float(before)
    return level
