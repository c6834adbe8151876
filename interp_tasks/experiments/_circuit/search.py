"""Finds the circuit of a checkpoint on one half of its examples, and tests it on the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._circuit.halves import Half, halves
from interp_tasks.experiments._circuit.metrics import metrics_of, single_metric
from interp_tasks.experiments._circuit.rows import (
    CIRCUIT,
    RANDOM,
    circuit_rows,
    curve_rows,
    ends_rows,
    member_rows,
)
from interp_tasks.experiments._circuit.settings import Search, ranked_by
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    import pandas

    from circuits.circuit import Circuit, Curve

#: Members whose effects are measured, not only estimated, where the method itself measures none.
MEASURED = 10


@dataclass(frozen=True)
class FoundCircuit:
    """The circuit of one checkpoint.

    Attributes:
        circuit: ``None`` where clean and source run do not differ, so that there is nothing to be faithful to.
        total: members of the model's graph that can matter.
        metric: the metric that faithfulness is a share of.
        curve: faithfulness over sizes, of the ranking and of a random one; ``None`` for a circuit that was given.
        rows: of the table.
        notes: what the ranking may miss.
    """

    circuit: Circuit | None
    total: int
    metric: str
    curve: Curve | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def value(self, metric: str, column: str = "value") -> float:
        """Returns a number of the circuit's own rows, NaN where there is none."""
        found = (row for row in self.rows if row["variant"] == CIRCUIT and row["metric"] == metric)
        return float(next(found, {}).get(column, float("nan")))


@contextmanager
def gap_in_table() -> Iterator[None]:
    """Keeps circuits' warning of a gap that may be none from what says so in its table."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"circuit\.\w+: .*: the gap between clean and source run is"
        )
        yield


@gap_in_table()
def find_circuit(
    subject: LoadedCheckpoint, search: Search, report_stage: Callable[[str], None] | None = None
) -> FoundCircuit:
    """Finds the smallest circuit on the first half of a subject's examples and tests it on the second.

    Args:
        report_stage: called with the name of each stage as it begins.
    """
    import numpy as np

    from circuits import circuit as circuits

    begin = report_stage or (lambda _: None)
    finding, testing = halves(subject, search.source)
    metric, rank_by = metrics_of(subject, search)
    test, rank = (None if name is None else single_metric(subject.task, name) for name in (metric, rank_by))
    empty = circuits.nodes([], subject.model)
    controls: dict[str, Any] = {"subsets": 0, "greedy": 0, "minimality": False, "seed": subject.seed}

    def tested(half: Half, circuit: Circuit, random: int) -> Any:
        return circuits.evaluate(
            subject.model, circuit, half.base, half.source, test, batch=half.batch, random=random, **controls
        )

    gap = tested(finding, empty, 0).baseline.iloc[0]
    name = str(gap["metric"])
    total = len(candidates(subject.model, search.kind))
    if not has_gap(gap):
        ends = tested(testing, empty, 0)
        return FoundCircuit(None, total, name, None, ends_rows(ends.baseline.iloc[0], total, search))
    ranking: list[str] = []
    curve, screened, on_finding_half = None, None, float("nan")
    if search.keep is None:
        begin("ranking")
        screened, ranking = ranked(subject, finding, rank, search)
        begin("smallest circuit")

        def on_finding(size: int) -> float:
            frame = circuits.curve(
                subject.model,
                {search.method: ranking},
                finding.base,
                finding.source,
                test,
                batch=finding.batch,
                sizes=[size],
                draws=1,
            ).frame
            return float(frame.set_index("size")["faithfulness"][size])

        size, on_finding_half = smallest(on_finding, len(ranking), search.faithfulness)
        circuit = screened.top(size, by=ranked_by(search.method))
        if search.curve:
            begin("curve")
            rng = np.random.default_rng([subject.seed, 5])
            shuffled = [ranking[index] for index in rng.permutation(len(ranking))]
            curve = circuits.curve(
                subject.model,
                {search.method: ranking, RANDOM: shuffled},
                testing.base,
                testing.source,
                test,
                batch=testing.batch,
                seed=subject.seed,
            )
    else:
        circuit = search.keep
    begin("random circuits")
    result = tested(testing, circuit, search.random)
    rows = [
        *circuit_rows(result, total, on_finding_half, search),
        *(curve_rows(curve, search) if curve is not None else []),
        *(member_rows(circuit, screened, search) if screened is not None else []),
    ]
    return FoundCircuit(circuit, total, name, curve, rows, () if screened is None else screened.notes)


def smallest(faithfulness: Callable[[int], float], total: int, least: float) -> tuple[int, float]:
    """Returns a size that is faithful enough where one less is not, and its faithfulness, by bisection.

    Faithfulness need not grow with size: there may be a smaller one that was not tried. The whole is
    always enough: its faithfulness is 1.
    """
    below, size, value = 0, total, 1.0
    while size - below > 1:
        middle = (below + size) // 2
        found = faithfulness(middle)
        if found >= least:
            size, value = middle, found
        else:
            below = middle
    return size, value


def ranked(subject: LoadedCheckpoint, half: Half, metric: Any, search: Search) -> tuple[Any, list[str]]:
    """Returns the screening of a half, and its members, the largest first."""
    from circuits import patch

    exact: Any = "all" if search.method == "exact" else MEASURED
    options: dict[str, Any] = {"exact": exact, "batch": half.batch, "seed": subject.seed}
    options["rank"] = search.rank
    options["method"] = "gradient" if search.method == "gradient" else "integrated"
    screen = patch.edges if search.kind == "edges" else patch.screen
    screened = screen(subject.model, half.base, half.source, metric, **options)
    return screened, screened.ranking(by=ranked_by(search.method))


def candidates(model: Any, kind: str) -> list[str]:
    """Returns the members that can matter where a source is of the run's length: not those of position embeddings."""
    from circuits import circuit as circuits

    return [name for name in circuits.full(model, kind) if not name.startswith("pos_embed")]


def has_gap(ends: pandas.Series) -> bool:
    """Returns whether clean and source run differ: the interval of their difference has no 0."""
    return bool(ends["gap_ci_low"] > 0 or ends["gap_ci_high"] < 0)
