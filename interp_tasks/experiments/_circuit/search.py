"""Finds the circuit of a checkpoint on one half of its examples, and tests it on the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice, check_draws
from interp_tasks.measurement.subjects import LoadedCheckpoint
from interp_tasks.measurement.table import Row, numbers

if TYPE_CHECKING:
    import pandas

    from circuits.circuit import Circuit, Curve
    from tasks import Batch, Metric

KINDS = ("edges", "nodes")
METHODS = ("gradient", "integrated", "exact")
#: What ranks members: the size of the mean effect over examples, or the mean size.
RANKS = ("mean", "size")
#: Fewest examples: two to find by, and two to test on.
FEWEST = 4
#: The source that a task declares for this where it can (other values, all else alike), and another example.
VALUES, RESAMPLE, CORRUPTED = "values", "resample", "corrupted"
#: Members whose effects are measured, not only estimated, where the method itself measures none.
MEASURED = 10
#: What rows are about: the circuit, the first so many of the ranking, or one member by its name; and a ranking.
CIRCUIT, TOP, CURVE = "circuit", "top ", "curve"
#: Metrics of the circuit's row, and of curves.
SIZE, FAITHFULNESS = "size", "faithfulness"
ON_FINDING_HALF, LARGEST_RANDOM = "faithfulness, finding half", "faithfulness, best of random"
GAP, AREAS = "gap", ("CPR", "CMD")
#: The ranking that a curve is compared with.
RANDOM = "random"


@dataclass(frozen=True)
class Search:
    """How circuits are found and tested.

    Attributes:
        source: what edges outside a circuit hear; see :func:`sources`.
        metric: the metric that faithfulness is of; ``None``: the task's own.
        faithfulness: what the smallest circuit has at least, on the half it is found on.
        random: circuits of the same size, drawn at random.
        curve: whether faithfulness over sizes is measured.
        keep: a circuit of this kind to test instead of finding one.
    """

    source: str | None = None
    metric: str | None = None
    kind: str = "edges"
    method: str = "integrated"
    rank: str = "mean"
    faithfulness: float = 0.9
    random: int = 99
    curve: bool = True
    keep: Circuit | None = None

    def __post_init__(self) -> None:
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

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses what a checkpoint's task or examples do not have.

        Raises:
            UserError: in one line.
        """
        if len(subject.tokens) < FEWEST:
            raise UserError(
                f"{len(subject.tokens)} examples: one half finds the circuit and the other tests it; "
                f"give --samples {FEWEST} or more"
            )
        if self.metric is not None:
            if subject.task is None:
                raise UserError(f"--metric {self.metric}: tokens of your own have no task with metrics")
            if subject.task.metric_names:
                check_choice("--metric", self.metric, subject.task.metric_names)
        sources(subject, self.source)

    @property
    def how(self) -> str:
        """The method that found a circuit; of one that was given, that."""
        return "given" if self.keep is not None else self.method

    @property
    def ranked_by(self) -> str:
        """The size that members are ranked by: the exact effect, where all are measured, or the estimate."""
        return "effect" if self.method == "exact" else "estimate"

    def describe(self) -> dict[str, Any]:
        keep = None if self.keep is None else self.keep.sha256
        return {**vars(self), "keep": keep, "method": self.how}


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
    from circuits.interventions.replacements import derangement

    n = len(subject.tokens) // 2
    declared = sources(subject, source)
    found = []
    for at, rows in enumerate((slice(0, n), slice(n, len(subject.tokens)))):
        tokens = subject.tokens[rows]
        if declared is None:
            given = tokens[derangement(len(tokens), subject.seed + at).to(tokens.device)]
        else:
            given = declared.tokens[rows]
        found.append(Half(tokens, given, None if subject.batch is None else subject.batch[rows]))
    return found[0], found[1]


def sources(subject: LoadedCheckpoint, source: str | None) -> Batch | None:
    """Returns the inputs that edges outside a circuit hear, row by row; ``None`` for another example of the batch.

    Args:
        source: ``"resample"``, a name that the task declares in ``attention_moves(batch, seed)`` or
            ``patch_sources(batch)``; ``None``: ``"values"`` where it declares that, ``"corrupted"`` of prompts, else
            ``"resample"``.

    Raises:
        UserError: for a name that it does not declare.
    """
    if source == RESAMPLE:
        return None
    task: Any = subject.task
    declared: dict[str, Batch] = {}
    if hasattr(task, "attention_moves"):
        declared |= task.attention_moves(subject.batch, subject.seed)
    if hasattr(task, "patch_sources"):
        declared |= task.patch_sources(subject.batch)
    name = source or (CORRUPTED if CORRUPTED in declared else VALUES)
    if name in declared:
        return declared[name].to(str(subject.tokens.device))
    if source is None:
        return None
    raise UserError(
        f"--source {source}: the task declares {', '.join(declared) or 'none'}; or write {RESAMPLE}"
    )


def metrics_of(subject: LoadedCheckpoint, search: Search) -> tuple[str | None, str | None]:
    """Returns the metric that faithfulness is of, and one with a gradient that ranks; ``None`` without a task.

    By default the first is the task's own; it also ranks, unless it has no gradient, as an accuracy; then the first
    that has one does.

    Raises:
        UserError: for a metric that the task does not have, or where none can rank.
    """
    if subject.task is None:
        return None, None
    import torch

    from circuits import run

    assert subject.batch is not None
    with torch.no_grad():
        output = run(subject.model, subject.tokens[:2])
    values = subject.task.metrics(output.clone().requires_grad_(), subject.batch[:2])
    own = subject.task.drop_metric.name
    metric = check_choice(
        "--metric", search.metric or (own if own in values else next(iter(values))), [*values]
    )
    smooth = [name for name, value in values.items() if has_gradient(value)]
    if not smooth:
        raise UserError(f"{subject.name}: no metric of task {subject.task.name} has a gradient to rank by")
    return metric, metric if metric in smooth else smooth[0]


def has_gradient(value: Metric) -> bool:
    """Tells whether a metric can rank: effects are estimated from its gradient."""
    return bool((value[0] if isinstance(value, tuple) else value).requires_grad)


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
    rows: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()


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
    """Finds the smallest circuit on the first half of a checkpoint's examples and tests it on the second.

    Args:
        report_stage: called with the name of each stage as it begins.
    """
    from circuits import circuit as circuits

    begin = report_stage or (lambda _: None)
    finding, testing = halves(subject, search.source)
    test, rank = (
        None if name is None else single_metric(subject, name) for name in metrics_of(subject, search)
    )

    def tested(half: Half, circuit: Circuit, random: int) -> Any:
        controls: dict[str, Any] = {"subsets": 0, "minimality": False, "seed": subject.seed}
        return circuits.evaluate(
            subject.model, circuit, half.base, half.source, test, batch=half.batch, random=random, **controls
        )

    def curve_of(half: Half, rankings: Mapping[str, list[str]], **more: Any) -> Curve:
        return circuits.curve(subject.model, rankings, half.base, half.source, test, batch=half.batch, **more)

    empty = circuits.nodes([], subject.model)
    gap = tested(finding, empty, 0).baseline.iloc[0]
    # Where a source is of the run's length, position embeddings are the same in both runs.
    every = [name for name in circuits.full(subject.model, search.kind) if not name.startswith("pos_embed")]
    name, total = str(gap["metric"]), len(every)
    if not (gap["gap_ci_low"] > 0 or gap["gap_ci_high"] < 0):
        ends = tested(testing, empty, 0).baseline.iloc[0]
        return FoundCircuit(None, total, name, None, ends_rows(ends, total, search))
    circuit, curve, screened, on_finding_half = search.keep, None, None, float("nan")
    if circuit is None:
        begin("ranking")
        screened = screen(subject, finding, rank, search)
        ranking = screened.ranking(by=search.ranked_by)
        begin("smallest circuit")

        def on_finding(size: int) -> float:
            frame = curve_of(finding, {search.method: ranking}, sizes=[size], draws=1).frame
            return float(frame.set_index("size")["faithfulness"][size])

        size, on_finding_half = smallest(on_finding, len(ranking), search.faithfulness)
        circuit = screened.top(size, by=search.ranked_by)
        if search.curve:
            begin("curve")
            rankings = {search.method: ranking, RANDOM: shuffled(ranking, subject.seed)}
            curve = curve_of(testing, rankings, seed=subject.seed)
    begin("random circuits")
    rows = circuit_rows(tested(testing, circuit, search.random), total, on_finding_half, search)
    rows += curve_rows(curve, search) if curve is not None else []
    rows += member_rows(circuit, screened, search) if screened is not None else []
    return FoundCircuit(circuit, total, name, curve, rows, () if screened is None else screened.notes)


def single_metric(subject: LoadedCheckpoint, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a checkpoint's task, as ``circuits`` takes it."""
    task = subject.task
    assert task is not None
    return lambda output, batch: {name: task.metrics(output, batch)[name]}


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


def screen(subject: LoadedCheckpoint, half: Half, metric: Any, search: Search) -> Any:
    """Returns the screening of all members on a half."""
    from circuits import patch

    exact: Any = "all" if search.method == "exact" else MEASURED
    options: dict[str, Any] = {"exact": exact, "batch": half.batch, "seed": subject.seed, "rank": search.rank}
    options["method"] = "gradient" if search.method == "gradient" else "integrated"
    of_kind = patch.edges if search.kind == "edges" else patch.screen
    return of_kind(subject.model, half.base, half.source, metric, **options)


# ---- rows


def ends_rows(ends: pandas.Series, total: int, search: Search) -> list[Row]:
    """Returns how clean and source run differ: all the rows of a checkpoint that has no circuit."""
    about = {"variant": CIRCUIT, "intervention": search.how, "n": int(ends["n"]), "engine": "naive"}
    nothing = float("nan")
    return [
        {**about, "metric": SIZE, "value": nothing, "baseline": float(total)},
        {**about, "metric": GAP, **with_interval(ends, "gap")},
        {**about, "metric": str(ends["metric"]), "value": nothing, "baseline": ends["clean"]},
    ]


def with_interval(row: Any, name: str, baseline: float | None = None) -> Row:
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
        {**about, "metric": LARGEST_RANDOM, "value": row["random_high"]},
    ]
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
    areas = curve.areas.set_index("ranking")
    for area in AREAS:
        of_area = with_interval(areas.loc[search.method], area, areas.loc[RANDOM, area])
        rows.append({**shared, "variant": CURVE, "n": int(curve.settings["n"]), "metric": area, **of_area})
    return rows


def member_rows(circuit: Circuit, screened: Any, search: Search) -> list[Row]:
    """Returns a row for each member, the largest first: its exact effect where it was measured, else the estimate."""
    from circuits import circuit as circuits

    # The table of a screening is in the order of its default ranking.
    by_name = dict(zip(screened.ranking(), screened.frame.to_dict("records"), strict=True))
    make = circuits.edges if circuit.kind == "edges" else circuits.nodes
    rows = []
    for name in screened.ranking(by=search.ranked_by)[: len(circuit)]:
        row = by_name[name]
        measured = row["effect"] == row["effect"] and row["effect"] is not None
        of = "effect" if measured else "estimate"
        about = {"variant": next(iter(make([name]))), "intervention": screened.settings["direction"]}
        about |= {name: row[name] for name in ("metric", "value", "baseline")} | {"n": int(row["n"])}
        effects = {f"effect{end}": row[f"{of}{end}"] for end in ("", "_ci_low", "_ci_high")}
        rows.append({**about, **effects, "engine": "exact" if measured else screened.settings["method"]})
    return rows
