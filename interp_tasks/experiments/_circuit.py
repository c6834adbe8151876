"""Finds the smallest circuit that is as faithful as asked, at each checkpoint, and tests it on other examples.

The variant ``circuit`` has the rows ``size`` (``baseline``: of how many), ``faithfulness`` (``baseline``: mean of the
random circuits), ``faithfulness, finding half``, ``faithfulness, best of random``, the metric where it is kept
(``baseline``: of the unedited model), and ``gap``, the metric of the clean minus that of the source run; where its
interval on the finding half holds 0, there is no circuit, and ``size`` is empty. ``top 12``: the first 12 of the
ranking; ``baseline`` of ``faithfulness`` are 12 at random. ``curve``: the areas ``CPR`` and ``CMD``. And a row per
member with its ``effect``: exact where ``engine`` says so, else the estimate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import curve as lines
from circuits.figures.panels import of_rows
from interp_tasks.errors import UserError
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice, check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, Refs, resolve_refs
from interp_tasks.measurement.table import Row, filled, numbers, value_text
from interp_tasks.pages import Column, Figure, check_writable_file, signed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from circuits.circuit import Circuit, Curve
    from interp_tasks.checkpoints import ResolvedCheckpoint
    from tasks import Batch, Metric

KINDS = ("edges", "nodes")
METHODS = ("gradient", "integrated", "exact")
#: What ranks members: the size of the mean effect over examples, or the mean size.
RANKS = ("mean", "size")
#: Examples where nothing is said: half of them find, half test; and the fewest, two of each.
SAMPLES, FEWEST = 128, 4
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
RANDOM_ORDER = "random"
#: Checkpoints whose circuits are drawn.
DRAWN = 2
#: Captions of figures.
OVER_STEPS = (
    "Members of the smallest circuit that is faithful enough on the half that finds it, its faithfulness on the other "
    "half with 95% intervals, and the unedited model's metric. No point: clean and source run do not differ."
)
GROWING = "Kept on the half of the examples that did not find it, beside as many members at random."
#: Members that the notes name.
LISTED = 5
SOURCE = typer.Option(
    "--source",
    metavar="SOURCE",
    help="What cut edges hear: resample, or a name of the task's.",
    show_default="values, or resample",
)
METRIC = typer.Option(
    "--metric", metavar="NAME", help="What is to be faithful.", show_default="the task's own"
)
KIND = typer.Option("--kind", metavar="KIND", help="edges or nodes.")
METHOD = typer.Option("--method", metavar="METHOD", help="Ranking: gradient, integrated or exact.")
RANK = typer.Option("--rank", metavar="RANK", help="By the mean effect, or by the mean size of effects.")
FAITHFULNESS_OPTION = typer.Option("--faithfulness", metavar="SHARE", help="What the circuit has at least.")
RANDOM = typer.Option("--random", help="Random circuits of its size to compare with.")
CURVE_OPTION = typer.Option("--curve/--no-curve", help="Measure faithfulness over sizes too.")
KEEP = typer.Option("--keep", metavar="FILE.json", help="Test this circuit instead of finding one.")
WRITE = typer.Option(
    "--write", metavar="FILE.json", help="Write the circuit there, for --keep and circuit.read."
)


@experiment(
    "Intervene",
    says={
        "source": None,
        "metric": None,
        "kind": "edges",
        "method": None,
        "rank": "mean",
        "faithfulness": 0.9,
    },
    samples=SAMPLES,
)
def circuit(
    refs: Refs,
    source: Annotated[str | None, SOURCE] = None,
    metric: Annotated[str | None, METRIC] = None,
    kind: Annotated[str, KIND] = "edges",
    method: Annotated[str, METHOD] = "integrated",
    rank: Annotated[str, RANK] = "mean",
    faithfulness: Annotated[float, FAITHFULNESS_OPTION] = 0.9,
    random: Annotated[int, RANDOM] = 99,
    curve: Annotated[bool, CURVE_OPTION] = True,
    keep: Annotated[str | Path | None, KEEP, str | None] = None,
    write: Annotated[str | Path | None, WRITE, str | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Find the smallest circuit that does what the model does, and test it on other examples.

    All edges outside a circuit carry the source's values. One half of the examples ranks all edges and finds the
    smallest circuit of --faithfulness; the other half tests it, beside random circuits of its size. Faithfulness is 0
    as on the source, 1 as the whole model.

    Args:
        source: what edges outside a circuit hear: ``"resample"`` (another example of the same half), or a name that the
            task declares in ``attention_moves(batch, seed)`` (``"values"``, of matrix completion: another matrix under
            the same mask; ``"mask"``) or ``patch_sources(batch)`` (``"negated"``; of modular arithmetic ``"shifted"``,
            ``"swapped"``). Default: ``"values"`` where there is one, else ``"resample"``.
        metric: the metric that faithfulness is of, and that ranks; for one without a gradient, such as an accuracy, the
            task's first that has one ranks.
        kind: ``"edges"`` or ``"nodes"``.
        method: what ranks members: effects estimated from the ``"gradient"`` or from ``"integrated"`` gradients, or
            ``"exact"`` ones, a forward pass each.
        rank: by the size of the ``"mean"`` effect over examples, or by their mean ``"size"``, where signs differ.
        faithfulness: what the circuit has at least, on the half it is found on.
        random: how many random circuits of its size.
        curve: whether faithfulness over about 20 sizes is measured, on the half that tests, beside a random order.
        keep: the file of a circuit that is tested instead, on the half that tests; how one is found plays no part then.
        write: a file for the circuit of the one checkpoint, as ``circuits.circuit.read`` reads it.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    search = Search(source, metric, kind, method, rank, faithfulness, random, curve)
    if keep is not None:
        search = search.keeping(Path(keep))
    examples = Examples.of(options)
    found = resolve_refs(refs, examples)
    if write is not None:
        check_writable_file(Path(write))
        if len(found) > 1 or keep is not None:
            raise UserError(f"--write {write}: the circuit found at one checkpoint; name one, without --keep")
    if options.get("samples") is None and examples.tokens is None:
        options = {**options, "samples": SAMPLES}
    result = find_circuits(found, search, options)
    if write is not None:
        if not result.data["circuits"]:
            raise UserError(f"--write {write}: there is no circuit, since clean and source run do not differ")
        Path(write).parent.mkdir(parents=True, exist_ok=True)
        next(iter(result.data["circuits"].values())).write(write)
    return result


def find_circuits(refs: Sequence[ResolvedCheckpoint], search: Search, options: Options) -> Result:
    """Finds, or tests, the circuit of each checkpoint."""
    found: dict[str, FoundCircuit] = {}
    progress, total = options.get("progress"), len(refs)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        ref = str(subject.labels["ref"])

        def report_stage(stage: str) -> None:
            if progress is not None:
                progress(min(len(found), total - 1), total, f"{ref}: {stage}")

        with warnings.catch_warnings():
            # Our table says where there may be no gap.
            warnings.filterwarnings("ignore", r"circuit\.\w+: .*: the gap between clean and source run is")
            one = found[ref] = find_circuit(subject, search, report_stage)
        done = {} if one.circuit is None else {"size": len(one.circuit), "sha256": one.circuit.sha256}
        return Measured(pandas.DataFrame(one.rows), {"circuit": done} if done else {})

    config = search.describe()
    result = measure("circuit", refs, options, measure_checkpoint, config=config, check=search.check)
    data = {
        "circuits": {ref: each.circuit for ref, each in found.items() if each.circuit is not None},
        "curves": {ref: each.curve for ref, each in found.items() if each.curve is not None},
        "metrics": {ref: each.metric for ref, each in found.items()},
    }
    missed = dict.fromkeys(note for each in found.values() for note in each.notes)
    notes = [
        *explanations(result.frame, search),
        *(note.replace('rank="size"', "--rank size") for note in missed),
    ]
    return replace(result, notes=tuple(notes), data=data)


@dataclass(frozen=True)
class Search:
    """How circuits are found and tested; the fields are the options of :func:`circuit`, ``keep`` the circuit read."""

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

    def keeping(self, file: Path) -> Search:
        """Returns the same with the circuit of a file, which is tested instead of finding one."""
        from circuits import circuit as circuits

        check_file(file, "--keep")
        kept = circuits.read(file)
        return replace(self, kind=kept.kind, keep=kept)

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


def halves(subject: LoadedCheckpoint, source: str | None) -> list[tuple[Any, Any, Batch | None]]:
    """Returns tokens, those of the source and the task's examples, of the half that finds and of that which tests."""
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
        found.append((tokens, given, None if subject.batch is None else subject.batch[rows]))
    return found


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
    # Effects are estimated from gradients.
    parts = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
    smooth = [name for name, value in parts.items() if value.requires_grad]
    if not smooth:
        raise UserError(f"{subject.name}: no metric of task {subject.task.name} has a gradient to rank by")
    return metric, metric if metric in smooth else smooth[0]


@dataclass(frozen=True)
class FoundCircuit:
    """The circuit of one checkpoint: ``None`` where clean and source run do not differ; its rows and curve, if any.

    ``metric`` is what faithfulness is a share of; ``notes`` say what the ranking may miss.
    """

    circuit: Circuit | None
    metric: str
    curve: Curve | None
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def find_circuit(subject: LoadedCheckpoint, search: Search, begin: Callable[[str], None]) -> FoundCircuit:
    """Finds the smallest circuit on the first half of a checkpoint's examples and tests it on the second.

    Args:
        begin: called with the name of each stage as it begins.
    """
    from circuits import circuit as circuits

    model, seed = subject.model, subject.seed
    finding, testing = halves(subject, search.source)
    test, rank = (
        None if name is None else single_metric(subject, name) for name in metrics_of(subject, search)
    )

    def tested(half: tuple[Any, Any, Any], circuit: Circuit, random: int) -> Any:
        base, source, batch = half
        controls: dict[str, Any] = {"subsets": 0, "minimality": False, "seed": seed, "random": random}
        return circuits.evaluate(model, circuit, base, source, test, batch=batch, **controls)

    def curve_of(half: tuple[Any, Any, Any], rankings: Mapping[str, list[str]], **more: Any) -> Curve:
        base, source, batch = half
        return circuits.curve(model, rankings, base, source, test, batch=batch, **more)

    empty = circuits.nodes([], model)
    gap = tested(finding, empty, 0).baseline.iloc[0]
    # Where a source is of the run's length, position embeddings are the same in both runs.
    every = [name for name in circuits.full(model, search.kind) if not name.startswith("pos_embed")]
    name, total = str(gap["metric"]), len(every)
    if not (gap["gap_ci_low"] > 0 or gap["gap_ci_high"] < 0):
        ends = tested(testing, empty, 0).baseline.iloc[0]
        return FoundCircuit(None, name, None, ends_rows(ends, total, search))
    if search.keep is not None:
        begin("random circuits")
        rows = circuit_rows(tested(testing, search.keep, search.random), total, float("nan"), search)
        return FoundCircuit(search.keep, name, None, rows)
    begin("ranking")
    screened = screen(subject, finding, rank, search)
    ranking = screened.ranking(by=search.ranked_by)
    begin("smallest circuit")
    base, source, batch = finding
    least = circuits.smallest(model, ranking, base, source, test, search.faithfulness, batch=batch)
    circuit, curve = screened.top(len(least), by=search.ranked_by), None
    on_finding_half = float(tested(finding, circuit, 0).frame["faithfulness"].iloc[0])
    if search.curve:
        begin("curve")
        rankings = {search.method: ranking, RANDOM_ORDER: shuffled(ranking, seed)}
        curve = curve_of(testing, rankings, seed=seed)
    begin("random circuits")
    rows = circuit_rows(tested(testing, circuit, search.random), total, on_finding_half, search)
    rows += curve_rows(curve, search) if curve is not None else []
    rows += member_rows(circuit, screened, search)
    return FoundCircuit(circuit, name, curve, rows, screened.notes)


def single_metric(subject: LoadedCheckpoint, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a checkpoint's task, as ``circuits`` takes it."""
    task = subject.task
    assert task is not None
    return lambda output, batch: {name: task.metrics(output, batch)[name]}


def shuffled(ranking: Sequence[str], seed: int) -> list[str]:
    import numpy as np

    return [ranking[at] for at in np.random.default_rng([seed, 5]).permutation(len(ranking))]


def screen(subject: LoadedCheckpoint, half: tuple[Any, Any, Any], metric: Any, search: Search) -> Any:
    """Returns the screening of all members on a half."""
    from circuits import patch

    exact: Any = "all" if search.method == "exact" else MEASURED
    options: dict[str, Any] = {"exact": exact, "batch": half[2], "seed": subject.seed, "rank": search.rank}
    options["method"] = "gradient" if search.method == "gradient" else "integrated"
    of_kind = patch.edges if search.kind == "edges" else patch.screen
    return of_kind(subject.model, *half[:2], metric, **options)


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
    random = frames[RANDOM_ORDER].set_index("size")["faithfulness"]
    clean = float(curve.baseline["clean"].iloc[0])
    shared = {"intervention": search.method, "engine": "naive"}
    for row in frames[search.method].to_dict("records"):
        about = {**shared, "variant": f"{TOP}{row['size']}", "n": row["n"]}
        at_random = float(random.get(row["size"], float("nan")))
        rows.append({**about, "metric": FAITHFULNESS, **with_interval(row, "faithfulness", at_random)})
        rows.append({**about, "metric": row["metric"], **with_interval(row, "value"), "baseline": clean})
    areas = curve.areas.set_index("ranking")
    for area in AREAS:
        of_area = with_interval(areas.loc[search.method], area, areas.loc[RANDOM_ORDER, area])
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


def explanations(frame: pandas.DataFrame, search: Search) -> list[str]:
    """Returns the notes below the table."""
    sentences = [
        "Faithfulness: (kept - source) / (clean - source) of the metric, on the half of the examples that did not find "
        "the circuit. Intervals: 95%, bootstrap over examples."
    ]
    if search.keep is None:
        sentences.append(
            f"The circuit: the smallest that has {search.faithfulness:g} on the half that finds it; others may do "
            "as well. random: as many members at random."
        )
    if frame.loc[frame["metric"] == SIZE, "value"].isna().any():
        sentences.append(
            "no gap: clean and source run do not surely differ on the finding half, so that there is nothing to "
            "be faithful to."
        )
    members = frame[~frame["variant"].str.startswith((TOP, CIRCUIT, CURVE))]
    if frame["ref"].nunique() == 1 and len(members):
        # A ranking by estimates is not in the order of the effects that were measured.
        largest = members.sort_values("effect", key=abs, ascending=False, kind="stable").head(LISTED)
        texts = ", ".join(f"{row['variant']} {signed(row['effect'])}" for row in largest.to_dict("records"))
        sentences.append(
            f"Largest effects on {members['metric'].iloc[0]} of taking one from the source: {texts}."
        )
    return sentences


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per size of a ranking's circuits; of several checkpoints, or of a circuit that was given, one for
    each.
    """
    import pandas

    refs = list(dict.fromkeys(frame["ref"]))
    if len(refs) == 1:
        return pandas.DataFrame(of_checkpoint(frame, alone=True))
    rows = [row for ref in refs for row in of_checkpoint(frame[frame["ref"] == ref], alone=False)]
    shown = pandas.DataFrame(rows)
    steps = " to ".join(str(step) for step in dict.fromkeys([shown["step"].iloc[0], shown["step"].iloc[-1]]))
    return shown.assign(checkpoint=shown["ref"], ref=f"{len(refs)} checkpoints", step=steps)


def of_checkpoint(frame: pandas.DataFrame, *, alone: bool) -> list[dict[str, Any]]:
    """Returns one checkpoint's rows for people: its circuit, and where it is alone other sizes of its ranking."""
    own = frame[frame["variant"] == CIRCUIT].set_index("metric")
    total, gap = own.loc[SIZE, "baseline"], own.loc[GAP]
    first: dict[Any, Any] = frame.iloc[0].to_dict()

    def row_of(rows: pandas.DataFrame, size: float, mark: str) -> dict[str, Any]:
        (metric,) = (
            name for name in rows.index if name not in (SIZE, GAP) and not name.startswith(FAITHFULNESS)
        )
        # Beside it random circuits of the same size: their mean, or of several checkpoints the best.
        column, beside = ("baseline", FAITHFULNESS) if alone else ("value", LARGEST_RANDOM)
        row = {**first, "metric": metric, "clean": rows.loc[metric, "baseline"], "size": size, "mark": mark}
        row |= {"total": total, "share": size / total, "gap": gap.to_dict()}
        row["beside"] = float(rows[column].get(beside, float("nan")))
        for end in ("", "_ci_low", "_ci_high"):
            row[f"value{end}"] = rows.loc[metric, f"value{end}"]
            row[f"{FAITHFULNESS}{end}"] = rows[f"value{end}"].get(FAITHFULNESS, float("nan"))
        return row

    found = [row_of(own, own.loc[SIZE, "value"], "the circuit")]
    for variant, part in frame.groupby("variant", sort=False) if alone else ():
        if str(variant).startswith(TOP):
            size = int(str(variant).removeprefix(TOP))
            if size != found[0]["size"] and 0 < size < total:
                found.append(row_of(part.set_index("metric"), size, ""))
    return sorted(found, key=lambda one: one["size"])


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of one circuit and its sizes, or of the circuits of several checkpoints."""
    metric = str(rows["metric"].iloc[0]) if rows["metric"].nunique() == 1 else "metric"
    shared = [
        Column("size", "size", lambda row: "–" if row["size"] != row["size"] else f"{row['size']:.0f}"),
        Column("share", "share", filled("share", ".1%")),
        Column("faithfulness [95% CI]", "faithfulness", faithfulness_text),
    ]
    if "checkpoint" not in rows and rows["size"].notna().all():
        value = Column(f"{metric} [95% CI]", "value", value_text)
        return [*shared, Column("random", "beside", filled("beside", share)), value, Column("", "mark")]
    several = [Column("checkpoint", "checkpoint")] if "checkpoint" in rows else []
    several += [Column("metric", "metric")] if metric == "metric" else []
    best = Column("best of random", "beside", filled("beside", share))
    gap = Column("gap [95% CI]", "clean", lambda row: value_text(row["gap"]))
    return [
        *several,
        Column(f"{metric}, clean", "clean"),
        *shared,
        *([best] if rows["beside"].notna().any() else []),
        *([gap] if rows["size"].isna().any() else []),
    ]


def faithfulness_text(row: Mapping[str, Any]) -> str:
    """Returns faithfulness with its interval; says where there is nothing to be faithful to."""
    values = [row[f"{FAITHFULNESS}{end}"] for end in ("", "_ci_low", "_ci_high")]
    if values[0] != values[0]:
        return "no gap"
    value, low, high = map(share, values)
    return value if low == share(float("nan")) else f"{value} [{low}, {high}]"


def share(value: float) -> str:
    """Returns a faithfulness to three decimals: of a circuit that does nothing only rounding is left."""
    return "–" if value != value else f"{round(value, 3) + 0.0:.3f}"


def over_steps(frame: pandas.DataFrame, metric: str) -> plotly.graph_objects.Figure:
    """Returns three panels over steps, a line per run: share of the members, faithfulness, and the clean metric."""
    own = frame[frame["variant"] == CIRCUIT].sort_values("step", kind="stable")
    sizes, clean = own[own["metric"] == SIZE], own[own["metric"] == metric]
    shown = {
        "share of members": (sizes.assign(share=sizes["value"] / sizes["baseline"]), "share"),
        FAITHFULNESS: (own[own["metric"] == FAITHFULNESS], "value"),
        f"{metric}, clean": (clean, "baseline"),
    }
    panels = []
    for name, (rows, column) in shown.items():
        groups = rows.groupby("run", sort=False, dropna=False)
        series = {str(run): of_rows(part, "step", column) for run, part in groups}
        panels.append(lines(series, y=name, bars=True, height=200))
    return draw(panels)


def caption_of(circuit: Circuit) -> str:
    """Returns the caption of a circuit's picture."""
    from circuits.figures.circuit_graph import DRAWN as EDGES

    if circuit.kind == "nodes":
        return "Hover for the effects of nodes, estimated or measured."
    caption = "Lines are as wide as effects, estimated or measured; hover for them. The legend hides edges of a kind."
    more = f" Drawn are the {EDGES} largest of {len(circuit)} edges." if len(circuit) > EDGES else ""
    return caption + more


def figures(result: Result) -> list[Figure]:
    """Returns sizes over steps, where there are several checkpoints; and curves and pictures of the last two."""
    drawn, circuits, curves, metrics = [], *(result.data[name] for name in ("circuits", "curves", "metrics"))
    if len(metrics) > 1 or not circuits:
        figure = over_steps(result.frame, next(iter(metrics.values())))
        drawn.append(Figure(figure, "The smallest circuit over training", OVER_STEPS))
    for ref in list(circuits)[-DRAWN:]:
        if ref in curves:
            drawn.append(Figure(curves[ref].plot(), f"Faithfulness of growing circuits, {ref}", GROWING))
        drawn.append(Figure(circuits[ref].plot(), f"The circuit, {ref}", caption_of(circuits[ref])))
    return drawn
