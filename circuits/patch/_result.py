"""Holds the result of a screening: estimates, exact effects of the top rows, and their rank correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from circuits.circuit import _rankings
from circuits.circuit._graph import Graph
from circuits.circuit._value import Circuit
from circuits.errors import CircuitsError
from circuits.sweeps.measurements import Row
from circuits.sweeps.table import SweepResult, limits
from circuits.tables import short_table

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
