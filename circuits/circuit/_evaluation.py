"""Tests circuits: faithfulness compared with random circuits, completeness, and each member's own share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from circuits.arguments import check_renamed_args, parse_count, parse_seed, stringify_keys
from circuits.circuit._circuit import Circuit
from circuits.circuit._circuit_runner import CircuitRunner, PatchSetup, stack_sums_and_counts
from circuits.errors import CircuitsError, format_value
from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import Series, points, rows_to_one_series
from circuits.model.types import BatchLike, Figure, MetricLike, TokensLike
from circuits.statistics import holm_adjusted, p_value_floor_notes, sign_flip_p_values
from circuits.sweeps.metric import Row
from circuits.table_printing import ci_names, interval_columns, metrics_asked_for, short_table_text

_CALLER = "circuit.evaluate"
#: Shares that differ by no more are equal: the last digits of an example depend on what runs beside it.
ROUNDING = 1e-6
#: The columns that an evaluation shows of itself.
SHOWN = ("circuit", "metric", "size", *ci_names("faithfulness"), "random_high", "p_random")
COMPLETENESS = ("circuit", "metric", "size", "without", "model_without", *ci_names("difference"), "removed")
MINIMALITY = ("circuit", "metric", "member", *ci_names("share"), "p_value", "p_adjusted")


@dataclass(frozen=True)
class Evaluation:
    """The result of `circuit.evaluate`. Intervals are over examples, paired: every run is on the same examples.

    Attributes:
        frame: a row per circuit and metric: `size`, its members, and `share`, the part of all that can matter which is
            among them (a member at some positions counts by their share); `value`, the metric where the circuit is
            kept, and `faithfulness`, with intervals; `random_mean`, `random_low` and `random_high`, mean and range of
            the faithfulness of `random` circuits of the same size, and `p_random`, (1 + those at least as faithful) /
            (1 + random); without a gap between clean and source run there is neither.
        completeness: a row per circuit, subset K and metric: `removed` members of the circuit, `without`, the
            faithfulness of the circuit without K, `model_without`, that of the whole model without K, and their
            `difference` with its interval: 0 for a circuit that has all there is.
        minimality: a row per circuit, member and metric: its own `share`, faithfulness of the circuit minus that
            without it, with an interval; `p_value`, a paired sign-flip test of the metric, and `p_adjusted`, Holm's
            adjustment over a circuit's members. Members that can stand in for each other have a share of 0 each.
        baseline: a row per metric: the metric of the clean and of the source run, and `gap`, the difference that
            faithfulness is a share of, with its interval. Where that holds 0, faithfulness means nothing.
        settings: how, seed, draws, forwards and so on.
    """

    frame: pd.DataFrame
    completeness: pd.DataFrame
    minimality: pd.DataFrame
    baseline: pd.DataFrame
    settings: dict[str, Any]

    def __repr__(self) -> str:
        lines = [short_table_text(self.frame, SHOWN)]
        if self.settings["random"]:
            lines.append(
                f"random_high: the most faithful of {self.settings['random']} random circuits of the same size; "
                "p_random: (1 + those at least as faithful as the circuit) / (1 + all)."
            )
        tested = self.minimality.groupby(["circuit", "metric"], sort=False)["p_value"]
        examples, flips = self.settings["n"], self.settings["flips"]
        notes = (
            p_value_floor_notes(p_values.to_numpy(dtype=float), examples, flips) for _, p_values in tested
        )
        return "\n".join([*lines, *dict.fromkeys(f"Minimality: {line}" for each in notes for line in each)])

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a plotly figure of the faithfulness of circuits and of random ones, under one metric (the first)."""
        metric, *_ = metrics_asked_for(self.frame, metric)
        rows = self.frame[self.frame["metric"] == metric]
        drawn = rows[rows["random_low"].notna()]
        ends = (drawn[end].tolist() for end in ("circuit", "random_mean", "random_low", "random_high"))
        series = {"the circuit": rows_to_one_series(rows, "circuit", "faithfulness")}
        series["random circuits of its size, and their range"] = Series(*ends)
        panel = points(series, y="faithfulness", lines=[{"y": 1}])
        subtitle = "0: as the source run, 1 (dashed): as the whole model, with 95% intervals over examples."
        return draw_panels([panel], f"Faithfulness: {metric}", subtitle, scattermode="group", scattergap=0.5)


@check_renamed_args
def evaluate(
    model: nn.Module,
    circuits: Mapping[str, Circuit] | Circuit,
    base: TokensLike,
    source: TokensLike | None,
    metric: MetricLike = None,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    batch_size: int | None = None,
    random: int = 99,
    subsets: int = 10,
    minimality: bool = True,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> Evaluation:
    """Measures how well circuits stand for the whole model on some examples.

    Faithfulness of a circuit is (m(kept) − m(source)) / (m(clean) − m(source)), m the metric's mean over examples: 0
    where the circuit does as the source run, 1 where it does as the clean one; it may lie outside. Give other examples
    than those on which the circuit was found: on the same ones, faithfulness is overestimated (overfitting).

    Args:
        circuits: by name, of nodes or of edges.
        base: tokens [n pos], the clean run.
        source: tokens, whose values are on the edges outside a circuit; None for "zero".
        metric: `fn(output)`, or `fn(output, batch[rows])`; default: the logit difference of the two first choices.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge outside carries: "resample", the source's values; "mean", their mean; "zero", nothing. The
            source run is that of the empty circuit.
        batch_size: examples in a forward; by default by the model's size.
        random: random circuits, of as many members as the circuit has that can matter (under "resample" and "mean"
            position embeddings cannot), at as many positions each; `p_random` is 1 / (1 + random) at least.
        subsets: random subsets K of a circuit for completeness (Wang et al. 2022, arXiv:2211.00593, section 4).
        minimality: whether each member is taken out by itself.
        seed: of the draws of circuits and subsets, and of the statistics.
        draws: resamples of the examples for intervals.
        flips: sign flips for p-values.

    Where the gap's interval holds 0, a warning says so. A circuit costs at most 1 + random + 2·subsets + size forwards.
    """
    given, seed = _parse_circuits(circuits), parse_seed(seed, _CALLER)
    counts = _parse_counts(random=random, subsets=subsets, draws=draws, flips=flips)
    setup = PatchSetup.parse(_CALLER, model, base, source, metric, batch, how)
    runs = CircuitRunner.after_clean_and_source(setup, batch_size, seed, draws)
    for name, one in given.items():
        runs.graph.check_same_sizes(one.graph, f"{_CALLER}: {name}")
        runs.graph.check_members(one.where, one.kind, f"{_CALLER}: {name}")

    def rows_by_circuit(test: Callable[..., Iterator[Row]], *more: int) -> list[Row]:
        return [{"circuit": name, **row} for name, one in given.items() for row in test(runs, one, *more)]

    return Evaluation(
        pd.DataFrame(rows_by_circuit(_measure_faithfulness, random)),
        pd.DataFrame(rows_by_circuit(_measure_completeness, subsets), columns=COMPLETENESS),
        pd.DataFrame(rows_by_circuit(_measure_minimality, flips) if minimality else [], columns=MINIMALITY),
        runs.tabulate_clean_and_source(),
        runs.result_settings() | counts,
    )


def _parse_counts(**counts: int) -> dict[str, int]:
    """Returns the counts by name, whole numbers from 0, or from 1 of draws and flips."""
    least = {"draws": 1, "flips": 1}
    return {name: parse_count(count, _CALLER, name, least.get(name, 0)) for name, count in counts.items()}


def _measure_faithfulness(runner: CircuitRunner, circuit: Circuit, random: int) -> Iterator[Row]:
    """Yields, for each metric, the share that the circuit and random ones of its size keep."""
    candidates = sorted(runner.members_that_can_differ(circuit.kind), key=lambda one: one.sort_key)
    own = [(member, circuit.where[member]) for member in candidates if member in circuit.where]
    # Circuits of one size have the same controls, where all are at all positions.
    rng = np.random.default_rng([runner.seed, 3, len(own)])
    runs = [runner.measure_circuit(circuit)]
    for _ in range(random):
        chosen = rng.choice(len(candidates), len(own), replace=False)
        drawn = {candidates[index]: at for index, (_, at) in zip(chosen, own, strict=True)}
        runs.append(runner.measure_circuit(Circuit.of(circuit.kind, drawn, runner.graph)))
    share = runner.share_of_members(own, len(candidates))
    for metric, measured in runner.faithfulness_by_metric(runs):
        kept, others = measured.share[0], measured.share[1:]
        row = {"metric": metric, "size": len(circuit), "share": share, **measured.row_of_run(0)}
        row |= dict.fromkeys(("random_mean", "random_low", "random_high", "p_random"), np.nan)
        if random:
            row |= {"random_mean": others.mean(), "random_low": others.min(), "random_high": others.max()}
        if random and not np.isnan(kept):
            row["p_random"] = (1 + (others >= kept - ROUNDING).sum()) / (1 + random)
        yield row | {"n": measured.n}


def _measure_completeness(runner: CircuitRunner, circuit: Circuit, subsets: int) -> Iterator[Row]:
    """Yields, for each subset taken out, the shares of the circuit and of the model without it."""
    members, rng = circuit.members, np.random.default_rng([runner.seed, 4])
    removed: list[Circuit] = []
    for _ in range(subsets if members else 0):
        chosen = rng.random(len(members)) < 0.5
        # An empty subset would test nothing, so one member is always taken out.
        chosen[rng.integers(len(members))] = True
        where = dict(one for one, out in zip(members, chosen, strict=True) if out)
        removed.append(Circuit.of(circuit.kind, where, runner.graph))
    measure = runner.measure_circuit
    runs = [run for part in removed for run in (measure(circuit - part), measure(part, keep=False))]
    for metric, measured in runner.faithfulness_by_metric(runs):
        for at, part in enumerate(removed):
            (own, of_model), drawn = measured.share[2 * at :][:2], measured.drawn[:, 2 * at :]
            row = {"metric": metric, "size": len(part), "without": own, "model_without": of_model}
            row |= interval_columns("difference", own - of_model, drawn[:, 0] - drawn[:, 1])
            yield row | {"removed": "; ".join(str(member) for member, _ in part.members)}


def _measure_minimality(runner: CircuitRunner, circuit: Circuit, flips: int) -> Iterator[Row]:
    """Yields, for each member, the share that the circuit loses without it, tested against no loss."""
    where = circuit.where
    rests = [
        Circuit.of(circuit.kind, {one: where[one] for one in where if one != member}, runner.graph)
        for member in where
    ]
    runs = [runner.measure_circuit(one) for one in (circuit, *rests)]
    for metric, measured in runner.faithfulness_by_metric(runs) if rests else ():
        p_values = sign_flip_p_values(*stack_sums_and_counts(runs, metric), runner.seed, flips)[1:]
        tests = zip(circuit, p_values, holm_adjusted(p_values), strict=True)
        for at, (member, p_value, adjusted) in enumerate(tests, start=1):
            lost = measured.drawn[:, 0] - measured.drawn[:, at]
            row = {"metric": metric, "member": member}
            row |= interval_columns("share", measured.share[0] - measured.share[at], lost)
            yield row | {"p_value": p_value, "p_adjusted": adjusted}


def _parse_circuits(circuits: Any) -> dict[str, Circuit]:
    given = {"circuit": circuits} if isinstance(circuits, Circuit) else circuits
    if not isinstance(given, Mapping) or not given:
        raise CircuitsError(f"{_CALLER}: give circuits by name, {{'IG': c}}; got {format_value(given)}")
    for name, one in given.items():
        if not isinstance(one, Circuit):
            raise CircuitsError(
                f"{_CALLER}: {name}: {type(one).__name__} is no circuit; make one with found.top(20) or circuit.edges"
            )
    return stringify_keys(given, _CALLER, "circuits")
