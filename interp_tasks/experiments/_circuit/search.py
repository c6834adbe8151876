"""Finds the circuit of a checkpoint on one half of its examples, and tests it on the other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice, check_draws, unknown
from interp_tasks.measurement.subjects import Planned, Subject

if TYPE_CHECKING:
    import pandas

    from circuits.circuit import Circuit, Curve
    from circuits.circuit._graph import Graph
    from tasks import Batch, Metric, Task

KINDS = ("edges", "nodes")
METHODS = ("gradient", "integrated", "exact", "verified")
#: What ranks members: the size of the mean effect over examples, or the mean size.
RANKS = ("mean", "size")
#: The source that a task declares for this where it can: other values, all else alike.
VALUES = "values"
RESAMPLE = "resample"
#: What rows are about: the circuit, the first so many of the ranking, or one member by its name.
CIRCUIT, TOP = "circuit", "top "
#: Metrics of the circuit's row, and of curves.
SIZE, FAITHFULNESS = "size", "faithfulness"
ON_FINDING_HALF, LARGEST_RANDOM = "faithfulness, finding half", "faithfulness, best of random"
GAP, AREAS = "gap", ("CPR", "CMD")
#: The ranking that a curve is compared with.
RANDOM = "random"
#: Members whose effects are measured, not only estimated, where the method itself measures none.
MEASURED = 10
#: What made the effect of a member that was measured.
MEASURED_BY = "exact"
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
    budget: int | None = None
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
        if self.method == "verified" and self.kind == "nodes":
            raise UserError("--method verified searches among edges: leave --kind nodes out, or take exact")
        if self.budget is not None:
            if self.method != "verified":
                raise UserError(
                    f"--budget {self.budget} goes with --method verified, which spends it on exact effects"
                )
            if self.budget < 1:
                raise UserError(f"--budget {self.budget}: at least 1")
        if not 0 < self.faithfulness <= 1:
            raise UserError(f"--faithfulness {self.faithfulness:g}: above 0 and at most 1")
        check_draws(self.random, "--random")

    def check_planned(self, planned: Planned) -> None:
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
        else:
            for option, name in (("--metric", self.metric), ("--rank-by", self.rank_by)):
                known = planned.task.metric_names
                if name is not None and known and name not in known:
                    raise refused_metric(option, name, known)
        sources(planned, self.source)

    def describe(self) -> dict[str, Any]:
        keep = None if self.keep is None else self.keep.sha256
        return {**{name: value for name, value in vars(self).items() if name != "keep"}, "keep": keep}


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


@contextmanager
def gap_in_table() -> Iterator[None]:
    """Keeps circuits' warning of a gap that may be none from what says so in its table."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"circuit\.\w+: .*: the gap between clean and source run is"
        )
        yield


@gap_in_table()
def found_in(
    subject: Subject, search: Search, report_stage: Callable[[str], None] | None = None
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
    test, rank = (None if name is None else only(subject.task, name) for name in (metric, rank_by))
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
        circuit = screened.top(size, by=by_of(search.method))
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


def ranked(subject: Subject, half: Half, metric: Any, search: Search) -> tuple[Any, list[str]]:
    """Returns the screening of a half, and its members, the largest first."""
    from circuits import patch

    exact: Any = {"exact": "all", "verified": "verified"}.get(search.method, MEASURED)
    options: dict[str, Any] = {"exact": exact, "batch": half.batch, "seed": subject.seed}
    options["rank"] = search.rank
    options["method"] = "gradient" if search.method == "gradient" else "integrated"
    if search.kind == "edges":
        options["budget"] = search.budget
    screen = patch.edges if search.kind == "edges" else patch.screen
    screened = screen(subject.model, half.base, half.source, metric, **options)
    return screened, screened.ranking(by=by_of(search.method))


def by_of(method: str) -> str:
    """Returns the size that a method ranks by: the exact effect, where measured, or the estimate."""
    return {"exact": "effect", "verified": "best"}.get(method, "estimate")


def candidates(model: Any, kind: str) -> list[str]:
    """Returns the members that can matter where a source is of the run's length: not those of position embeddings."""
    from circuits import circuit as circuits

    return [name for name in circuits.full(model, kind) if not name.startswith("pos_embed")]


def halves(subject: Subject, source: str | None) -> tuple[Half, Half]:
    """Returns the half that finds and the half that tests, each with a source of its own examples."""
    n = len(subject.tokens) // 2
    lent = sources(subject, source)
    found = []
    for at, rows in enumerate((slice(0, n), slice(n, len(subject.tokens)))):
        batch = None if subject.batch is None else subject.batch[rows]
        tokens = subject.tokens[rows]
        if lent is None:
            from circuits.interventions.replacements import derangement

            given = tokens[derangement(len(tokens), subject.seed + at).to(tokens.device)]
        else:
            given = lent.tokens[rows]
        found.append(Half(tokens, given, batch))
    return found[0], found[1]


def sources(subject: Subject | Planned, source: str | None) -> Batch | None:
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


def metrics_of(subject: Subject, search: Search) -> tuple[str | None, str | None]:
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
    return bool((value[0] if isinstance(value, tuple) else value).requires_grad)


def refused_metric(option: str, name: str, known: Sequence[str]) -> UserError:
    error = unknown(option, name, known, "metrics")
    # One metric at a time: there is no "all" here.
    return UserError(str(error).removesuffix("; or write all"))


def only(task: Task | None, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a task, as ``circuits`` takes it."""
    assert task is not None

    def metric(output: Any, batch: Any) -> dict[str, Metric]:
        return {name: task.metrics(output, batch)[name]}

    return metric


def read_circuit(file: Path) -> Circuit:
    """Returns the circuit of a file.

    Raises:
        UserError, CircuitsError: for a file that cannot be read, or holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or "members" not in content:
        raise UserError(f"--keep {file} is no circuit; give a file that circuit --write has written")
    from circuits import circuit as circuits

    return circuits.read(file)


def check_circuit(circuit: Circuit, sizes: Any, said: str) -> None:
    """Refuses a circuit of a model of another shape, or with members that this one lacks, by its configuration alone.

    Args:
        sizes: as in :class:`Planned`.
        said: names the file and the model.

    Raises:
        CircuitsError: in one line.
    """
    graph = graph_of(sizes)
    graph.check_same(circuit.graph, said)
    graph.fitted(circuit.where, circuit.kind, said)


def graph_of(sizes: Any) -> Graph:
    """Returns the graph of a HookedTransformer of this configuration."""
    from circuits.circuit._graph import Graph

    grouped = sizes.n_key_value_heads is not None and not sizes.ungroup_grouped_query_attention
    return Graph(
        sizes.n_layers,
        sizes.n_heads,
        sizes.n_key_value_heads if grouped else sizes.n_heads,
        mlps=not sizes.attn_only,
        parallel=sizes.parallel_attn_mlp,
        positions=sizes.positional_embedding_type != "rotary",
    )


def has_gap(ends: pandas.Series) -> bool:
    """Returns whether clean and source run differ: the interval of their difference has no 0."""
    return bool(ends["gap_ci_low"] > 0 or ends["gap_ci_high"] < 0)


# ---- Rows


def ends_rows(ends: pandas.Series, total: int, search: Search) -> list[dict[str, Any]]:
    """Returns the rows of a checkpoint: how its clean and source run differ; without a circuit no more."""
    about = {"variant": CIRCUIT, "intervention": named(search), "n": int(ends["n"]), "engine": "naive"}
    nothing = float("nan")
    return [
        {**about, "metric": SIZE, "value": nothing, "baseline": float(total)},
        {
            **about,
            "metric": GAP,
            "value": ends["gap"],
            "ci_low": ends["gap_ci_low"],
            "ci_high": ends["gap_ci_high"],
        },
        {**about, "metric": str(ends["metric"]), "value": nothing, "baseline": ends["clean"]},
    ]


def named(search: Search) -> str:
    return "given" if search.keep is not None else search.method


def circuit_rows(result: Any, total: int, on_finding_half: float, search: Search) -> list[dict[str, Any]]:
    """Returns the rows of a circuit: its size, faithfulness beside random circuits, metric and gap."""
    size, gap, value = ends_rows(result.baseline.iloc[0], total, search)
    row = result.frame.iloc[0]
    about = {name: value[name] for name in ("variant", "intervention", "n", "engine")}
    rows = [
        {**size, "value": float(row["size"])},
        {
            **about,
            "metric": FAITHFULNESS,
            "value": row["faithfulness"],
            "ci_low": row["faithfulness_ci_low"],
            "ci_high": row["faithfulness_ci_high"],
            "baseline": row["random_mean"],
            "effect": row["faithfulness"] - row["random_mean"],
        },
        {**value, "value": row["value"], "ci_low": row["ci_low"], "ci_high": row["ci_high"]},
        gap,
    ]
    if search.random:
        rows.append({**about, "metric": LARGEST_RANDOM, "value": row["random_high"]})
    if on_finding_half == on_finding_half:
        rows.append({**about, "metric": ON_FINDING_HALF, "value": on_finding_half})
    return rows


def curve_rows(curve: Curve, search: Search) -> list[dict[str, Any]]:
    """Returns the rows of every size, beside as many members in a random order, and the areas."""
    rows: list[dict[str, Any]] = []
    frames = dict(iter(curve.frame.groupby("ranking", sort=False)))
    random = frames[RANDOM].set_index("size")
    clean = float(curve.baseline["clean"].iloc[0])
    for row in frames[search.method].to_dict("records"):
        about = {"variant": f"{TOP}{row['size']}", "intervention": search.method, "n": row["n"]}
        beside = float(random["faithfulness"].get(row["size"], float("nan")))
        rows += [
            {
                **about,
                "metric": FAITHFULNESS,
                "value": row["faithfulness"],
                "ci_low": row["faithfulness_ci_low"],
                "ci_high": row["faithfulness_ci_high"],
                "baseline": beside,
                "effect": row["faithfulness"] - beside,
            },
            {
                **about,
                "metric": row["metric"],
                "value": row["value"],
                "ci_low": row["ci_low"],
                "ci_high": row["ci_high"],
                "baseline": clean,
            },
        ]
    areas = curve.areas.set_index("ranking")
    for area in AREAS:
        rows.append(
            {
                "variant": "curve",
                "intervention": search.method,
                "n": int(curve.settings["n"]),
                "metric": area,
                "value": areas.loc[search.method, area],
                "ci_low": areas.loc[search.method, f"{area}_ci_low"],
                "ci_high": areas.loc[search.method, f"{area}_ci_high"],
                "baseline": areas.loc[RANDOM, area],
                "effect": areas.loc[search.method, area] - areas.loc[RANDOM, area],
            }
        )
    return [{**row, "engine": "naive"} for row in rows]


def member_rows(circuit: Circuit, screened: Any, search: Search) -> list[dict[str, Any]]:
    """Returns a row for each member, the largest first: its exact effect where it was measured, else the estimate."""
    import pandas

    from circuits import circuit as circuits

    # The table of a screening is in the order of its default ranking.
    by_name = dict(zip(screened.ranking(), screened.frame.to_dict("records"), strict=True))
    make = circuits.edges if circuit.kind == "edges" else circuits.nodes
    rows = []
    for name in screened.ranking(by=by_of(search.method))[: len(circuit)]:
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
