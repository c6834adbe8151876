"""Compares runs over seeds: pools the rows of one configuration, and pairs runs of two by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._generalisation.reaches import AT_LEAST, AT_MOST, RATIO, Reach, reaches_of
from interp_tasks.measurement.intervals import interval_over_runs, share_interval
from interp_tasks.measurement.run_logs import Run, family, read_runs


def groups_of(logged_runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs that are seeds of one configuration; any other run is a group by itself."""
    groups: dict[str, list[Run]] = {}
    for run in logged_runs:
        groups.setdefault(family(run.name) or run.name, []).append(run)
    return groups


def pooled(name: str, group: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows that pool several seeds: medians, ranges and intervals."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan, median

    group_rows = [row for row in rows if row["run"] in {run.name for run in group}]
    for key in dict.fromkeys((row["split"], row["variant"], row["metric"]) for row in group_rows):
        same = [row for row in group_rows if (row["split"], row["variant"], row["metric"]) == key]
        values = np.array([row["value"] for row in same])
        steps = key[2].startswith(("step at", "seconds at"))
        if steps:
            values = np.where(np.isnan(values), np.inf, values)
        values = values[~np.isnan(values)]
        shared = {**same[0], "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        shared |= {"step": max(row["step"] for row in same)}
        for column in ("baseline", "effect"):
            shared.pop(column, None)
        share = key[2].startswith("reached")
        if not len(values):
            yield {**shared, "value": math.nan}
            continue
        middle = values.mean() if share else median(values)
        low, high = (share_interval if share else interval_over_runs)(values.tolist())
        yield {
            **shared,
            "value": finite_or_nan(float(middle)),
            "value_ci_low": low,
            "value_ci_high": high,
        }
        if not share:
            for word, extreme in (("smallest", values.min()), ("largest", values.max())):
                yield {**shared, "metric": f"{key[2]}, {word}", "value": finite_or_nan(extreme)}


def opponents(
    logged_runs: Sequence[Run], reaches: Sequence[Reach], against: Sequence[str], level: float
) -> tuple[list[str], list[Reach]]:
    """Returns the names of the runs to compare with, and the steps at which they reach the level."""
    if not against:
        return [], []
    names = {run.name: (family(run.name) or run.name).removesuffix("/seed-*") for run in logged_runs}
    chosen = [
        run
        for run, name in names.items()
        if any(f"/{name.replace(':', '/')}".endswith(f"/{end}") for end in against)
    ]
    if chosen:
        return chosen, [reach for reach in reaches if reach.run.name in chosen]
    others = read_runs(against)
    return [run.name for run in others], [reach for run in others for reach in reaches_of(run, level)]


def ratio_rows(
    logged_runs: Sequence[Run],
    reaches: Sequence[Reach],
    compared: Sequence[str],
    others: Sequence[Reach],
) -> Iterator[dict[str, Any]]:
    """Yields every group of runs against the others, answer by answer, seed by seed.

    Raises:
        UserError: if no answer and seed is on both sides, or two of the others have the same.
    """
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan, median, ratio_of_steps

    opponent_reaches: dict[tuple[str, Any], Reach] = {}
    for other in others:
        if other.split != "validation":
            continue
        same = opponent_reaches.setdefault((other.name, seed_of(other.run)), other)
        if same is not other:
            raise UserError(
                f"--against: {same.run.name} and {other.run.name} both have {other.name} under seed "
                f"{seed_of(other.run)}: compare with one of them at a time"
            )
    any_pair = False
    for name, group in groups_of([run for run in logged_runs if run.name not in compared]).items():
        group_reaches = [reach for reach in reaches if reach.run in group and reach.split == "validation"]
        for variant in dict.fromkeys(reach.name for reach in group_reaches):
            pairs = [
                (reach, opponent_reaches[variant, seed_of(reach.run)])
                for reach in group_reaches
                if reach.name == variant and (variant, seed_of(reach.run)) in opponent_reaches
            ]
            if not pairs:
                continue
            any_pair = True
            ratios = np.array([ratio_of_steps(one.first, one.until, o.first, o.until) for one, o in pairs])
            ratios = ratios[~np.isnan(ratios[:, 0])]
            first, other = pairs[0]
            row = {
                **first.run.labels(),
                "run": name,
                "ref": name,
                "variant": variant,
                "step": int(first.until),
            }
            row |= {"n_runs": len(ratios), "seed": seed_of(first.run) if len(pairs) == 1 else None}
            row |= {"baseline": finite_or_nan(other.first)} if len(pairs) == 1 else {}
            if not len(ratios):
                yield from (
                    {**row, "metric": metric, "value": math.nan} for metric in (RATIO, AT_LEAST, AT_MOST)
                )
                continue
            (least, lowest, *_), (most, _, highest) = found = [
                (float(median(values)), *interval_over_runs(values.tolist(), log=True))
                for values in ratios.T[1:]
            ]
            # Known where both bounds are one: a 0 that stands for "at most" has no part in a mean of the middle two.
            known = (least, lowest, highest) if least == most else (math.nan,) * 3
            for metric, numbers in zip((RATIO, AT_LEAST, AT_MOST), (known, *found), strict=True):
                value, low, high = map(finite_or_nan, numbers)
                yield {**row, "metric": metric, "value": value, "value_ci_low": low, "value_ci_high": high}
    if not any_pair:
        raise UserError(
            f"--against {', '.join(compared)}: none of the runs has an accuracy of that name under the same seed; "
            "pairs are runs with one train.seed"
        )


def seed_of(run: Run) -> Any:
    return run.config.get("train", {}).get("seed")
