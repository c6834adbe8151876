"""Faithfulness of a ranking's circuits over sizes, the smallest that is enough, and rankings by joint effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from circuits.arguments import is_whole, parse_count, parse_seed, stringify_keys
from circuits.circuit._circuit import Circuit
from circuits.circuit._circuit_runner import CircuitRunner, PatchSetup
from circuits.circuit._graph_and_names import (
    EVERYWHERE,
    NOWHERE,
    EstimateAndExactEffect,
    Graph,
    Member,
    PositionSet,
    parse_member,
)
from circuits.errors import CircuitsError, format_value
from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import curve as lines
from circuits.figures.panel_kinds import rows_to_one_series
from circuits.model.types import BatchLike, Figure, MetricLike, RankingLike, TokensLike
from circuits.statistics import LEVEL
from circuits.sweeps.metric import Row
from circuits.table_printing import ci_names, interval_columns, metrics_asked_for, short_table_text

_CALLER = "circuit.curve"
#: Blocks that `prune` measures in a round, and the share of what is left that goes in it.
_BLOCKS, _SHARE = 20, 0.2
#: The columns that a curve shows of itself.
AREAS_SHOWN = ("ranking", "metric", "sizes", "of", *ci_names("CPR"), *ci_names("CMD"))
#: The sizes of the MIB benchmark (Mueller et al. 2025, arXiv:2504.13151), as shares of all edges.
MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
#: Number of sizes where none are given.
_SIZES = 20


@dataclass(frozen=True)
class Curve:
    """The result of `circuit.curve`.

    Attributes:
        frame: a row per ranking, metric and size: `share` of all members that can matter, `value` of the metric and
            `faithfulness`, with paired intervals over examples. Sizes 0 and all are the source and the clean run. Where
            a ranking has members at some positions, its entries are what `size` counts, and all members at each
            position are the whole.
        areas: a row per ranking and metric: `CPR`, ∫ f over shares from 0 to 1, larger is better, and `CMD`, ∫ |1 − f|,
            smaller is better, by the trapezoidal rule, with intervals.
        baseline: a row per metric: its value in the clean and in the source run.
        settings: how, seed, draws, forwards and so on.
    """

    frame: pd.DataFrame
    areas: pd.DataFrame
    baseline: pd.DataFrame
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return (
            f"{short_table_text(self.areas, AREAS_SHOWN, 'areas')}\nCPR: mean faithfulness f over sizes, larger is "
            "better; CMD: mean of |1 - f|, smaller is better."
        )

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a plotly figure: faithfulness over the number of members kept, a line per ranking."""
        metric, *_ = metrics_asked_for(self.frame, metric)
        rows = self.frame[self.frame["metric"] == metric].sort_values("size", kind="stable")
        series = {
            str(name): rows_to_one_series(part, "size", "faithfulness")
            for name, part in rows.groupby("ranking", sort=False)
        }
        panel = lines(series, x="members kept", y="faithfulness", height=310)
        title = f"Faithfulness of growing circuits: {metric}"
        return draw_panels([panel], title, f"Bands: {LEVEL:.0%} intervals, bootstrap over examples.")


def curve(
    model: nn.Module,
    rankings: RankingLike | Mapping[str, RankingLike],
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    batch_size: int | None = None,
    sizes: Iterable[int | float] | None = None,
    seed: int = 0,
    draws: int = 1000,
) -> Curve:
    """Measures the faithfulness of the largest members of rankings, for several sizes.

    A ranking's circuit of size k has its first k members. The areas are those of the MIB benchmark (Mueller et al.
    2025, arXiv:2504.13151): the integrated circuit performance ratio CPR = ∫ f and the integrated circuit-model
    distance CMD = ∫ |1 − f| over the share of members kept. Both are taken from 0 to 1, with the source and the clean
    run, which need no circuit, at the ends; the benchmark's begin at a share of 0.001.

    Args:
        rankings: a ranking, or several by name. One is a screening of one metric (`patch.screen`, `patch.edges`; exact
            effects where measured), or a list of names, largest first (`found.ranking(metric, by="estimate")`).
        base: tokens [n pos], the clean run.
        source: tokens, whose values are on the edges outside a circuit.
        metric: `fn(output)`, or `fn(output, batch[rows])`; default: the logit difference of the two first choices.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge outside carries: "resample", the source's values; "mean", their mean; "zero", nothing.
        batch_size: examples in a forward; by default by the model's size.
        sizes: whole numbers of members, or shares up to 1.0 (`circuit.MIB_SHARES`); by default 20, evenly spaced on a
            logarithmic scale. Sizes beyond a ranking are left out.
        seed: of the resamples of examples.
        draws: number of resamples for intervals.

    Where the gap's interval holds 0, a warning says so. One forward for the clean run, one for the source (and one for
    the empty circuit unless how is "resample"), and one for each different circuit.
    """
    rankings = rankings if isinstance(rankings, Mapping) else {"ranking": rankings}
    if not rankings:
        raise CircuitsError(f"{_CALLER}: give a ranking, or several by name, such as {{'exact': found}}")
    seed, asked = parse_seed(seed, _CALLER), None if sizes is None else _parse_sizes(sizes)
    named = stringify_keys(rankings, _CALLER, "rankings")
    given = {name: _Ranking.parse(ranking, f"{_CALLER}: {name}") for name, ranking in named.items()}
    examples = PatchSetup.parse(_CALLER, model, base, source, metric, batch, how)
    runs = CircuitRunner.after_clean_and_source(examples, batch_size, seed, parse_count(draws, _CALLER))
    rows, areas = list[Row](), list[Row]()
    for name, ranking in given.items():
        for points, area in _measure_curve_and_areas(runs, ranking.with_graph(runs.graph), asked):
            rows += [{"ranking": name, **row} for row in points]
            areas.append({"ranking": name, **area})
    return Curve(
        pd.DataFrame(rows), pd.DataFrame(areas), runs.tabulate_clean_and_source(), runs.result_settings()
    )


def smallest(
    model: nn.Module,
    ranking: RankingLike,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    faithfulness: int | float = 0.9,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    batch_size: int | None = None,
) -> Circuit:
    """Returns the first members of a ranking: so many that they are faithful enough, where one fewer are not.

    The size is found by bisection. Faithfulness need not grow with it, so that there may be a smaller one that was not
    tried; the whole ranking counts as enough. Test the circuit on other examples than these.

    Args:
        ranking: a screening of one metric (`patch.screen`, `patch.edges`), or a list of names, largest first.
        base: tokens [n pos], the clean run.
        source: tokens, whose values are on the edges outside a circuit.
        metric: `fn(output)`, or `fn(output, batch[rows])`; of several, each is to be faithful enough.
        faithfulness: what the circuit has at least, above 0 and at most 1.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge outside carries: "resample", the source's values; "mean", their mean; "zero", nothing.
        batch_size: examples in a forward; by default by the model's size.

    Where the gap's interval holds 0, a warning says so.
    """
    caller = "circuit.smallest"
    if isinstance(faithfulness, bool | str) or not 0 < faithfulness <= 1:
        raise CircuitsError(f"{caller}: faithfulness={faithfulness!r}; give a share above 0, at most 1")
    given = _Ranking.parse(ranking, caller)
    examples = PatchSetup.parse(caller, model, base, source, metric, batch, how)
    runs = CircuitRunner.after_clean_and_source(examples, batch_size, 0, 1000)
    runs.tabulate_clean_and_source()
    members = given.with_graph(runs.graph)
    below, size = 0, len(members.entries)
    while size - below > 1:
        middle = (below + size) // 2
        kept = runs.measure_circuit(members.top_circuit(middle))
        enough = all(found.share[0] >= faithfulness for _, found in runs.faithfulness_by_metric([kept]))
        below, size = (below, middle) if enough else (middle, size)
    return members.top_circuit(size)


def prune(
    model: nn.Module,
    ranking: RankingLike,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    batch_size: int | None = None,
) -> list[str]:
    """Returns the names of a ranking in a better order, by greedy removal of blocks: the last to go comes first.

    A round takes the last two fifths of the members that are left, in up to 20 blocks; measures the circuit without
    each block; and removes the half of them without which faithfulness is nearest to 1 (of several metrics, in the
    mean). A thousand edges take some 400 forwards of all examples. Removing one edge at a time is ACDC (Conmy et al.
    2023, arXiv:2304.14997). Test what comes out on other examples (`circuit.curve`).

    Args:
        ranking: a screening of one metric (`patch.screen`, `patch.edges`), or a list of names, largest first.
        base: tokens [n pos], the clean run.
        source: tokens, whose values are on the edges outside a circuit.
        metric: `fn(output)`, or `fn(output, batch[rows])`.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge outside carries: "resample", the source's values; "mean", their mean; "zero", nothing.
        batch_size: examples in a forward; by default by the model's size.

    Where the gap's interval holds 0, a warning says so.
    """
    members = _Ranking.parse(ranking, "circuit.prune")
    examples = PatchSetup.parse(members.caller, model, base, source, metric, batch, how)
    runs = CircuitRunner.after_clean_and_source(examples, batch_size, 0, 1000)
    runs.tabulate_clean_and_source()
    members = members.with_graph(runs.graph)
    left, removed = members.entries[::-1], []
    while left:
        considered = min(2 * max(1, round(_SHARE * len(left))), len(left))
        size = -(-considered // _BLOCKS)
        blocks = [slice(at, min(at + size, considered)) for at in range(0, considered, size)]
        without = [replace(members, entries=left[: one.start] + left[one.stop :]) for one in blocks]
        measured = [runs.measure_circuit(kept.top_circuit(len(left))) for kept in without]
        errors = np.sum([abs(1 - found.share) for _, found in runs.faithfulness_by_metric(measured)], axis=0)
        best = np.argsort(errors, kind="stable")[: max(1, len(blocks) // 2)]
        removed += [entry for at in best for entry in left[blocks[at]]]
        gone = set(removed)
        left = [entry for entry in left if entry not in gone]
    return [f"{member}{at.name_suffix}" for member, at in reversed(removed)]


def _measure_curve_and_areas(
    runner: CircuitRunner, ranking: _Ranking, asked: list[int | float] | None
) -> Iterator[tuple[list[Row], Row]]:
    """Yields the points of a ranking's curve under each metric, and the areas under it.

    The points are those of the sizes between, and of the source run and the clean one at their ends.
    """
    entries = ranking.entries
    whole = len(runner.members_that_can_differ(ranking.kind) | {member for member, _ in entries})
    at_positions = any(at != EVERYWHERE for _, at in entries)
    total = whole * runner.position_count if at_positions else whole
    inner = [size for size in _choose_curve_sizes(asked, total) if size <= len(entries) and size < total]
    shares = [runner.share_of_members(entries[:size], whole) for size in inner]
    counts, share = [0, *inner, total], np.array([0.0, *shares, 1.0])
    runs = [runner.measure_circuit(ranking.top_circuit(size)) for size in inner]
    for metric, measured in runner.faithfulness_by_metric([runner.source, *runs, runner.clean]):
        points = [
            {"metric": metric, "size": size, "share": share[at], **measured.row_of_run(at), "n": measured.n}
            for at, size in enumerate(counts)
        ]
        area: Row = {"metric": metric, "sizes": len(inner), "of": total}
        for column, (value, drawn) in {
            "CPR": (measured.share, measured.drawn),
            "CMD": (np.abs(1 - measured.share), np.abs(1 - measured.drawn)),
        }.items():
            area |= interval_columns(column, float(area_under(value, share)), area_under(drawn, share))
        yield points, area


@dataclass(frozen=True)
class _Ranking:
    """Members, the largest first, each with the positions that it adds."""

    kind: str
    entries: list[tuple[Member, PositionSet]]
    graph: Graph | None  # of a screening
    effects: Mapping[Member, EstimateAndExactEffect]
    caller: str

    @classmethod
    def parse(cls, given: Any, caller: str) -> _Ranking:
        """Reads a screening, or a list of names with the largest first."""
        graph, effects = None, {}
        if hasattr(given, "ranking"):
            given, graph, effects = given.ranking(), given.graph, given.top(len(given.ranking())).effects
        names = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise CircuitsError(
                f"{caller}: a ranking is a screening or a list of names, largest first; got {format_value(given)}"
            )
        if len(set(given)) < len(given):
            raise CircuitsError(f"{caller}: a ranking names a member twice")
        kind = "edges" if "->" in str(given[0]) else "nodes"
        known: dict[Member, PositionSet] = {}
        entries: list[tuple[Member, PositionSet]] = []
        for name in given:
            member, at = parse_member(name, kind, caller)
            before = known.get(member, NOWHERE)
            known[member] = before | at
            if (added := at & before.complement) != NOWHERE:
                entries.append((member, added))
        return cls(kind, entries, graph, effects, caller)

    def with_graph(self, graph: Graph) -> _Ranking:
        """Returns the same with the graph of a model; refuses members that it lacks."""
        graph.check_same_sizes(self.graph, self.caller)
        graph.check_members((member for member, _ in self.entries), self.kind, self.caller)
        return replace(self, graph=graph)

    def top_circuit(self, size: int) -> Circuit:
        """Returns the circuit of the first members."""
        where: dict[Member, PositionSet] = {}
        for member, at in self.entries[:size]:
            where[member] = where.get(member, NOWHERE) | at
        return Circuit.of(self.kind, where, self.graph, self.effects)


def area_under(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the area under values [... point] over shares [point], by the trapezoidal rule."""
    return np.asarray(((values[..., 1:] + values[..., :-1]) / 2 * np.diff(share)).sum(-1))


def _choose_curve_sizes(asked: list[int | float] | None, total: int) -> list[int]:
    if asked is None:
        return sorted({round(size) for size in np.geomspace(1, total, min(_SIZES, total))})
    # A product that is a whole number may come out just below it: 0.29 of 100.
    return sorted({int(size) if is_whole(size) else int(size * total + 1e-9) for size in asked} - {0})


def _parse_sizes(sizes: Any) -> list[int | float]:
    listed = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    for size in listed:
        if not is_whole(size, 0) and not (isinstance(size, float | np.floating) and 0 < size <= 1):
            raise CircuitsError(
                f"{_CALLER}: sizes are whole numbers of members, or shares above 0 up to 1.0; got {size!r}"
            )
    return listed
