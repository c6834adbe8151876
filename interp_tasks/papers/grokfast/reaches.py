"""Finds the step at which each accuracy of a run reaches a level, and tabulates these steps and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp_tasks.checkpoints.drop import final_level
from interp_tasks.errors import UserError
from interp_tasks.measurement.run_logs import Run
from interp_tasks.measurement.table import Row

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings import Array

ACCURACY = "accuracy"
SPLITS = ("validation", "train")
#: Metrics of the table; ``{level}`` is the level in per cent.
STEP, LASTING, REACHED = "step at {level}", "step at {level} for good", "reached {level}"
THEN = "validation when train is at {level}"
FINAL, MIRROR = "final level", "rank correlation with its loss"
PAIRS, SPREAD = "pairs in order", "last step / first step"
#: Of an accuracy, by default.
LEVEL = 0.95
#: The primes below it generalise one by one, says the figure of the MIIII paper, those from it on together.
TOGETHER_FROM = 11


@dataclass(frozen=True)
class Reach:
    """The steps at which one accuracy of a run reaches a level on one split; infinite where it never does."""

    run: Run
    name: str
    split: str
    first: float
    lasting: float
    until: float
    final: float


def reaches_of(run: Run, level: float) -> list[Reach]:
    """Returns every accuracy on both splits.

    Raises:
        UserError: for a run that logs no accuracy.
    """
    from interp_tasks.measurement.crossings import reached

    reaches = []
    for split in SPLITS:
        for name in named(run, ACCURACY, split):
            steps, values = run.points(name, split)
            # Step 0 has no batch that was trained on.
            if split == "train" and steps[:1] == [0]:
                steps, values = steps[1:], values[1:]
            if not steps:
                continue
            reaches.append(
                Reach(run, name, split, *reached(steps, values, level), float(steps[-1]), final_level(values))
            )
    if not any(reach.split == "validation" for reach in reaches):
        if any(name.startswith(ACCURACY) for name in run.logged()):
            raise UserError(f"{run.name} logs no accuracy that is a finite number")
        raise UserError(
            f"{run.name} logs no accuracy: it has {', '.join(run.logged()) or 'nothing'}; "
            "generalisation is of tasks with right and wrong answers"
        )
    return reaches


def percent(level: float) -> str:
    return f"{100 * level:g}%"


def reach_rows(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[Row]:
    """Yields the rows of one run: where each accuracy reaches the level, its delay, and its last value."""
    from interp_tasks.measurement.crossings import finite_or_nan

    trained = {reach.name: reach for reach in reaches if reach.split == "train"}
    metrics = {name: name.format(level=percent(level)) for name in (STEP, LASTING, REACHED, THEN)}
    for reach in reaches:
        validation, other = reach.split == "validation", trained.get(reach.name)
        shared = {**run.labels(), "step": int(reach.until), "split": reach.split, "variant": reach.name}
        if not validation:
            shared["n"] = None
        delay = {}
        if validation and other is not None:
            baseline, effect = finite_or_nan(other.first), finite_or_nan(reach.first - other.first)
            delay = {"baseline": baseline, "effect": effect}
        yield {**shared, **delay, "metric": metrics[STEP], "value": finite_or_nan(reach.first)}
        values = {
            metrics[LASTING]: finite_or_nan(reach.lasting),
            metrics[REACHED]: float(math.isfinite(reach.first)),
            FINAL: reach.final,
        }
        if validation and other is not None:
            values[metrics[THEN]] = value_at(run, reach.name, other.first)
        if validation:
            values[MIRROR] = mirrored(run, reach.name)
        yield from ({**shared, "metric": metric, "value": value} for metric, value in values.items())


def value_at(run: Run, name: str, step: float) -> float:
    """Returns a validation metric at a step, linear between logged ones; NaN at no step."""
    import numpy as np

    return float(np.interp(step, *run.points(name))) if math.isfinite(step) else math.nan


def mirrored(run: Run, name: str) -> float:
    """Returns Spearman's correlation of an accuracy with the loss of the same answer; NaN without one.

    Over logged steps up to that at which the accuracy first is at its largest: after it accuracies tie, and the loss
    goes on falling, so that the longer a run goes on, the lower would the correlation be.
    """
    import numpy as np

    from circuits.statistics import spearman

    loss_name = f"loss{name.removeprefix(ACCURACY)}"
    one, other = (dict(zip(*run.points(each), strict=True)) for each in (name, loss_name))
    steps = sorted(one.keys() & other.keys())
    if steps:
        # ``max`` gives the first of several.
        steps = [step for step in steps if step <= max(steps, key=lambda step: one[step])]
    if len(steps) < 3:
        return math.nan
    return float(spearman(*(np.array([[curve[step] for step in steps]]) for curve in (one, other)))[0])


def order_rows(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[Row]:
    """Yields rows on the order in which the answers of a run generalise."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan

    of_prime = {modulus(reach.name): reach for reach in reaches if reach.split == "validation"}
    primes = sorted(q for q in of_prime if q is not None)
    if len(primes) < 2:
        return
    sides = {
        "order of all answers": primes,
        f"order of answers below {TOGETHER_FROM}": [q for q in primes if q < TOGETHER_FROM],
        f"order of answers from {TOGETHER_FROM} on": [q for q in primes if q >= TOGETHER_FROM],
    }
    for variant, moduli in sides.items():
        chosen = np.array([of_prime[q].first for q in moduli])
        if len(chosen) < 2:
            continue
        row = {**run.labels(), "step": int(of_prime[primes[0]].until), "variant": variant}
        yield {**row, "metric": PAIRS, "value": share_in_order(chosen)}
        first, last = chosen.min(), chosen.max()
        # Of answers none of which got there nothing is known; nor is there a share of step 0.
        known = 0 < first < math.inf
        yield {**row, "metric": SPREAD, "value": finite_or_nan(last / first) if known else math.nan}
        share = float(np.isfinite(chosen).mean())
        yield {**row, "metric": REACHED.format(level=percent(level)), "value": share}


def share_in_order(steps: Array) -> float:
    """Returns the share of pairs in which the second step is later; ties count half, two infinite steps not at all."""
    import numpy as np

    counted = [
        0.5 if steps[i] == steps[j] else float(steps[i] < steps[j])
        for i in range(len(steps))
        for j in range(i + 1, len(steps))
        if not (math.isinf(steps[i]) and math.isinf(steps[j]))
    ]
    return float(np.mean(counted)) if counted else math.nan


def median(values: Array) -> float:
    """Returns the median of values of which some are infinite; infinite, or NaN, where it is unknown."""
    import numpy as np

    ordered = np.sort(values)
    with np.errstate(invalid="ignore"):
        return float((ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)


def named(run: Run, kind: str, split: str = "validation") -> list[str]:
    """Returns the logged metrics ``accuracy`` (or ``loss``), ``accuracy_q``, ..., of several answers the mean first."""
    return [name for name in run.logged(split) if name == kind or name.startswith(f"{kind}_")]


def modulus(name: str) -> int | None:
    """Returns 11 for ``accuracy_11``."""
    number = name.rpartition("_")[2]
    return int(number) if number.isdecimal() else None
