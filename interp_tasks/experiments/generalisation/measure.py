"""When each answer of a run generalises: the step at which its accuracy reaches a level, on both sides of the split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import final_level
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, family, modulus, named, read_runs
from interp_tasks.measurement.table import tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

ACCURACY = "accuracy"
SPLITS = ("validation", "train")
#: What the table calls things; ``{level}`` is the level in per cent.
STEP, LASTING, REACHED = "step at {level}", "step at {level} for good", "reached {level}"
SECONDS = "seconds at {level}"
THEN = "validation when train is at {level}"
FINAL, MIRROR, PLACE = "final level", "rank correlation with its loss", "place in order"
PAIRS, SPREAD = "pairs in order", "last step / first step"
RATIO, AT_LEAST, AT_MOST = "ratio of steps", "ratio of steps, at least", "ratio of steps, at most"
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


@dataclass(frozen=True)
class GeneralisationResult(Result):
    """A :class:`Result` with the runs behind it."""

    runs: Sequence[Run] = field(default_factory=tuple)
    level: float = 0.95

    def plot(self) -> plotly.graph_objects.Figure:
        """Draws the accuracy of every answer over steps: a line each, or a map where there are many."""
        from interp_tasks.experiments.generalisation.figure import figure

        return self.titled(figure(curves_of(self.runs, ACCURACY), ACCURACY, self.level), self.heading())

    def losses(self) -> plotly.graph_objects.Figure | None:
        """Draws the losses in the same way; ``None`` where the log has no loss for each answer."""
        from interp_tasks.experiments.generalisation.figure import figure

        logged = [run for run in self.runs if any(named(run, "loss"))]
        return figure(curves_of(logged, "loss"), "loss", None) if logged else None

    def heading(self) -> str:
        return "Accuracy of every answer over training"

    def caption(self) -> str:
        return "Validation above, the batches trained on below. Steps on a logarithmic scale."

    def figures(self) -> list[Figure]:
        """Returns the accuracies, and the losses where they are logged by answer."""
        losses = self.losses()
        more = [] if losses is None else [Figure(losses, "Loss of every answer over training")]
        return super().figures() + more


@experiment("modular", says={"level": LEVEL, "against": []})
def generalisation(
    runs: str | Sequence[str],
    level: Annotated[float, typer.Option("--level", help="Of an accuracy, above 0, at most 1.")] = LEVEL,
    against: Annotated[
        str | Sequence[str],
        typer.Option(
            "--against",
            metavar="RUN",
            help="Compare steps with this run, seed by seed; also the end of the name of one given. Repeatable.",
        ),
        list[str],
    ] = (),
    seed: Annotated[int, typer.Option("--seed", help="Draws the intervals.")] = 0,
) -> GeneralisationResult:
    """Say at which step each accuracy of a run reaches a level, in training and validation, in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is said
    to be so by its last step. With --against, how many times as many steps it takes as another.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; ``RUN/seed-0``, ``RUN/seed-1``, ... are also pooled.
        level: of an accuracy.
        against: runs to compare the steps with, seed by seed: as ``runs``, or what the names of some of ``runs`` end
            with.
        seed: of the intervals.

    Returns:
        A :class:`GeneralisationResult`. The ``variant`` is an accuracy as the run logs it, the ``split`` validation or
        train; the ``metric`` is ``step at 95%`` and ``step at 95% for good`` (interpolated between logged steps; empty
        for a run that is not there by its last step, which is the ``step`` of the row), ``reached 95%`` (1 or 0),
        ``final level``, ``seconds at 95%`` of a run that logs its clock (updates alone), ``rank correlation with its
        loss`` over logged steps up to that at which it first is at its largest (later ones tie). Of validation,
        ``baseline`` is the step of train, ``effect`` the delay, and ``validation when train is at 95%`` is how far it
        has come by then: chance where a run memorises first, the level where it does not.
        Variants that begin with ``order`` are about several accuracies ``accuracy_q`` of a run: ``place in order`` of
        each, ``pairs in order`` (the share of pairs of which the smaller q comes first), ``last step / first step``.
        Against others: ``ratio of steps``, and what it is ``at least`` and ``at most`` where one side never gets there.
        Rows of several seeds have the median, the range (``..., smallest``, ``..., largest``) and, from three seeds
        on, intervals by bootstrap over them; a run that does not get there counts as later than all others.

    Raises:
        UserError: in one line.
    """
    check_level(level)
    logged_runs = read_runs(runs)
    reaches = [reach for run in logged_runs for reach in reaches_of(run, level)]
    compared, others = opponents(
        logged_runs, reaches, [against] if isinstance(against, str) else list(against), level
    )
    rows: list[dict[str, Any]] = []
    for run in logged_runs:
        run_reaches = [reach for reach in reaches if reach.run.name == run.name]
        rows += rows_of(run, run_reaches, level)
        rows += order_rows(run, run_reaches, level)
    rows += [
        row
        for name, group in groups_of(logged_runs).items()
        if len(group) > 1
        for row in pooled(name, group, rows, seed)
    ]
    if others:
        rows += ratio_rows(logged_runs, reaches, compared, others, seed)
    import pandas

    frame = tidy(pandas.DataFrame(rows).assign(experiment="generalisation", intervention="none"))
    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "level": level,
        "against": compared,
        "seed": seed,
    }
    return GeneralisationResult(
        "generalisation",
        frame,
        config,
        (*notes(logged_runs, bool(others)), *unread(logged_runs)),
        runs=logged_runs,
        level=level,
    )


def curves_of(runs: Sequence[Run], kind: str) -> pandas.DataFrame:
    """Returns a row per logged value of the metrics of a kind, validation before train."""
    import pandas

    rows = [
        (run.name, name, split, step, value)
        for split in SPLITS
        for run in runs
        for name in named(run, kind)
        for step, value in zip(*run.points(name, split), strict=True)
    ]
    return pandas.DataFrame(rows, columns=["run", "metric", "split", "step", "value"])


def check_level(level: float) -> None:
    if not 0 < level <= 1:
        raise UserError(f"--level {level:g}: an accuracy above 0, at most 1")


def notes(logged_runs: Sequence[Run], compared: bool) -> tuple[str, ...]:
    several = any(len(group) > 1 for group in groups_of(logged_runs).values())
    return (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation.",
        *(
            ["Of several seeds: the median; a run that does not get there is later than all others."]
            if several
            else []
        ),
        *(
            [
                "Ratio of steps: paired by seed. Where one of a pair does not get there, its last step bounds the "
                "ratio from one side; where neither does, nothing is known and the pair is left out."
            ]
            if compared
            else []
        ),
    )


def unread(logged_runs: Sequence[Run]) -> Iterator[str]:
    """Yields a note for each logged accuracy that is no number at some step."""
    for run in logged_runs:
        for split in SPLITS:
            for name in named(run, ACCURACY, split):
                steps = run.left_out(name, split)
                if steps:
                    yield (
                        f"{run.name}: {split} {name} is no number at {len(steps)} logged step"
                        f"{'s' if len(steps) > 1 else ''}, the first of them {steps[0]}: left out."
                    )


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
            logged = [
                (step, value)
                for step, value in zip(steps, values, strict=True)
                if step or split == "validation"
            ]
            if not logged:
                continue
            steps, values = zip(*logged, strict=True)
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


def rows_of(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[dict[str, Any]]:
    from interp_tasks.measurement.crossings import finite_or_nan

    trained = {reach.name: reach for reach in reaches if reach.split == "train"}
    for reach in reaches:
        shared = {**run.labels(), "step": int(reach.until), "split": reach.split, "variant": reach.name}
        if reach.split == "train":
            shared["n"] = None
        other = trained.get(reach.name)
        delay = {}
        if reach.split == "validation" and other is not None:
            delay = {
                "baseline": finite_or_nan(other.first),
                "effect": finite_or_nan(reach.first - other.first),
            }
        yield {
            **shared,
            **delay,
            "metric": STEP.format(level=percent(level)),
            "value": finite_or_nan(reach.first),
        }
        yield {
            **shared,
            "metric": LASTING.format(level=percent(level)),
            "value": finite_or_nan(reach.lasting),
        }
        yield {
            **shared,
            "metric": REACHED.format(level=percent(level)),
            "value": float(math.isfinite(reach.first)),
        }
        yield {**shared, "metric": FINAL, "value": reach.final}
        if reach.split == "validation":
            if run.clock:
                seconds = SECONDS.format(level=percent(level))
                yield {**shared, "metric": seconds, "value": seconds_at(run, reach.first)}
            if other is not None:
                value = value_at(run, reach.name, other.first)
                yield {**shared, "metric": THEN.format(level=percent(level)), "value": value}
            yield {**shared, "metric": MIRROR, "value": mirrored(run, reach.name)}


def value_at(run: Run, name: str, step: float) -> float:
    """Returns a validation metric at a step, linear between logged ones; NaN at no step."""
    import numpy as np

    return float(np.interp(step, *run.points(name))) if math.isfinite(step) else math.nan


def seconds_at(run: Run, step: float) -> float:
    """Returns the seconds of training until a step, linear between logged ones; NaN beyond the clock."""
    import numpy as np

    steps = sorted(run.clock)
    if not math.isfinite(step) or not steps[0] <= step <= steps[-1]:
        return math.nan
    return float(np.interp(step, steps, [run.clock[each] for each in steps]))


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


def order_rows(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[dict[str, Any]]:
    """Yields rows on the order in which the answers of a run generalise."""
    import numpy as np

    from circuits.statistics import spearman
    from interp_tasks.measurement.crossings import finite_or_nan, share_in_order

    of_prime = {modulus(reach.name): reach for reach in reaches if reach.split == "validation"}
    primes = sorted(q for q in of_prime if q is not None)
    if len(primes) < 2:
        return
    steps = np.array([of_prime[q].first for q in primes])
    shared = {**run.labels(), "step": int(of_prime[primes[0]].until)}
    for q, step in zip(primes, steps, strict=True):
        # Those that are as late, or not there, share their places.
        rank = (steps < step).sum() + ((steps == step).sum() + 1) / 2
        known = math.isfinite(step)
        yield {
            **shared,
            "variant": of_prime[q].name,
            "metric": PLACE,
            "value": float(rank) if known else math.nan,
        }
    sides = {
        "order of all answers": primes,
        f"order of answers below {TOGETHER_FROM}": [q for q in primes if q < TOGETHER_FROM],
        f"order of answers from {TOGETHER_FROM} on": [q for q in primes if q >= TOGETHER_FROM],
    }
    for variant, moduli in sides.items():
        chosen = np.array([of_prime[q].first for q in moduli])
        if len(chosen) < 2:
            continue
        row = {**shared, "variant": variant}
        yield {**row, "metric": PAIRS, "value": share_in_order(chosen)}
        first, last = chosen.min(), chosen.max()
        # Of answers none of which got there nothing is known; nor is there a share of step 0.
        known = 0 < first < math.inf
        yield {**row, "metric": SPREAD, "value": finite_or_nan(last / first) if known else math.nan}
        yield {
            **row,
            "metric": REACHED.format(level=percent(level)),
            "value": float(np.isfinite(chosen).mean()),
        }
        if len(chosen) > 2:
            # Ranks want numbers; whatever is later than the last step stands for "not there".
            numbers = np.where(np.isfinite(chosen), chosen, 2.0 * shared["step"] + 1)
            value = float(spearman(np.array([moduli], dtype=float), numbers[None])[0])
            yield {**row, "metric": "rank correlation of step and modulus", "value": value}


def groups_of(logged_runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs that are seeds of one configuration; any other run is a group by itself."""
    groups: dict[str, list[Run]] = {}
    for run in logged_runs:
        groups.setdefault(family(run.name) or run.name, []).append(run)
    return groups


def pooled(
    name: str, group: Sequence[Run], rows: Sequence[Mapping[str, Any]], seed: int
) -> Iterator[dict[str, Any]]:
    """Yields rows that pool several seeds: medians, ranges and intervals."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan, interval_over_seeds, median

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
        middle = (lambda drawn: drawn.mean(-1)) if share else median
        if not len(values):
            yield {**shared, "value": math.nan}
            continue
        low, high = interval_over_seeds(values, middle, seed)
        yield {**shared, "value": finite_or_nan(float(middle(values))), "ci_low": low, "ci_high": high}
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
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yields every group of runs against the others, answer by answer, seed by seed.

    Raises:
        UserError: if no answer and seed is on both sides.
    """
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan, interval_over_seeds, median, ratio_of_steps

    opponent_reaches: dict[tuple[str, Any], Reach] = {}
    for other in others:
        if other.split == "validation":
            opponent_reaches.setdefault((other.name, seed_of(other.run)), other)
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
            for column, metric in enumerate((RATIO, AT_LEAST, AT_MOST)):
                values = ratios[:, column]
                if not len(values):
                    yield {**row, "metric": metric, "value": math.nan}
                    continue
                numbers = [float(median(values)), *interval_over_seeds(values, median, seed)]
                if metric == RATIO:  # 0 and infinity stand for ratios of which there is a bound alone
                    numbers = [number or math.nan for number in numbers]
                value, low, high = map(finite_or_nan, numbers)
                yield {**row, "metric": metric, "value": value, "ci_low": low, "ci_high": high}
    if not any_pair:
        raise UserError(
            f"--against {', '.join(compared)}: none of the runs has an accuracy of that name under the same seed; "
            "pairs are runs with one train.seed"
        )


def seed_of(run: Run) -> Any:
    return run.config.get("train", {}).get("seed")
