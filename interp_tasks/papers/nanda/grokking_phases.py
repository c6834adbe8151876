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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from interp_tasks.measurement.level_crossing_steps import lasting_crossing_steps
from interp_tasks.measurement.result import Row

#: Phases are looked for in curves of this many stored steps at least.
MIN_STEPS = 4
#: Where the way of a curve begins that does not begin at its first value.
STARTS: dict[str, Callable[..., Any]] = {
    "test loss": np.argmax,
    "restricted loss": np.argmax,
    "held-out restricted loss": np.argmax,
    "excluded loss": np.argmin,
}


def step_at_share(curve_name: str, steps: Sequence[int], curve: Sequence[float], share: float) -> float:
    """Returns the step at which the curve of this name has made a share of its way to its last value."""
    begin = int(STARTS[curve_name](curve)) if curve_name in STARTS else 0
    values = np.asarray(curve, dtype=float)[begin:]
    return float(lasting_crossing_steps(steps[begin:], values[None], share, values[:1], values[-1:])[0])


def phase_boundaries(losses: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Returns the steps that bound the phases, by a run's losses: name -> step -> value; NaN for one that is not there.

    None for a run of too few steps, or without splits.
    """
    steps = sorted(losses.get("test loss", ()))
    if "train loss" not in losses or len(steps) < MIN_STEPS:
        return {}
    shares = {
        "memorisation ends": ("train loss", 0.9),
        "cleanup begins": ("test loss", 0.1),
        "cleanup ends": ("test loss", 0.9),
    }
    return {
        name: step_at_share(loss, steps, [losses[loss][step] for step in steps], share)
        for name, (loss, share) in shares.items()
    }


def phase_rows(answer: str, curves: Mapping[str, Mapping[int, float]]) -> Iterator[Row]:
    """Yields the boundaries of an answer's phases, the change of each curve in each phase, and its half-way step."""
    ends = phase_boundaries(curves)
    if not ends:
        return
    steps = sorted(curves["test loss"])
    for name, step in ends.items():
        about = {"intervention": "boundary of phases", "variant": answer}
        yield {**about, "metric": f"step: {name}", "value": step}
    memorised, cleanup, end = ends.values()
    formation = (memorised, cleanup) if memorised < cleanup else (math.nan, math.nan)
    phases = {"memorisation": (0.0, memorised), "circuit formation": formation, "cleanup": (cleanup, end)}
    lines = {name: [values[step] for step in steps] for name, values in curves.items()}
    half = step_at_share("test loss", steps, lines["test loss"], 0.5)
    for name, line in lines.items():
        for phase, bounds in phases.items():
            is_there = not any(map(math.isnan, bounds))
            first, last = map(float, np.interp(bounds, steps, line)) if is_there else (math.nan, math.nan)
            row = {"variant": answer, "intervention": phase, "metric": f"change of {name}"}
            yield {**row, "value": last - first, "baseline": first}
        step = step_at_share(name, steps, line, 0.5)
        row = {"variant": answer, "intervention": "half of its way", "metric": f"step: {name}"}
        yield {**row, "value": step, "baseline": half, "effect": step - half}
