"""Holds the result of a screening: estimates, exact effects of the top rows, and their rank correlation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from circuits.circuit import _rankings
from circuits.circuit._graph import Graph
from circuits.circuit._value import Circuit
from circuits.errors import CircuitsError
from circuits.interventions.base import Intervention
from circuits.model.state import inside_block
from circuits.patch._gradients import Pair
from circuits.statistics import LEVEL, Resampling, bootstrap, interval, ratio, spearman
from circuits.sweeps.measurements import Measurements, Row
from circuits.sweeps.metrics import PerExample, unedited_metrics
from circuits.sweeps.sweep import run_sweep
from circuits.sweeps.table import SweepResult, limits
from circuits.tables import short_table
from circuits.validate import is_whole, read_choice, read_seed

# The columns of a sweep that hold measurements.
EXACT = (
    "value",
    "effect",
    "effect_ci_low",
    "effect_ci_high",
    "p_value",
    "p_adjusted",
    "engine",
    "null_effect",
)

#: What `print` shows.
SHOWN = ("rank", "variant", "metric", "estimate", "effect", "effect_ci_low", "effect_ci_high", "p_adjusted")


@dataclass(frozen=True)
class ScreenResult:
    """The result of `patch.screen` or `patch.edges`.

    Attributes:
        frame: one row per candidate and metric, the largest of each metric first, as in `top`: by the exact effect
            where it was measured, else by the estimate. `rank` is the place by the estimate alone. `estimate` is the
            estimated effect, with a bootstrap interval over the `n` examples, `size` the mean of its absolute values
            over them. Where the patch was swept, `value`, `effect` (the exact one) and the following columns are those
            of the sweep, and `effect_size` is the mean of absolute effects; elsewhere they are empty.
        correlation: one row per metric: `spearman`, the rank correlation of estimate and effect over the `n` rows of
            `of` that were measured, with a percentile interval over examples. NaN for fewer than 3 rows.
        exact: the sweep of the measured rows.
        settings: method, steps, direction, seed and so on.
        graph: the nodes and edges that the model has.
        notes: sentences on what the ranking may miss: metrics of which effects cancel over the examples.
    """

    frame: pd.DataFrame
    correlation: pd.DataFrame
    exact: SweepResult
    settings: dict[str, Any]
    graph: Graph
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join([short_table(self.frame, SHOWN), *limits(self.frame, self.settings), *self.notes])

    @property
    def metrics(self) -> list[str]:
        return list(self.correlation["metric"])

    def top(self, count: int, metric: str | None = None, by: str = "best") -> Circuit:
        """Returns the circuit of the `count` largest rows; as a circuit of `circuit.full`, it is one of this model.

        Args:
            metric: whose rows; needed where there are several.
            by: "best", the exact effect where it was measured, else the estimate; "estimate"; or "effect", of measured
                rows alone. Only rows of the screening can be in the circuit: edges of position embeddings never are.
        """
        return _rankings.top(self, count, metric, by)

    def above(self, least: int | float, metric: str | None = None, by: str = "best") -> Circuit:
        """Returns the circuit of all rows whose size, as in `top`, is at least `least`.

        Where none is, the circuit is empty, and its `repr` says which row is the largest.
        """
        return _rankings.above(self, least, metric, by)

    def ranking(self, metric: str | None = None, by: str = "best") -> list[str]:
        """Returns the names of all nodes or edges, as `circuit.curve` reads them, the largest first as in `top`."""
        kind = "edges" if "sender" in self.frame else "nodes"
        return _rankings.names(_rankings.ranking(self, metric, by, "ranking"), kind, "ranking")

    def plot(self, metric: str | None = None) -> Any:
        """Returns a plotly figure with a panel per metric: exact effect against estimate, and the identity line."""
        chosen = self.metrics if metric is None else [metric]
        if chosen[0] not in self.metrics:
            raise CircuitsError(f"plot: no metric {metric!r}; it has {', '.join(self.metrics)}")
        from circuits.figures.results import screening_figure

        return screening_figure(self.frame, self.correlation, chosen, self.settings.get("words"))


def make_screen(
    tables: Mapping[str, pd.DataFrame],
    exact: SweepResult,
    correlation: pd.DataFrame,
    settings: Row,
    graph: Graph,
    notes: Sequence[str],
) -> ScreenResult:
    """Joins the estimates of all metrics with the exact measurements."""
    measured = exact.frame[["variant", "metric", *EXACT]]
    frame = pd.concat(tables.values()).merge(measured, how="left", on=["variant", "metric"])
    by_metric = (frame[frame["metric"] == metric] for metric in tables)
    frame = pd.concat(
        [_rankings.in_order(rows, _rankings.sizes(rows, settings["rank"])) for rows in by_metric],
        ignore_index=True,
    )
    integer_columns = [name for name in ("layer", "head", "position", "neuron", "feature") if name in frame]
    frame = frame.astype(dict.fromkeys(integer_columns, "Int64"))
    return ScreenResult(frame, correlation, exact, settings, graph, tuple(notes))


#: What the largest rows are: of the mean over examples, in absolute value, or of the mean absolute value.
RANKS = ("mean", "size")
#: Where means keep less than this of the sizes of effects, signs are said to cancel.
_KEPT = 0.5


@dataclass
class Candidate:
    """One row of a screening: its description, its patch, and the estimates of the patch's effect on every example."""

    description: Row
    patch: Callable[[], Intervention]
    #: By metric, the estimates for the sums of the metric, piece by piece.
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.description["variant"])

    def add(self, metric: str, estimates: np.ndarray) -> None:
        self.parts.setdefault(metric, []).append(estimates)

    def estimates(self, metric: str) -> np.ndarray:
        return np.concatenate(self.parts[metric])


@dataclass(frozen=True)
class Counts:
    """Settings of the statistics, and the number of rows that are measured exactly."""

    exact: int | None  # None: all
    seed: int
    draws: int
    flips: int
    rank: str = "mean"  # or "size"

    @classmethod
    def read(cls, caller: str, exact: Any, seed: Any, draws: Any, flips: Any, rank: Any) -> Counts:
        """Reads how many rows are measured, by how many draws and flips, and how they are ranked."""
        read_choice(rank, RANKS, caller, "rank")
        every = isinstance(exact, str) and exact == "all"
        if not every and not is_whole(exact, 1):
            raise CircuitsError(
                f'{caller}: exact={exact!r}; give how many top rows to measure, exact=10, or exact="all"'
            )
        if not (is_whole(draws, 1) and is_whole(flips, 1)):
            raise CircuitsError(f"{caller}: draws and flips are positive numbers, got {draws} and {flips}")
        measured = None if every else int(exact)
        return cls(measured, read_seed(seed, caller), int(draws), int(flips), rank)


def parse_steps(steps: Any, caller: str) -> int:
    if not is_whole(steps, 1):
        raise CircuitsError(f"{caller}: steps={steps!r}; give a whole number of points, at least 1")
    return int(steps)


def ranked(
    pair: Pair, candidates: Sequence[Candidate], baseline: Sequence[PerExample], counts: Counts, settings: Row
) -> ScreenResult:
    """Tabulates all candidates, with the exact effects of those with the largest estimates.

    The largest are chosen for each metric; a patch chosen for one metric is measured for all.

    Args:
        baseline: the metrics at base, piece by piece.
    """
    unedited = {
        metric: [np.concatenate([part[metric][column] for part in baseline]) for column in (0, 1)]
        for metric in baseline[0]
    }
    tables = {metric: _estimate_table(candidates, metric, unedited[metric], counts) for metric in unedited}
    settings, graph = settings | {"rank": counts.rank, "batch_size": pair.batch_size}, Graph.of(pair.surface)
    notes = [note for metric, table in tables.items() if (note := _cancelled(metric, table, counts.rank))]
    chosen = list(dict.fromkeys(index for table in tables.values() for index in table.index[: counts.exact]))
    exact_result, measured = _measure(pair, [candidates[index] for index in chosen], counts)
    examples = {
        (run["variant"], metric): (values[:, place], values[:, 0])
        for one in measured
        for metric in unedited
        for values in (one.of(metric),)
        for place, run in enumerate(one.runs, start=1)
    }
    agreement: list[Row] = []
    for metric, table in tables.items():
        names = [candidates[index].name for index in chosen]
        estimates = np.stack([candidates[index].estimates(metric) for index in chosen])
        exact = [examples[name, metric] for name in names]
        row = _rank_agreement(estimates, unedited[metric][1], exact, counts)
        agreement.append({"metric": metric, **row, "n": len(chosen), "of": len(table)})
        sizes = {name: _effect_size(*values) for name, values in zip(names, exact, strict=True)}
        table["effect_size"] = table["variant"].map(sizes)
    settings = (
        settings | pair.surface.settings | {"seed": counts.seed, "draws": counts.draws, "flips": counts.flips}
    )
    settings |= {"n": len(pair.base), "level": LEVEL}
    return make_screen(tables, exact_result, pd.DataFrame(agreement), settings, graph, notes)


def _estimate_table(
    candidates: Sequence[Candidate], metric: str, unedited: Sequence[np.ndarray], counts: Counts
) -> pd.DataFrame:
    """Tabulates one metric's estimates with their intervals, the largest first; the index is that of the candidate.

    Args:
        unedited: sums and counts [example] at base.
    """
    sums, entries = unedited
    shifts = np.stack([candidate.estimates(metric) for candidate in candidates])
    shared = np.broadcast_to(entries, shifts.shape)
    estimate = ratio(shifts.sum(1), shared.sum(1))
    low, high = interval(bootstrap(shifts, shared, counts.seed, counts.draws), LEVEL)
    if shifts.shape[1] < 2:
        low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
    table = pd.DataFrame([candidate.description for candidate in candidates])
    table["metric"] = metric
    table["n"] = shifts.shape[1]
    table["baseline"] = float(ratio(sums.sum(keepdims=True), entries.sum(keepdims=True))[0])
    table["estimate"], table["estimate_ci_low"], table["estimate_ci_high"] = estimate, low, high
    table["size"] = ratio(np.abs(shifts).sum(1), shared.sum(1))
    size = table["size"].to_numpy() if counts.rank == "size" else np.abs(estimate)
    table = table.iloc[np.argsort(-size, kind="stable")]
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    return table


def _cancelled(metric: str, table: pd.DataFrame, rank: str) -> str | None:
    """Returns a note where effects of either sign cancel in the means over examples by which rows are ranked."""
    whole = float(table["size"].sum())
    kept = float(table["estimate"].abs().sum()) / whole if whole > 0 else 1.0
    if rank == "size" or kept >= _KEPT:
        return None
    return (
        f"{metric}: signs differ between examples: means over them keep {kept:.0%} of the sizes of the estimated "
        'effects; rank="size" ranks by mean sizes'
    )


def _effect_size(edited: np.ndarray, clean: np.ndarray) -> float:
    """Returns the mean over examples of an effect's absolute value, each example weighted by its entries at base.

    Args:
        edited: sums and counts [2 example].
        clean: the same at base.
    """
    change = np.abs(ratio(*edited) - ratio(*clean))
    entries = np.where(np.isnan(change), 0.0, clean[1])
    return float(ratio((np.nan_to_num(change) * entries).sum(keepdims=True), entries.sum(keepdims=True))[0])


def _measure(
    pair: Pair, chosen: Sequence[Candidate], counts: Counts
) -> tuple[SweepResult, list[Measurements]]:
    """Sweeps patches; returns the result, and the measurements, which have a value for every example."""
    variants = {one.name: one.patch() for one in chosen}
    metric = replace(pair.metric, default=unedited_metrics)
    resampling = Resampling(counts.seed, counts.draws, counts.flips)
    return run_sweep(pair.surface, pair.base, variants, metric, resampling, batch_size=pair.batch_size)


def _rank_agreement(estimates: np.ndarray, entries: np.ndarray, exact: Sequence[Any], counts: Counts) -> Row:
    """Returns Spearman's rank correlation over rows, with an interval over examples; estimates are [row example]."""
    edited = (
        np.stack([sums for (sums, _), _ in exact]),
        np.stack([sample_counts for (_, sample_counts), _ in exact]),
    )
    clean = (
        np.stack([sums for _, (sums, _) in exact]),
        np.stack([sample_counts for _, (_, sample_counts) in exact]),
    )
    base_entries = np.broadcast_to(entries, estimates.shape)
    effects = ratio(edited[0].sum(1), edited[1].sum(1)) - ratio(clean[0].sum(1), clean[1].sum(1))
    correlation = spearman(ratio(estimates.sum(1), base_entries.sum(1))[None], effects[None])[0]
    low = high = np.nan
    if estimates.shape[1] > 1:
        # One seed gives the same resamples of examples for all three.
        resampled = [
            bootstrap(*part, counts.seed, counts.draws) for part in ((estimates, base_entries), edited, clean)
        ]
        bounds = interval(spearman(resampled[0], resampled[1] - resampled[2])[:, None], LEVEL)
        low, high = float(bounds[0][0]), float(bounds[1][0])
    return {"spearman": float(correlation), "spearman_ci_low": low, "spearman_ci_high": high}


def check_outside_blocks(pair: Pair) -> None:
    """Raises `CircuitsError` inside a block, because estimates ignore its edits and the sweep of patches would not.

    This holds even where the edits do not change base, because they may change a patched run.
    """
    if inside_block(pair.surface.model):
        raise CircuitsError(
            f"{pair.caller}: a block around this call edits the model, so that estimates and patches would be of "
            "different models; call it outside"
        )
