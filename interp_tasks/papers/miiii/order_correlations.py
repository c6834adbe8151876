"""Correlates the order of generalisation with the prime q, whether q divides p − 1, and p mod q; over several p.

For each property of (q, p) the ``rank correlation with the step`` within runs, and ``of the same q`` over the runs.
Ranks are taken within each run (each q), those that do not get there last and equal; p-values are of 9,999
permutations of the steps within each run (each q). Empty where nothing varies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.logged_runs import LoggedRun, read_runs, setting_in_config
from interp_tasks.measurement.option_parsing import LEVEL, check_accuracy_level
from interp_tasks.measurement.result import Result, experiment, tidy_frame

if TYPE_CHECKING:
    from interp_tasks.measurement.token_and_position_embeddings import Array

PERMUTATIONS = 9999
FOLLOWS, SAME_Q = "rank correlation with the step", "rank correlation with the step, of the same q"
#: Of a prime q and the base p, what its step may follow.
PROPERTIES = {
    "q": lambda q, p: q,
    "q divides p − 1": lambda q, p: float(p % q == 1),
    "p mod q": lambda q, p: p % q,
}
SEED = typer.Option("--seed", help="Draws the permutations.")


class PrimeGeneralisation(NamedTuple):
    """When a prime of a run generalises; infinite where it does not."""

    run: str
    p: int
    q: int
    step: float


@experiment(says={"level": 0.95})
def prime_order(
    runs: str | Sequence[str], level: Annotated[float, LEVEL] = 0.95, seed: Annotated[int, SEED] = 0
) -> Result:
    """See what the order in which primes generalise follows: q, whether q divides p − 1, or p mod q.

    Give runs of several p: of one p the primes differ in all of these at once.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``, of tasks that log ``accuracy_q`` and have a base p.
        level: a prime has generalised once its validation accuracy first is at this level.
        seed: of the permutations.
    """
    import numpy as np

    from circuits.statistics import holm_adjusted

    check_accuracy_level(level)
    points = [point for run in read_runs(runs) for point in read_generalisations(run, level)]
    steps = np.array([point.step for point in points])
    named, by_run = np.unique([point.run for point in points], return_inverse=True)
    by_q = np.unique([point.q for point in points], return_inverse=True)[1]
    within = [
        (name, strata, permuted_ranks(steps, strata, seed))
        for name, strata in ((FOLLOWS, by_run), (SAME_Q, by_q))
    ]
    rows = []
    for name, property_of in PROPERTIES.items():
        values = np.array([float(property_of(point.q, point.p)) for point in points])
        for metric, strata, ranks in within:
            value, p_value = stratified_correlation(values, ranks, strata)
            rows.append({"variant": name, "metric": metric, "value": value, "p_value": p_value})
    labels = {"run": "all runs", "ref": "all runs", "split": "validation", "seed": seed, "n_runs": len(named)}
    frame = tidy_frame(rows, experiment="prime-order", intervention="none", n=len(points), **labels)
    frame = frame.assign(p_adjusted=holm_adjusted(frame["p_value"].to_numpy(dtype=float)))
    config = {"runs": list(dict.fromkeys(point.run for point in points)), "level": level, "seed": seed}
    notes = (
        "Rank correlation: of the property with the step, ranks within each run; positive is later. Of the same q: "
        "ranks within each q over the runs, which takes what q alone does out.",
        f"p: {PERMUTATIONS:,} permutations of the steps within each run, or each q, with Holm's adjustment.",
        "A prime that does not get there is later than all that do.",
    )
    return Result("prime-order", frame, config, notes)


def read_generalisations(run: LoggedRun, level: float) -> list[PrimeGeneralisation]:
    """Returns the primes of one run."""
    from interp_tasks.measurement.level_crossing_steps import first_and_lasting_steps

    p = setting_in_config(run.config, "task.p")
    if setting_in_config(run.config, "task.variant") == "shuffled":
        raise UserError(
            f"{run.name} has shuffled answers, which no property of q and p tells apart: leave it out"
        )
    named = [(name, name.removeprefix("accuracy_")) for name in run.logged_metrics()]
    primes = {int(q): name for name, q in named if name != q and q.isdecimal()}
    if not isinstance(p, int) or not primes:
        raise UserError(
            f"{run.name} logs no accuracy_q of primes q below a base p: prime-order is of the task miiii"
        )
    steps = {
        q: first_and_lasting_steps(*run.finite_as_lists(name), level)[0] for q, name in sorted(primes.items())
    }
    return [PrimeGeneralisation(run.name, p, q, step) for q, step in steps.items()]


def permuted_ranks(values: Array, strata: Any, seed: int) -> Array:
    """Returns ranks within strata, less their mean, and below them permutations within strata."""
    import numpy as np

    draws = np.random.default_rng([seed, 4])
    members = [np.flatnonzero(strata == stratum) for stratum in np.unique(strata)]
    ranks = np.tile(centred_ranks(values, strata), (1 + PERMUTATIONS, 1))
    for row in ranks[1:]:
        for indices in members:
            row[indices] = ranks[0, draws.permutation(indices)]
    return ranks


def stratified_correlation(x: Array, permuted: Array, strata: Any) -> tuple[float, float]:
    """Returns the rank correlation within strata and its two-sided p-value; NaN where nothing varies."""
    one = centred_ranks(x, strata)
    size = math.sqrt((one**2).sum() * (permuted[0] ** 2).sum())
    if size < 1e-12:
        return math.nan, math.nan
    observed, *drawn = (permuted @ one / size).tolist()
    hits = sum(abs(value) >= abs(observed) - 1e-12 for value in drawn)
    return observed, (1 + hits) / (1 + PERMUTATIONS)


def centred_ranks(values: Array, strata: Any) -> Array:
    """Ranks within each stratum, equal values sharing theirs, less the stratum's mean."""
    import numpy as np
    import pandas

    ranks = pandas.Series(values).groupby(strata).rank()
    return np.asarray(ranks - ranks.groupby(strata).transform("mean"))
