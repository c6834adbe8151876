"""Tests circuits: faithfulness compared with random circuits, completeness, and each member's own share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from circuits.circuit._graph import Member
from circuits.circuit._measurement import Faithfulness, Measurement, stacked, with_interval
from circuits.circuit._value import Circuit
from circuits.errors import CircuitsError, said
from circuits.statistics import holm, ratio, sign_flip, unreachable
from circuits.sweeps.measurements import Row
from circuits.sweeps.metrics import PerExample
from circuits.tables import short_table
from circuits.validate import by_text, is_whole, read_seed

_CALLER = "circuit.evaluate"
#: The columns that an evaluation shows of itself.
SHOWN = (
    "circuit",
    "metric",
    "size",
    "faithfulness",
    "faithfulness_ci_low",
    "faithfulness_ci_high",
    "random_high",
    "p_random",
)
#: Members that one step of the greedy search tries.
_CANDIDATES_PER_STEP = 10


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
            `difference` with its interval: 0 for a circuit that has all there is. `subset` is "random", or "greedy" for
            subsets that were sought, on the same examples, for a large difference.
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
        lines = [short_table(self.frame, SHOWN)]
        if self.settings["random"]:
            lines.append(
                f"random_high: the most faithful of {self.settings['random']} random circuits of the same size; "
                "p_random: (1 + those at least as faithful as the circuit) / (1 + all)."
            )
        tested = self.minimality.groupby(["circuit", "metric"], sort=False)["p_value"]
        limits = (
            line
            for _, p_values in tested
            for line in unreachable(
                p_values.to_numpy(dtype=float), self.settings["n"], self.settings["flips"]
            )
        )
        return "\n".join([*lines, *dict.fromkeys(f"Minimality: {line}" for line in limits)])

    def plot(self, metric: str | None = None, kind: str = "faithfulness") -> Any:
        """Returns a plotly figure of one of the three tests.

        Args:
            metric: by default the first.
            kind: "faithfulness", each circuit and random ones; "completeness", each subset taken out of the circuit
                and of the model; "minimality", each member's own share.
        """
        from circuits.figures import results

        kinds = {
            "faithfulness": (self.frame, results.faithfulness_figure),
            "completeness": (self.completeness, results.completeness_figure),
            "minimality": (self.minimality, results.minimality_figure),
        }
        if kind not in kinds:
            raise CircuitsError(f"plot: kind={kind!r}; it is {', '.join(map(repr, kinds))}")
        names = list(dict.fromkeys(self.frame["metric"]))
        metric = names[0] if metric is None else metric
        if metric not in names:
            raise CircuitsError(f"plot: no metric {metric!r}; it has {', '.join(names)}")
        table, draw = kinds[kind]
        rows = table[table["metric"] == metric]
        if rows.empty:
            raise CircuitsError(f"plot: {kind} was not measured: see the arguments of {_CALLER}")
        return draw(rows, metric)


def evaluate(
    model: Any,
    circuits: Mapping[str, Circuit] | Circuit,
    base: Any,
    source: Any,
    metric: Any = None,
    *,
    batch: Any = None,
    how: str = "resample",
    batch_size: int | None = None,
    random: int = 99,
    subsets: int = 10,
    greedy: int = 5,
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
        source: tokens, as in `Circuit.keep`, whose values are on the edges outside a circuit.
        metric: as in `sweep`; with `batch`, a function of output and rows of the batch. By default the logit difference
            between the clean run's first and second choice, as in `patch.edges`.
        how: as in `Circuit.keep`; the source run is that of the empty circuit.
        batch_size: examples in a forward, by default as in `sweep`; `settings` says how many.
        random: number of random circuits, of as many members as the circuit has that can matter, at as many positions
            each; `p_random` is 1 / (1 + random) at least. Members that send position embeddings cannot matter under
            "resample" and "mean": they have the same value in both runs.
        subsets: number of random subsets K of a circuit, of any size, for completeness (Wang et al. 2022,
            arXiv:2211.00593, section 4).
        greedy: the most members of K that are sought one by one, each among 10 drawn at random, so that the circuit
            and the model without K differ most in the first metric.
        minimality: whether each member is taken out by itself.
        seed: of the draws of circuits and subsets, and of the statistics.
        draws: resamples of the examples for intervals.
        flips: sign flips for p-values.

    One forward for each circuit that is kept or cut: 1 + random + 2·subsets + 20·greedy + size for each, at most;
    `settings["forwards"]` counts them. Where the gap's interval holds 0, a warning says so.
    """
    given = _read(circuits)
    for name, number, least in (
        ("random", random, 0),
        ("subsets", subsets, 0),
        ("greedy", greedy, 0),
        ("draws", draws, 1),
        ("flips", flips, 1),
    ):
        if not is_whole(number, least):
            raise CircuitsError(f"{_CALLER}: {name}={number!r}; give a whole number from {least}")
    seed = read_seed(seed, _CALLER)
    measurement = Measurement.of(_CALLER, model, base, source, metric, batch, how, batch_size)
    tables: dict[str, list[Row]] = {"frame": [], "completeness": [], "minimality": []}
    for name, circuit in given.items():
        measurement.graph.check_same(circuit.graph, f"{_CALLER}: {name}")
        # Names of inputs of whole layers are resolved, so that members can be taken out one by one.
        circuit = Circuit.of(
            circuit.kind,
            measurement.graph.fitted(circuit.where, circuit.kind, _CALLER),
            measurement.graph,
            circuit.effects,
        )
        test = _Test(measurement, name, circuit, seed, draws, flips)
        tables["frame"] += test.faithfulness(random)
        tables["completeness"] += test.completeness(subsets, greedy)
        tables["minimality"] += test.minimality() if minimality else []
    settings = {"random": random, "subsets": subsets, "greedy": greedy, "flips": flips}
    settings = measurement.settings(seed, draws) | settings
    frames = {name: pd.DataFrame(rows, columns=_COLUMNS[name]) for name, rows in tables.items()}
    frames |= {name: _Printed(frames[name]) for name in ("completeness", "minimality")}
    return Evaluation(**frames, baseline=baseline(measurement, seed, draws), settings=settings)


# fmt: off
_COLUMNS = {
    "frame": ["circuit", "metric", "size", "share", "value", "value_ci_low", "value_ci_high", "faithfulness",
              "faithfulness_ci_low", "faithfulness_ci_high", "random_mean", "random_low", "random_high", "p_random",
              "n"],
    "completeness": ["circuit", "metric", "subset", "size", "without", "model_without", "difference",
                     "difference_ci_low", "difference_ci_high", "removed"],
    "minimality": ["circuit", "metric", "member", "share", "share_ci_low", "share_ci_high", "p_value", "p_adjusted"],
}
# fmt: on


class _Printed(pd.DataFrame):
    """A table that prints numbers with their intervals, where pandas leaves columns out; parts of it are plain."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        shown = [name for name in self.columns if name not in ("removed", "p_value")]
        return short_table(pd.DataFrame(self), shown, "minimality" if "member" in self else "completeness")


def baseline(measurement: Measurement, seed: int, draws: int) -> pd.DataFrame:
    """Tabulates the clean and the source run, a row per metric; all circuits have been run.

    Warns of a metric by which the two runs do not surely differ: faithfulness is then a share of nothing.
    """
    rows: list[Row] = []
    for metric in measurement.clean:
        measured = Faithfulness.of(measurement, [], metric, seed, draws)
        (clean, source), drawn = measured.ends
        gap = with_interval("gap", clean - source, drawn[:, 0] - drawn[:, 1])
        low, high = gap["gap_ci_low"], gap["gap_ci_high"]
        if low <= 0 <= high:
            warnings.warn(
                f"{measurement.caller}: {metric}: the gap between clean and source run is {clean - source:.3g} "
                f"[{low:.3g}, {high:.3g}], so that faithfulness may be a share of nothing; does the metric "
                "belong to these examples?",
                stacklevel=3,
            )
        rows.append({"metric": metric, "clean": clean, "source": source, **gap, "n": measured.n})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Test:
    """The tests of one circuit."""

    measurement: Measurement
    name: str
    circuit: Circuit
    seed: int
    draws: int
    flips: int

    def _shares(self, runs: list[PerExample], metric: str) -> Faithfulness:
        return Faithfulness.of(self.measurement, runs, metric, self.seed, self.draws)

    def faithfulness(self, random: int) -> list[Row]:
        """Returns, for each metric, the share that the circuit and random ones of its size keep."""
        candidates = sorted(self.measurement.candidates(self.circuit.kind), key=lambda one: one.sort_key)
        where = self.circuit.where
        own = [(member, where[member]) for member in candidates if member in where]
        # Circuits of one size have the same controls, where all are at all positions.
        rng = np.random.default_rng([self.seed, 3, len(own)])
        runs = [self.measurement.kept(self.circuit)]
        for _ in range(random):
            chosen = rng.choice(len(candidates), len(own), replace=False)
            drawn = {candidates[index]: at for index, (_, at) in zip(chosen, own, strict=True)}
            runs.append(self.measurement.kept(Circuit.of(self.circuit.kind, drawn, self.measurement.graph)))
        rows: list[Row] = []
        for metric in self.measurement.clean:
            measured = self._shares(runs, metric)
            kept, others = measured.share[0], measured.share[1:]
            known = random and not np.isnan(kept)
            rows.append(
                {
                    "circuit": self.name,
                    "metric": metric,
                    "size": len(self.circuit),
                    "share": self.measurement.share_of(own, len(candidates)),
                    **with_interval("value", measured.value[0], measured.drawn_value[:, 0]),
                    **with_interval("faithfulness", kept, measured.drawn[:, 0]),
                    "random_mean": others.mean() if random else np.nan,
                    "random_low": others.min() if random else np.nan,
                    "random_high": others.max() if random else np.nan,
                    "p_random": (1 + (others >= kept).sum()) / (1 + random) if known else np.nan,
                    "n": measured.n,
                }
            )
        return rows

    def completeness(self, subsets: int, greedy: int) -> list[Row]:
        """Returns, for each subset taken out, the shares of the circuit and of the model without it."""
        members = [member for member, _ in self.circuit.members]
        rng = np.random.default_rng([self.seed, 4])
        removed: list[tuple[str, list[Member]]] = []
        for _ in range(subsets if members else 0):
            chosen = rng.random(len(members)) < 0.5
            # An empty subset would test nothing, so one member is always taken out.
            chosen[rng.integers(len(members))] = True
            removed.append(("random", [member for member, out in zip(members, chosen, strict=True) if out]))
        removed += [("greedy", part) for part in self._sought(members, greedy, rng)]
        if not removed:
            return []
        runs = [run for _, part in removed for run in self._without(part)]
        rows: list[Row] = []
        for metric in self.measurement.clean:
            measured = self._shares(runs, metric)
            for index, (subset, part) in enumerate(removed):
                (own, of_model), drawn = measured.share[2 * index :][:2], measured.drawn[:, 2 * index :]
                rows.append(
                    {
                        "circuit": self.name,
                        "metric": metric,
                        "subset": subset,
                        "size": len(part),
                        "without": own,
                        "model_without": of_model,
                        **with_interval("difference", own - of_model, drawn[:, 0] - drawn[:, 1]),
                        "removed": "; ".join(map(str, part)),
                    }
                )
        return rows

    def _sought(self, members: list[Member], greedy: int, rng: np.random.Generator) -> list[list[Member]]:
        """Returns subsets of growing size, each the one before and the member that makes most of the difference."""
        metric = next(iter(self.measurement.clean))
        subsets: list[list[Member]] = []
        removed: list[Member] = []
        for _ in range(min(greedy, len(members))):
            left = [member for member in members if member not in removed]
            tried = [left[index] for index in rng.permutation(len(left))[:_CANDIDATES_PER_STEP]]
            runs = [run for member in tried for run in self._without([*removed, member])]
            sums, counts = stacked(runs, metric)
            value = ratio(sums.sum(1), counts.sum(1))
            best = int(np.argmax(np.abs(value[::2] - value[1::2])))
            removed = [*removed, tried[best]]
            subsets.append(removed)
        return subsets

    def _without(self, removed: list[Member]) -> tuple[PerExample, PerExample]:
        """Returns the runs of the circuit and of the whole model without some of the circuit's members."""
        where = self.circuit.where
        part = Circuit.of(
            self.circuit.kind, {member: where[member] for member in removed}, self.measurement.graph
        )
        return self.measurement.kept(self.circuit - part), self.measurement.without(part)

    def minimality(self) -> list[Row]:
        """Returns, for each member, the share that the circuit loses without it, tested against no loss."""
        members = [member for member, _ in self.circuit.members]
        if not members:
            return []
        where = self.circuit.where
        runs = [self.measurement.kept(self.circuit)]
        for member in members:
            rest = {one: at for one, at in where.items() if one != member}
            runs.append(self.measurement.kept(Circuit.of(self.circuit.kind, rest, self.measurement.graph)))
        rows: list[Row] = []
        for metric in self.measurement.clean:
            measured = self._shares(runs, metric)
            p_values = sign_flip(*stacked(runs, metric), self.seed, self.flips)[1:]
            adjusted, kept = holm(p_values), measured.drawn[:, 0]
            rows += [
                {
                    "circuit": self.name,
                    "metric": metric,
                    "member": f"{member}{where[member].suffix}",
                    **with_interval(
                        "share", measured.share[0] - measured.share[at], kept - measured.drawn[:, at]
                    ),
                    "p_value": p_values[at - 1],
                    "p_adjusted": adjusted[at - 1],
                }
                for at, member in enumerate(members, start=1)
            ]
        return rows


def _read(circuits: Any) -> dict[str, Circuit]:
    given = {"circuit": circuits} if isinstance(circuits, Circuit) else circuits
    if not isinstance(given, Mapping) or not given:
        raise CircuitsError(f"{_CALLER}: give circuits by name, such as {{'IG': c}}; got {said(given)}")
    for name, one in given.items():
        if not isinstance(one, Circuit):
            raise CircuitsError(
                f"{_CALLER}: {name}: {type(one).__name__} is no circuit; make one with found.top(20) or circuit.edges"
            )
    return by_text(given, _CALLER, "circuits")
