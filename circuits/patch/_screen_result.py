"""Holds the result of a screening: estimates of all rows, and exact effects of the top ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from circuits.arguments import is_whole, parse_choice
from circuits.circuit._circuit import Circuit
from circuits.circuit._graph_and_names import EstimateAndExactEffect, Graph, Member, PositionSet, parse_member
from circuits.errors import CircuitsError
from circuits.figures.panel_grid import GREY, draw_panels
from circuits.figures.panel_kinds import Series, points, rows_to_one_series
from circuits.interventions.base import Intervention
from circuits.model.types import Figure
from circuits.patch._metric_gradients import PatchExamples
from circuits.statistics import LEVEL, bootstrap_ratios, ratio
from circuits.sweeps.metric import PerExample, Row, compare_with_unedited
from circuits.sweeps.sweep import sweep_with_measurements
from circuits.sweeps.sweep_result import SweepResult, p_value_notes, parse_resampling
from circuits.table_printing import ci_names, interval_columns, metrics_asked_for, short_table_text

# The columns of a sweep that hold measurements.
EXACT = ("value", *ci_names("effect"), "p_value", "p_adjusted", "engine", "null_effect")

#: What `print` shows.
SHOWN = ("rank", "variant", "metric", "estimate", *ci_names("effect"), "p_adjusted")


@dataclass(frozen=True)
class ScreenResult:
    """The result of `patch.screen` or `patch.edges`.

    Attributes:
        frame: one row per candidate and metric, the largest of each metric first, as in `top`: by the exact effect
            where it was measured, else by the estimate. `rank` is the place by the estimate alone. `estimate` is the
            estimated effect, with a bootstrap interval over the `n` examples, `size` the mean of its absolute values
            over them. Where the patch was swept, `value`, `effect` (the exact one) and the following columns are those
            of the sweep, and `effect_size` is the mean of absolute effects; elsewhere they are empty.
        exact: the sweep of the measured rows; None where none were.
        settings: method, steps, direction, seed and so on.
        graph: the nodes and edges that the model has.
        notes: sentences on what the ranking may miss: metrics of which effects cancel over the examples.
    """

    frame: pd.DataFrame
    exact: SweepResult | None
    settings: dict[str, Any]
    graph: Graph
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        notes = p_value_notes(self.frame, self.settings)
        return "\n".join([short_table_text(self.frame, SHOWN), *notes, *self.notes])

    @property
    def kind(self) -> str:
        return "edges" if "sender" in self.frame else "nodes"

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.frame["metric"]))

    def top(self, count: int, metric: str | None = None, by: str = "best") -> Circuit:
        """Returns the circuit of the `count` largest rows; as a circuit of `circuit.full`, it is one of this model.

        Args:
            metric: whose rows; needed where there are several.
            by: "best", the exact effect where it was measured, else the estimate; "estimate"; or "effect", of measured
                rows alone. Only rows of the screening can be in the circuit: edges of position embeddings never are.
        """
        if not is_whole(count, 0):
            raise CircuitsError(f"top: {count!r}; give how many members the circuit has, from 0")
        rows = self._sort_rows_by_size(metric, by, "top")
        if count > len(rows):
            which = "were measured" if by == "effect" else "were screened"
            raise CircuitsError(f"top: {count} members asked for; {len(rows)} {which}")
        return self._circuit_of(rows.iloc[:count], "top")

    def ranking(self, metric: str | None = None, by: str = "best") -> list[str]:
        """Returns the names of all nodes or edges, as `circuit.curve` reads them, the largest first as in `top`."""
        return self._member_names(self._sort_rows_by_size(metric, by, "ranking"), "ranking")

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a plotly figure with a panel per metric: exact effect against estimate, and the identity line."""
        if self.exact is None:
            raise CircuitsError("plot: no patch was measured; give exact= above 0 (.frame has the estimates)")
        panels = []
        for name in metrics_asked_for(self.frame, metric):
            rows = self.frame[(self.frame["metric"] == name) & self.frame["effect"].notna()]
            both = rows[["estimate", "effect"]]
            ends = [float(both.min().min()), float(both.max().max())]
            hover = [f"{n}<br>effect {e:.4g}" for n, e in zip(rows["variant"], rows["effect"], strict=True)]
            diagonal = {"mode": "lines", "line": GREY, "hoverinfo": "skip", "showlegend": False}
            series = {"equal": Series(ends, ends, style=diagonal)}
            series["measured"] = rows_to_one_series(rows, "estimate", "effect", hover=hover, look=0)
            axes: dict[str, Any] = {"x": f"estimated effect on {name}", "y": "exact effect"}
            panels.append(points(series, name, height=320, width=300, categories=False, **axes))
        subtitle = "A point per measured patch, with 95% intervals over examples; dashed: where both agree."
        return draw_panels(panels, "Estimated and exact effects", subtitle, columns=len(panels))

    def _sort_rows_by_size(self, metric: str | None, by: str, caller: str) -> pd.DataFrame:
        """Returns one metric's rows with a column `size`, the largest first."""
        if metric is None and len(self.metrics) > 1:
            names = ", ".join(map(repr, self.metrics))
            raise CircuitsError(f"{caller}: name one metric of the screening: metric= {names}")
        metric = self.metrics[0] if metric is None else parse_choice(metric, self.metrics, caller, "metric")
        parse_choice(by, ("best", "estimate", "effect"), caller, "by")
        rows = self.frame[self.frame["metric"] == metric]
        rows = rows.assign(size=effect_magnitudes(rows, self.settings["rank"], by)).dropna(subset="size")
        # Of equal ones the larger estimate is first.
        return rows.iloc[np.lexsort([rows["rank"], -rows["size"]])]

    def _member_names(self, rows: pd.DataFrame, caller: str) -> list[str]:
        """Returns the members of a circuit that rows are about, by name."""
        if self.kind == "edges":
            names = rows["sender"] + " -> " + rows["receiver"]
            return (names + " @ " + rows["positions"] if "positions" in rows else names).tolist()
        found: list[str] = []
        for row in rows.to_dict("records"):
            if row["site"] not in ("embed", "pos_embed", "z", "mlp_out") or pd.notna(row.get("neuron")):
                raise CircuitsError(
                    f"{caller}: {row['variant']} is no node of a circuit; screen embed, z and mlp_out, which write to "
                    "the residual stream"
                )
            name, position = str(row["variant"]).partition(",")[0], row["position"]
            found.append(name if pd.isna(position) else f"{name} @ {position}")
        return found

    def _circuit_of(self, rows: pd.DataFrame, caller: str) -> Circuit:
        where: dict[Member, PositionSet] = {}
        effects: dict[Member, EstimateAndExactEffect] = {}
        numbers = rows[["metric", "estimate", "effect"]].astype(object).where(rows.notna(), None)
        for name, effect in zip(
            self._member_names(rows, caller), numbers.itertuples(index=False), strict=True
        ):
            member, at = parse_member(name, self.kind, caller)
            if member in where:
                # Effects at positions are those of patches that were made one by one, and do not add up.
                where[member], effects[member] = where[member] | at, EstimateAndExactEffect(effect[0])
            else:
                where[member], effects[member] = at, EstimateAndExactEffect(*effect)
        return Circuit.of(self.kind, where, self.graph, effects)


def effect_magnitudes(rows: pd.DataFrame, rank: str, by: str = "best") -> pd.Series:
    """Returns the size of each row: that of the exact effect, of the estimate, or the best that is known.

    Args:
        rank: "size" where mean sizes rank, else "mean", the size of means.
    """
    effect, estimate = rows["effect"].abs(), rows["estimate"].abs()
    if rank == "size":
        effect, estimate = rows["effect_size"], rows["size"]
    return {"best": effect.fillna(estimate), "estimate": estimate, "effect": effect}[by]


#: What the largest rows are: of the mean over examples, in absolute value, or of the mean absolute value.
RANKS = ("mean", "size")
#: Where means keep less than this of the sizes of effects, signs are said to cancel.
_KEPT = 0.5


class ScreenOptions(NamedTuple):
    """The number of rows that are measured exactly (None: all), how rows are ranked, and settings of the statistics."""

    exact: int | None
    rank: str
    resampling: dict[str, int]


def parse_screen_options(
    caller: str, exact: Any, seed: Any, draws: Any, flips: Any, rank: Any
) -> ScreenOptions:
    parse_choice(rank, RANKS, caller, "rank")
    if exact != "all" and not is_whole(exact, 0):
        raise CircuitsError(f'{caller}: exact={exact!r}; give a number of rows, exact=10, or exact="all"')
    resampling = parse_resampling(seed, draws, flips, caller)
    return ScreenOptions(None if exact == "all" else int(exact), rank, resampling)


def measure_and_tabulate(
    examples: PatchExamples,
    unedited: PerExample,
    estimates: Mapping[str, np.ndarray],
    rows: Sequence[Row],
    patch: Callable[[int], Intervention],
    options: ScreenOptions,
    settings: Row,
) -> ScreenResult:
    """Tabulates all rows, with the exact effects of those with the largest estimates.

    The largest are chosen for each metric; a patch chosen for one metric is measured for all.

    Args:
        unedited: the metrics at base.
        estimates: by metric, those for its sums, [row example].
        rows: the columns that describe each row, `variant` its name.
        patch: returns what a row estimates, by its number.
    """
    tables = {
        metric: _tabulate_estimates(rows, metric, unedited[metric], estimates[metric], options)
        for metric in unedited
    }
    notes = [_note_cancelled_effects(metric, table, options.rank) for metric, table in tables.items()]
    chosen = list(dict.fromkeys(at for table in tables.values() for at in table.index[: options.exact]))
    names = [str(rows[at]["variant"]) for at in chosen]
    exact = None
    if chosen:
        exact, measured = sweep_with_measurements(
            examples.hooked,
            examples.base,
            {name: patch(at) for name, at in zip(names, chosen, strict=True)},
            replace(examples.metric, default=compare_with_unedited),
            options.resampling,
            batch_size=examples.batch_size,
        )
        for metric, table in tables.items():
            clean, edited = np.split(measured.sums_and_counts(metric), [1], axis=1)
            of_measured = dict(zip(names, _mean_absolute_effects(edited, clean), strict=True))
            table["effect_size"] = table["variant"].map(of_measured)
        effects = exact.frame[["variant", "metric", *EXACT]]
        frame = pd.concat(tables.values()).merge(effects, how="left", on=["variant", "metric"])
    else:
        frame = pd.concat(tables.values())
        frame = frame.reindex(columns=[*frame, "effect_size", *EXACT])
    settings = (
        settings
        | {"rank": options.rank, "batch_size": examples.batch_size}
        | examples.hooked.setting_if_unchecked
    )
    settings |= options.resampling | {"n": len(examples.base), "level": LEVEL}
    # Metrics keep their order; of equal rows the larger estimate is first.
    order = [frame["rank"], -effect_magnitudes(frame, options.rank), pd.factorize(frame["metric"])[0]]
    frame = frame.iloc[np.lexsort(order)].reset_index(drop=True)
    whole = [name for name in ("layer", "head", "position", "neuron", "feature") if name in frame]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    return ScreenResult(frame, exact, settings, Graph.of_model(examples.hooked), tuple(filter(None, notes)))


def _tabulate_estimates(
    rows: Sequence[Row],
    metric: str,
    unedited: Sequence[np.ndarray],
    shifts: np.ndarray,
    options: ScreenOptions,
) -> pd.DataFrame:
    """Tabulates one metric's estimates with their intervals, the largest first; the index is the number of the row.

    Args:
        unedited: sums and counts [example] at base.
        shifts: estimates for the sums, [row example].
    """
    sums, entries = unedited
    shared = np.broadcast_to(entries, shifts.shape)
    estimate = ratio(shifts.sum(1), shared.sum(1))
    drawn = bootstrap_ratios(shifts, shared, options.resampling["seed"], options.resampling["draws"])
    baseline = float(ratio(sums.sum(keepdims=True), entries.sum(keepdims=True))[0])
    table = pd.DataFrame(rows).assign(
        metric=metric,
        n=shifts.shape[1],
        baseline=baseline,
        **interval_columns("estimate", estimate, drawn),
        size=ratio(np.abs(shifts).sum(1), shared.sum(1)),
    )
    size = table["size"].to_numpy() if options.rank == "size" else np.abs(estimate)
    table = table.iloc[np.argsort(-size, kind="stable")]
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    return table


def _note_cancelled_effects(metric: str, table: pd.DataFrame, rank: str) -> str | None:
    """Returns a note where effects of either sign cancel in the means over examples by which rows are ranked, or where
    there are none.
    """
    means, whole = float(table["estimate"].abs().sum()), float(table["size"].sum())
    if table["size"].eq(0).all():
        return f"{metric}: all estimates are 0: the source may give the same as base"
    if rank == "size" or means >= _KEPT * whole:
        return None
    return (
        f"{metric}: signs differ between examples: means over them keep {means / whole:.0%} of the sizes of the "
        'estimated effects; rank="size" ranks by mean sizes'
    )


def _mean_absolute_effects(edited: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """Returns the means over examples of effects' absolute values, each example weighted by its entries at base.

    Args:
        edited: sums and counts [2 row example].
        clean: the same at base, [2 1 example].
    """
    changes = np.abs(ratio(*edited) - ratio(*clean))
    entries = np.where(np.isnan(changes), 0.0, clean[1])
    return ratio((np.nan_to_num(changes) * entries).sum(1), entries.sum(1))
