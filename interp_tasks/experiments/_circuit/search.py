"""Finds the circuit of a checkpoint on one half of its examples, and tests it on the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice, check_draws, unknown
from interp_tasks.measurement.subjects import LoadedCheckpoint, PendingCheckpoint
from interp_tasks.measurement.table import Row, numbers

if TYPE_CHECKING:
    import pandas

    from circuits.circuit import Circuit, Curve
    from tasks import Batch, Metric, Task

KINDS = ("edges", "nodes")
METHODS = ("gradient", "integrated", "exact")
#: What ranks members: the size of the mean effect over examples, or the mean size.
RANKS = ("mean", "size")
#: Fewest examples: two to find by, and two to test on.
FEWEST = 4


@dataclass(frozen=True)
class Search:
    """How circuits are found and tested.

    Attributes:
        faithfulness: what the smallest circuit has at least, on the half it is found on.
        random: circuits of the same size, drawn at random.
        curve: whether faithfulness over sizes is measured.
        keep: a circuit of this kind to test instead of finding one.
    """

    source: str | None = None
    metric: str | None = None
    rank_by: str | None = None
    kind: str = "edges"
    method: str = "integrated"
    rank: str = "mean"
    faithfulness: float = 0.9
    random: int = 20
    curve: bool = True
    keep: Circuit | None = None

    def check(self) -> None:
        """Refuses what no checkpoint can be asked for.

        Raises:
            UserError: in one line.
        """
        check_choice("--kind", self.kind, KINDS)
        check_choice("--method", self.method, METHODS)
        check_choice("--rank", self.rank, RANKS)
        if not 0 < self.faithfulness <= 1:
            raise UserError(f"--faithfulness {self.faithfulness:g}: above 0 and at most 1")
        check_draws(self.random, "--random")

    def check_planned(self, planned: PendingCheckpoint) -> None:
        """Refuses what a checkpoint's task or examples do not have."""
        if len(planned.tokens) < FEWEST:
            raise UserError(
                f"{len(planned.tokens)} examples: one half finds the circuit and the other tests it; "
                f"give --samples {FEWEST} or more"
            )
        if planned.task is None:
            for option, name in (("--metric", self.metric), ("--rank-by", self.rank_by)):
                if name is not None:
                    raise UserError(f"{option} {name}: tokens of your own have no task with metrics")
            if planned.sizes.d_vocab_out == 1:
                raise UserError(
                    "tokens of your own have no task with metrics, and one output has no first and second choice "
                    "to compare: take --samples of the task, or patch.edges(metric=...) in Python"
                )
        else:
            for option, name in (("--metric", self.metric), ("--rank-by", self.rank_by)):
                known = planned.task.metric_names
                if name is not None and known and name not in known:
                    raise refused_metric(option, name, known)
        sources(planned, self.source)

    def describe(self) -> dict[str, Any]:
        keep = None if self.keep is None else self.keep.sha256
        return {**{name: value for name, value in vars(self).items() if name != "keep"}, "keep": keep}


def ranked_by(method: str) -> str:
    """Returns the size that a method ranks by: the exact effect, where measured, or the estimate."""
    return "effect" if method == "exact" else "estimate"


def refused_metric(option: str, name: str, known: Sequence[str]) -> UserError:
    """Returns the error for a metric that a task does not have."""
    error = unknown(option, name, known, "metrics")
    # One metric at a time: there is no "all" here.
    return UserError(str(error).removesuffix("; or write all"))


#: The source that a task declares for this where it can: other values, all else alike.
VALUES = "values"
#: Another example of the batch.
RESAMPLE = "resample"


@dataclass(frozen=True)
class Half:
    """Half of the examples, each with its source.

    Attributes:
        base, source: ``[n pos]``.
        batch: the task's examples of ``base``.
    """

    base: Any
    source: Any
    batch: Batch | None


def halves(subject: LoadedCheckpoint, source: str | None) -> tuple[Half, Half]:
    """Returns the half that finds and the half that tests, each with a source of its own examples."""
    n = len(subject.tokens) // 2
    declared = sources(subject, source)
    found = []
    for at, rows in enumerate((slice(0, n), slice(n, len(subject.tokens)))):
        batch = None if subject.batch is None else subject.batch[rows]
        tokens = subject.tokens[rows]
        if declared is None:
            from circuits.interventions.replacements import derangement

            given = tokens[derangement(len(tokens), subject.seed + at).to(tokens.device)]
        else:
            given = declared.tokens[rows]
        found.append(Half(tokens, given, batch))
    return found[0], found[1]


def sources(subject: LoadedCheckpoint | PendingCheckpoint, source: str | None) -> Batch | None:
    """Returns the inputs that edges outside a circuit hear, row by row; ``None`` for another example of the batch.

    Args:
        source: ``"resample"``, a name that the task declares in ``attention_moves(batch, seed)`` or
            ``patch_sources(batch)``; ``None``: ``"values"`` where it declares that, else ``"resample"``.

    Raises:
        UserError: for a name that it does not declare.
    """
    if source == RESAMPLE or (source is None and subject.task is None):
        return None
    task: Any = subject.task
    declared: dict[str, Batch] = {}
    if hasattr(task, "attention_moves"):
        declared |= task.attention_moves(subject.batch, subject.seed)
    if hasattr(task, "patch_sources"):
        declared |= task.patch_sources(subject.batch)
    name = VALUES if source is None else source
    if name in declared:
        return declared[name].to(str(subject.tokens.device))
    if source is None:
        return None
    if task is None:
        raise UserError(f"--source {source}: tokens of your own have no task to name it; write {RESAMPLE}")
    has = f"declares {', '.join(declared)}" if declared else "declares none"
    raise UserError(
        f"--source {source}: no such source of task {task.name}, which {has}; write one of those or {RESAMPLE}"
    )


def metrics_of(subject: LoadedCheckpoint, search: Search) -> tuple[str | None, str | None]:
    """Returns the metric that faithfulness is of, and one with a gradient that ranks; ``None`` without a task.

    By default the first is the task's own; it also ranks, unless it has no gradient, as an accuracy; then the first
    that has one does. Beside a circuit that is given none ranks.

    Raises:
        UserError: for a metric that the task does not have, or that cannot rank.
    """
    if subject.task is None:
        return None, None
    import torch

    assert subject.batch is not None
    with torch.no_grad():
        output = subject.model(subject.tokens[:2])
    values = subject.task.metrics(output.clone().requires_grad_(), subject.batch[:2])
    own = subject.task.drop_metric.name
    metric = search.metric or (own if own in values else next(iter(values)))
    if metric not in values:
        raise refused_metric("--metric", metric, list(values))
    if search.keep is not None:
        return metric, None
    smooth = [name for name, value in values.items() if has_gradient(value)]
    if search.rank_by is not None and search.rank_by not in values:
        raise refused_metric("--rank-by", search.rank_by, list(values))
    if search.rank_by is not None and search.rank_by not in smooth:
        raise UserError(
            f"--rank-by {search.rank_by}: it has no gradient; of {subject.task.name} there is {', '.join(smooth)}"
        )
    if not smooth:
        raise UserError(f"{subject.name}: no metric of task {subject.task.name} has a gradient to rank by")
    return metric, search.rank_by or (metric if metric in smooth else smooth[0])


def has_gradient(value: Metric) -> bool:
    """Tells whether a metric can rank: effects are estimated from its gradient."""
    return bool((value[0] if isinstance(value, tuple) else value).requires_grad)


def single_metric(task: Task | None, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a task, as ``circuits`` takes it."""
    assert task is not None

    def metric(output: Any, batch: Any) -> dict[str, Metric]:
        return {name: task.metrics(output, batch)[name]}

    return metric


#: What rows are about: the circuit, the first so many of the ranking, or one member by its name.
CIRCUIT, TOP = "circuit", "top "
#: And a ranking as a whole.
CURVE = "curve"
#: Metrics of the circuit's row, and of curves.
SIZE, FAITHFULNESS = "size", "faithfulness"
ON_FINDING_HALF, LARGEST_RANDOM = "faithfulness, finding half", "faithfulness, best of random"
GAP, AREAS = "gap", ("CPR", "CMD")
#: The ranking that a curve is compared with.
RANDOM = "random"
#: What made the effect of a member that was measured.
MEASURED_BY = "exact"


def ends_rows(ends: pandas.Series, total: int, search: Search) -> list[Row]:
    """Returns how clean and source run differ: all the rows of a checkpoint that has no circuit."""
    about = {"variant": CIRCUIT, "intervention": how_found(search), "n": int(ends["n"]), "engine": "naive"}
    nothing = float("nan")
    return [
        {**about, "metric": SIZE, "value": nothing, "baseline": float(total)},
        {**about, "metric": GAP, **numbers(ends["gap"], (ends["gap_ci_low"], ends["gap_ci_high"]))},
        {**about, "metric": str(ends["metric"]), "value": nothing, "baseline": ends["clean"]},
    ]


def how_found(search: Search) -> str:
    """Returns the method that found a circuit; of one that was given, that."""
    return "given" if search.keep is not None else search.method


def with_interval(row: Mapping[Any, Any], name: str, baseline: float | None = None) -> Row:
    """Returns the columns of a number that a table of ``circuits`` has with its interval."""
    return numbers(row[name], (row[f"{name}_ci_low"], row[f"{name}_ci_high"]), baseline)


def circuit_rows(result: Any, total: int, on_finding_half: float, search: Search) -> list[Row]:
    """Returns the rows of a circuit: its size, faithfulness beside random circuits, metric and gap."""
    size, gap, value = ends_rows(result.baseline.iloc[0], total, search)
    row = result.frame.iloc[0]
    about = {name: value[name] for name in ("variant", "intervention", "n", "engine")}
    rows = [
        {**size, "value": float(row["size"])},
        {**about, "metric": FAITHFULNESS, **with_interval(row, "faithfulness", row["random_mean"])},
        {**value, **with_interval(row, "value")},
        gap,
    ]
    if search.random:
        rows.append({**about, "metric": LARGEST_RANDOM, "value": row["random_high"]})
    if on_finding_half == on_finding_half:
        rows.append({**about, "metric": ON_FINDING_HALF, "value": on_finding_half})
    return rows


def curve_rows(curve: Curve, search: Search) -> list[Row]:
    """Returns the rows of every size, beside as many members in a random order, and the areas."""
    rows: list[Row] = []
    frames = dict(iter(curve.frame.groupby("ranking", sort=False)))
    random = frames[RANDOM].set_index("size")["faithfulness"]
    clean = float(curve.baseline["clean"].iloc[0])
    shared = {"intervention": search.method, "engine": "naive"}
    for row in frames[search.method].to_dict("records"):
        about = {**shared, "variant": f"{TOP}{row['size']}", "n": row["n"]}
        at_random = float(random.get(row["size"], float("nan")))
        rows.append({**about, "metric": FAITHFULNESS, **with_interval(row, "faithfulness", at_random)})
        rows.append({**about, "metric": row["metric"], **with_interval(row, "value"), "baseline": clean})
    areas, about = (
        curve.areas.set_index("ranking"),
        {**shared, "variant": CURVE, "n": int(curve.settings["n"])},
    )
    for area in AREAS:
        of_area = with_interval(areas.loc[search.method], area, areas.loc[RANDOM, area])
        rows.append({**about, "metric": area, **of_area})
    return rows


def member_rows(circuit: Circuit, screened: Any, search: Search) -> list[dict[str, Any]]:
    """Returns a row for each member, the largest first: its exact effect where it was measured, else the estimate."""
    import pandas

    from circuits import circuit as circuits

    # The table of a screening is in the order of its default ranking.
    by_name = dict(zip(screened.ranking(), screened.frame.to_dict("records"), strict=True))
    make = circuits.edges if circuit.kind == "edges" else circuits.nodes
    rows = []
    for name in screened.ranking(by=ranked_by(search.method))[: len(circuit)]:
        row = by_name[name]
        measured = bool(pandas.notna(row["effect"]))
        of = "effect" if measured else "estimate"
        rows.append(
            {
                "variant": next(iter(make([name]))),
                "intervention": screened.settings["direction"],
                "metric": row["metric"],
                "value": row["value"],
                "baseline": row["baseline"],
                "effect": row[of],
                "effect_ci_low": row[f"{of}_ci_low"],
                "effect_ci_high": row[f"{of}_ci_high"],
                "n": int(row["n"]),
                "engine": MEASURED_BY if measured else screened.settings["method"],
            }
        )
    return rows


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
    from circuits import circuit as circuits

    begin = report_stage or (lambda _: None)
    finding, testing = halves(subject, search.source)
    metric, rank_by = metrics_of(subject, search)
    test, rank = (None if name is None else single_metric(subject.task, name) for name in (metric, rank_by))
    empty = circuits.nodes([], subject.model)

    def tested(half: Half, circuit: Circuit, random: int) -> Any:
        controls: dict[str, Any] = {"subsets": 0, "greedy": 0, "minimality": False, "seed": subject.seed}
        return circuits.evaluate(
            subject.model, circuit, half.base, half.source, test, batch=half.batch, random=random, **controls
        )

    gap = tested(finding, empty, 0).baseline.iloc[0]
    name, total = str(gap["metric"]), len(candidates(subject.model, search.kind))
    if not has_gap(gap):
        ends = tested(testing, empty, 0).baseline.iloc[0]
        return FoundCircuit(None, total, name, None, ends_rows(ends, total, search))
    circuit, curve, screened, on_finding_half = search.keep, None, None, float("nan")
    if circuit is None:
        begin("ranking")
        screened, ranking = ranked(subject, finding, rank, search)
        begin("smallest circuit")

        def on_finding(size: int) -> float:
            frame = curve_of(subject, finding, test, {search.method: ranking}, sizes=[size], draws=1).frame
            return float(frame.set_index("size")["faithfulness"][size])

        size, on_finding_half = smallest(on_finding, len(ranking), search.faithfulness)
        circuit = screened.top(size, by=ranked_by(search.method))
        if search.curve:
            begin("curve")
            rankings = {search.method: ranking, RANDOM: shuffled(ranking, subject.seed)}
            curve = curve_of(subject, testing, test, rankings, seed=subject.seed)
    begin("random circuits")
    rows = circuit_rows(tested(testing, circuit, search.random), total, on_finding_half, search)
    rows += curve_rows(curve, search) if curve is not None else []
    rows += member_rows(circuit, screened, search) if screened is not None else []
    return FoundCircuit(circuit, total, name, curve, rows, () if screened is None else screened.notes)


def curve_of(
    subject: LoadedCheckpoint, half: Half, metric: Any, rankings: Mapping[str, list[str]], **more: Any
) -> Curve:
    """Returns the faithfulness of the first members of rankings, on a half of the examples."""
    from circuits import circuit as circuits

    return circuits.curve(subject.model, rankings, half.base, half.source, metric, batch=half.batch, **more)


def shuffled(ranking: Sequence[str], seed: int) -> list[str]:
    import numpy as np

    return [ranking[at] for at in np.random.default_rng([seed, 5]).permutation(len(ranking))]


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
