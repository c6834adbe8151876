"""Finds the smallest circuit that is as faithful as asked, at each checkpoint, and tests it on other examples.

The variant ``circuit`` has the rows ``size`` (``baseline``: of how many), ``faithfulness`` (``baseline``: mean of the
random circuits), ``faithfulness, finding half``, ``faithfulness, best of random``, the metric where it is kept
(``baseline``: of the unedited model), and ``gap``, the metric of the clean minus that of the source run; where its
interval on the finding half holds 0, there is no circuit, and ``size`` is empty. ``top 12``: the first 12 of the
ranking; ``baseline`` of ``faithfulness`` are 12 at random. ``curve``: the areas ``CPR`` and ``CMD``. What is known of
the effects of members is in ``data["circuits"]``, and in the file that ``write`` names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from circuits.circuit import read
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_file
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, Refs, resolve_refs, source_batch
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import check_choice, check_draws, parse_named_positions
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, cell_writer, experiment, number_columns, value_text
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from circuits.circuit import Circuit, Curve
    from interp_tasks.checkpoints import ResolvedCheckpoint
    from tasks import Batch, Metric

#: Examples where nothing is said: half of them find, half test; and the fewest, two of each.
SAMPLES, FEWEST = 128, 4
#: Sources of a task that are taken where nothing is said: of prompts theirs, or other values, all else alike.
SOURCES = ("corrupted", "values")
#: Members whose effects are measured, not only estimated, where the method itself measures none.
MEASURED = 10
#: What rows are about: the circuit, the first so many of the ranking, or one member by its name; and a ranking.
CIRCUIT, TOP, CURVE = "circuit", "top ", "curve"
#: Metrics of the circuit's row, and of curves.
SIZE, FAITHFULNESS, GAP, AREAS = "size", "faithfulness", "gap", ("CPR", "CMD")
ON_FINDING_HALF, LARGEST_RANDOM = "faithfulness, finding half", "faithfulness, best of random"
#: The ranking that a curve is compared with.
RANDOM_ORDER = "random"
#: Checkpoints whose circuits are drawn.
DRAWN = 2
#: Captions of figures.
OVER_STEPS = (
    "Size, faithfulness on the half that did not find the circuit, and the metric, with 95% intervals. Open, or the "
    "line of the unedited: all members, the mean of random circuits, the whole model. No point: there is no gap."
)
GROWING = "Kept on the half of the examples that did not find it, beside as many members at random."
FAITHFULNESS_NOTE = (
    "Faithfulness: (kept - source) / (clean - source) of the metric, on the half of the examples that did not find "
    "the circuit. Intervals: 95%, bootstrap over examples."
)
NO_GAP = (
    "no gap: clean and source run do not surely differ on the finding half, so that there is nothing to "
    "be faithful to."
)
#: Members that the notes name.
LISTED = 5
ENDS = ("", "_ci_low", "_ci_high")
SOURCE_HELP = "What cut edges hear: resample, or a name of the task's."
SOURCE = typer.Option("--source", metavar="SOURCE", help=SOURCE_HELP, show_default="values, or resample")
METRIC = typer.Option("--metric", metavar="NAME", help="What is to be faithful.", show_default="the task's")
KIND = typer.Option("--kind", metavar="KIND", help="edges or nodes.")
METHOD = typer.Option("--method", metavar="METHOD", help="Ranking: gradient, integrated, gim or exact.")
SPANS = typer.Option("--spans", metavar="NAME=0,1;...", help="Find each edge at named positions alone.")
RANK = typer.Option("--rank", metavar="RANK", help="By the mean effect, or by the mean size of effects.")
FAITHFULNESS_OPTION = typer.Option("--faithfulness", metavar="SHARE", help="What the circuit has at least.")
RANDOM = typer.Option("--random", help="Random circuits of its size to compare with.")
CURVE_OPTION = typer.Option("--curve/--no-curve", help="Measure faithfulness over sizes too.")
KEEP = typer.Option("--keep", metavar="FILE.json", help="Test this circuit instead of finding one.")
WRITE = typer.Option("--write", metavar="FILE.json", help="Write the circuit, for --keep and circuit.read.")


SAYS = {"source": None, "metric": None, "kind": "edges", "method": None, "rank": "mean", "faithfulness": 0.9}


@experiment(says=SAYS, samples=SAMPLES)
def circuit(
    refs: Refs,
    source: Annotated[str | None, SOURCE] = None,
    metric: Annotated[str | None, METRIC] = None,
    kind: Annotated[str, KIND] = "edges",
    method: Annotated[str, METHOD] = "integrated",
    spans: Annotated[str | Mapping[str, Iterable[int]] | None, SPANS, str | None] = None,
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
    circuit; the other half tests it, beside random ones of its size. Faithfulness: 0 as on the source, 1 as the model.

    Args:
        source: what edges outside a circuit hear: ``"resample"`` (another example of the same half), or a name that the
            task declares in ``attention_moves(batch, seed)`` or ``patch_sources(batch)`` (``"values"``: another matrix
            under the same mask; ``"negated"``, ``"shifted"``). Default: ``"values"`` where there is one.
        metric: what faithfulness is of, and what ranks; of one without a gradient, such as an accuracy, the task's
            first that has one ranks.
        kind: ``"edges"`` or ``"nodes"``.
        method: what ranks members: effects by ``"gradient"``, ``"integrated"`` or (edges) ``"gim"`` gradients, or
            ``"exact"`` ones.
        spans: positions by name, counted in each prompt's own tokens (``"noun=6,7;end=-1"``, or a dict): each edge is
            ranked, and kept, at each of them alone. Default: at all positions.
        rank: by the size of the ``"mean"`` effect over examples, or by their mean ``"size"``, where signs differ.
        faithfulness: what the circuit has at least, on the half it is found on.
        random: how many random circuits of its size.
        curve: whether faithfulness over about 20 sizes is measured, on the half that tests, beside a random order.
        keep: the file of a circuit that is tested instead, on the half that tests.
        write: a file for the circuit of the one checkpoint, as ``circuits.circuit.read`` reads it.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    kept = None if keep is None else read(keep)
    kind = kept.kind if kept else kind
    search = CircuitSearch(
        source, metric, kind, method, parse_named_positions(spans), rank, faithfulness, random, curve, kept
    )
    examples = Examples.of(options)
    found = resolve_refs(refs, examples)
    if write is not None:
        check_writable_file(Path(write))
        if len(found) > 1 or keep is not None:
            raise UserError(f"--write {write}: the circuit found at one checkpoint; name one, without --keep")
    result = find_circuits(found, search, options)
    if write is not None:
        if not result.data["circuits"]:
            raise UserError(f"--write {write}: there is no circuit, since clean and source run do not differ")
        Path(write).parent.mkdir(parents=True, exist_ok=True)
        next(iter(result.data["circuits"].values())).write(write)
    return result


@dataclass(frozen=True)
class CircuitSearch:
    """How circuits are found and tested; the fields are the options of :func:`circuit`, ``keep`` the circuit read."""

    source: str | None = None
    metric: str | None = None
    kind: str = "edges"
    method: str = "integrated"
    spans: Mapping[str, Iterable[int]] = field(default_factory=dict)
    rank: str = "mean"
    faithfulness: float = 0.9
    random: int = 99
    curve: bool = True
    keep: Circuit | None = None

    def __post_init__(self) -> None:
        """Refuses what no checkpoint can be asked for."""
        check_choice("--kind", self.kind, ("edges", "nodes"))
        gim = ("gim",) if self.kind == "edges" else ()
        check_choice("--method", self.method, ("gradient", "integrated", *gim, "exact"))
        check_choice("--rank", self.rank, ("mean", "size"))
        if self.spans and (self.kind == "nodes" or self.keep is not None):
            raise UserError(
                "--spans: it is edges that are found at positions; leave out --kind nodes and --keep"
            )
        if not 0 < self.faithfulness <= 1:
            raise UserError(f"--faithfulness {self.faithfulness:g}: above 0 and at most 1")
        check_draws(self.random, "--random")

    def check_subject(self, subject: LoadedCheckpoint) -> None:
        """Refuses what a checkpoint's task or examples do not have."""
        if len(subject.tokens) < FEWEST:
            raise UserError(
                f"{len(subject.tokens)} examples: one half finds the circuit and the other tests it; "
                f"give --samples {FEWEST} or more"
            )
        source_batch(subject, self.source, SOURCES)

    def size_of(self, circuit: Circuit) -> int:
        """Returns how many members a circuit has; at named positions each counts once for each."""
        at = [positions for _, (positions, _) in circuit.members]
        return sum({*span} <= one for one in at for span in self.spans.values()) if self.spans else len(at)

    @property
    def method_name(self) -> str:
        """The method that found a circuit; of one that was given, that."""
        return "given" if self.keep is not None else self.method

    @property
    def ranked_by(self) -> str:
        """The size that members are ranked by: the exact effect, where all are measured, or the estimate."""
        return "effect" if self.method == "exact" else "estimate"

    def describe(self) -> dict[str, Any]:
        return {
            **vars(self),
            "keep": None if self.keep is None else self.keep.sha256,
            "method": self.method_name,
        }


def find_circuits(refs: Sequence[ResolvedCheckpoint], search: CircuitSearch, options: Options) -> Result:
    """Finds, or tests, the circuit of each checkpoint."""
    found: dict[str, FoundCircuit] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Sequence[Row]:
        with warnings.catch_warnings():
            # Our table says where there may be no gap.
            warnings.filterwarnings("ignore", r"circuit\.\w+: .*: the gap between clean and source run is")
            one = found[str(subject.labels["ref"])] = find_circuit(subject, search)
        return one.rows

    config = search.describe()
    result = measure("circuit", refs, options, measure_checkpoint, config=config, check=search.check_subject)
    data = {
        "circuits": {ref: each.circuit for ref, each in found.items() if each.circuit is not None},
        "curves": {ref: each.curve for ref, each in found.items() if each.curve is not None},
        "metrics": {ref: each.metric for ref, each in found.items()},
    }
    return replace(result, notes=tuple(circuit_notes([*found.values()], search)), data=data)


def split_halves(subject: LoadedCheckpoint, source: str | None) -> list[tuple[Any, Any, Batch | None]]:
    """Returns tokens, those of the source and the task's examples, of the half that finds and of that which tests."""
    from circuits.interventions.replacements import derangement

    n, declared = len(subject.tokens) // 2, source_batch(subject, source, SOURCES)
    found = []
    for at, rows in enumerate((slice(0, n), slice(n, len(subject.tokens)))):
        tokens = subject.tokens[rows]
        if declared is None:
            given = tokens[derangement(len(tokens), subject.seed + at).to(tokens.device)]
        else:
            given = declared.tokens[rows]
        found.append((tokens, given, None if subject.batch is None else subject.batch[rows]))
    return found


def metrics_to_test_and_rank(subject: LoadedCheckpoint, metric: str | None) -> tuple[str | None, str | None]:
    """Returns the metric that faithfulness is of, and one with a gradient that ranks; ``None`` without a task.

    By default the first is the task's own; it also ranks, unless it has no gradient, as an accuracy; then the first
    that has one does.
    """
    if subject.task is None:
        if metric is not None:
            raise UserError(f"--metric {metric}: tokens of your own have no task with metrics")
        return None, None
    import torch

    from circuits import run

    assert subject.batch is not None
    with torch.no_grad():
        output = run(subject.model, subject.tokens[:2])
    values = subject.task.metrics(output.clone().requires_grad_(), subject.batch[:2])
    own = subject.task.drop_metric.name
    metric = check_choice("--metric", metric or (own if own in values else next(iter(values))), [*values])
    # Effects are estimated from gradients.
    parts = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
    smooth = [name for name, value in parts.items() if value.requires_grad]
    if not smooth:
        raise UserError(f"{subject.name}: no metric of task {subject.task.name} has a gradient to rank by")
    return metric, metric if metric in smooth else smooth[0]


class FoundCircuit(NamedTuple):
    """The circuit of one checkpoint, ``None`` where clean and source run do not differ, the metric, the table's rows,
    the curve where it was measured, what the ranking may miss, and the effects that are known, by name of the member.
    """

    circuit: Circuit | None
    metric: str
    rows: Sequence[Row]
    curve: Curve | None = None
    notes: Sequence[str] = ()
    effects: pandas.DataFrame | None = None


def find_circuit(subject: LoadedCheckpoint, search: CircuitSearch) -> FoundCircuit:
    """Finds the smallest circuit on the first half of a checkpoint's examples and tests it on the second."""
    import numpy as np

    from circuits import circuit as circuits
    from circuits import patch

    model, seed = subject.model, subject.seed
    (base, source, batch), testing = split_halves(subject, search.source)
    names = metrics_to_test_and_rank(subject, search.metric)
    test, rank = (None if name is None else single_metric(subject.task, name) for name in names)

    def evaluate_circuit(circuit: Circuit, random: int, on: tuple[Any, Any, Any] = testing) -> Any:
        controls: dict[str, Any] = {"subsets": 0, "minimality": False, "seed": seed, "random": random}
        return circuits.evaluate(model, circuit, *on[:2], test, batch=on[2], **controls)

    finding, empty = (base, source, batch), circuits.nodes([], model)
    gap = evaluate_circuit(empty, 0, finding).baseline.iloc[0]
    # Where a source is of the run's length, position embeddings are the same in both runs.
    total = sum(not name.startswith("pos_embed") for name in circuits.full(model, search.kind))
    total *= len(search.spans) or 1
    metric = str(gap["metric"])
    if not (gap["gap_ci_low"] > 0 or gap["gap_ci_high"] < 0):
        return FoundCircuit(None, metric, circuit_rows(evaluate_circuit(empty, 0), total, search, None))
    if search.keep is not None:
        rows = circuit_rows(evaluate_circuit(search.keep, search.random), total, search, search.keep)
        return FoundCircuit(search.keep, metric, rows)
    of_kind = patch.edges if search.kind == "edges" else patch.screen
    options: dict[str, Any] = {"exact": "all" if search.method == "exact" else MEASURED, "rank": search.rank}
    options["method"] = "integrated" if search.method == "exact" else search.method
    options |= {"spans": search.spans} if search.spans else {}
    screened = of_kind(model, base, source, rank, batch=batch, seed=seed, **options)
    ranking, curve = screened.ranking(by=search.ranked_by), None
    least = circuits.smallest(model, ranking, base, source, test, search.faithfulness, batch=batch)
    circuit = screened.top(search.size_of(least), by=search.ranked_by)
    on_finding_half = float(evaluate_circuit(circuit, 0, finding).frame["faithfulness"].iloc[0])
    if search.curve:
        order = np.random.default_rng([seed, 5]).permutation(len(ranking))
        rankings = {search.method: ranking, RANDOM_ORDER: [ranking[at] for at in order]}
        curve = circuits.curve(model, rankings, *testing[:2], test, batch=testing[2], seed=seed)
    rows = circuit_rows(evaluate_circuit(circuit, search.random), total, search, circuit, on_finding_half)
    rows += curve_rows(curve, search.method) if curve is not None else []
    notes = list(screened.notes)
    if on_finding_half < search.faithfulness:
        notes.append(
            f"At these positions all edges together have {on_finding_half:.3f} on the half that finds."
        )
    effects = screened.frame.set_index("variant") if search.spans else circuit.frame.set_index("name")
    return FoundCircuit(circuit, metric, rows, curve, notes, effects)


def single_metric(task: Any, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a task, as ``circuits`` takes it."""
    return lambda output, batch: {name: task.metrics(output, batch)[name]}


def interval_columns(row: Any, name: str, baseline: float | None = None) -> Row:
    """Returns the columns of a number that a table of ``circuits`` has with its interval."""
    return number_columns(row[name], (row[f"{name}_ci_low"], row[f"{name}_ci_high"]), baseline)


def circuit_rows(
    result: Any,
    total_members: int,
    search: CircuitSearch,
    circuit: Circuit | None,
    on_finding_half: float | None = None,
) -> list[Row]:
    """Returns the rows of a circuit: its size, faithfulness beside random circuits, metric and gap.

    Without a circuit they say how clean and source run differ.
    """
    ends, row = result.baseline.iloc[0], result.frame.iloc[0]
    about = {"variant": CIRCUIT, "intervention": search.method_name, "n": int(ends["n"]), "engine": "naive"}
    size = {**about, "metric": SIZE, "value": math.nan, "baseline": float(total_members)}
    gap = {**about, "metric": GAP, **interval_columns(ends, "gap")}
    value = {**about, "metric": str(ends["metric"]), "value": math.nan, "baseline": ends["clean"]}
    if circuit is None:
        return [size, gap, value]
    rows = [
        {**size, "value": float(search.size_of(circuit))},
        {**about, "metric": FAITHFULNESS, **interval_columns(row, "faithfulness", row["random_mean"])},
        {**value, **interval_columns(row, "value")},
        gap,
        {**about, "metric": LARGEST_RANDOM, "value": row["random_high"]},
    ]
    if on_finding_half is not None:
        rows.append({**about, "metric": ON_FINDING_HALF, "value": on_finding_half})
    return rows


def curve_rows(curve: Curve, method: str) -> list[Row]:
    """Returns the rows of every size, beside as many members in a random order, and the areas."""
    rows: list[Row] = []
    frames = dict(iter(curve.frame.groupby("ranking", sort=False)))
    random = frames[RANDOM_ORDER].set_index("size")["faithfulness"]
    clean = float(curve.baseline["clean"].iloc[0])
    shared = {"intervention": method, "engine": "naive"}
    for row in frames[method].to_dict("records"):
        about = {**shared, "variant": f"{TOP}{row['size']}", "n": row["n"]}
        at_random = float(random.get(row["size"], math.nan))
        rows.append({**about, "metric": FAITHFULNESS, **interval_columns(row, "faithfulness", at_random)})
        rows.append({**about, "metric": row["metric"], **interval_columns(row, "value"), "baseline": clean})
    areas = curve.areas.set_index("ranking")
    for area in AREAS:
        of_area = interval_columns(areas.loc[method], area, areas.loc[RANDOM_ORDER, area])
        rows.append({**shared, "variant": CURVE, "n": int(curve.settings["n"]), "metric": area, **of_area})
    return rows


def circuit_notes(found: Sequence[FoundCircuit], search: CircuitSearch) -> Iterator[str]:
    """Yields the notes below the table."""
    yield FAITHFULNESS_NOTE
    if search.keep is None:
        yield (
            f"The circuit: the smallest that has {search.faithfulness:g} on the half that finds it; others may do "
            "as well. random: as many members at random."
        )
    if any(each.circuit is None for each in found):
        yield NO_GAP
    if len(found) == 1 and (known := found[0].effects) is not None:
        # A ranking by estimates is not in the order of the effects that were measured.
        effects = known["effect"].fillna(known["estimate"])
        largest = effects.sort_values(key=abs, ascending=False, kind="stable").head(LISTED)
        texts = ", ".join(f"{name} {number(effect, 3, sign=True)}" for name, effect in largest.items())
        yield f"Largest effects on {known['metric'].iloc[0]} of taking one from the source: {texts}."
    yield from dict.fromkeys(
        note.replace('rank="size"', "--rank size") for each in found for note in each.notes
    )


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the circuit of each checkpoint; of one that is alone other sizes of its ranking, too."""
    import pandas

    frame = frame[frame["variant"].eq(CIRCUIT) | frame["variant"].str.startswith(TOP)]
    refs = list(dict.fromkeys(frame["ref"]))
    rows: list[dict[str, Any]] = []
    for ref in refs:
        parts = dict(iter(frame[frame["ref"] == ref].groupby("variant", sort=False)))
        own = parts.pop(CIRCUIT).set_index("metric")
        total, sizes = own.loc[SIZE, "baseline"], {own.loc[SIZE, "value"]: own}
        for variant, part in parts.items() if len(refs) == 1 else ():
            sizes.setdefault(float(str(variant).removeprefix(TOP)), part.set_index("metric"))
        for size, part in sorted(sizes.items(), key=lambda item: item[0]):
            if 0 < size < total or part is own:
                mark = "the circuit" if part is own else ""
                row = {"share": size / total, "gap": own.loc[GAP], "mark": mark}
                rows.append({**circuit_view_row(part, len(refs) == 1), "size": size, **row})
    shown = pandas.DataFrame(rows)
    if len(refs) == 1:
        return shown
    steps = " to ".join(str(step) for step in dict.fromkeys([shown["step"].iloc[0], shown["step"].iloc[-1]]))
    return shown.assign(checkpoint=shown["ref"], ref=f"{len(refs)} checkpoints", step=steps)


def circuit_view_row(part: pandas.DataFrame, alone: bool) -> dict[str, Any]:
    """Returns what people see of a circuit: the metric, faithfulness, and those of random circuits of its size."""
    (metric,) = (name for name in part.index if name not in (SIZE, GAP) and not name.startswith(FAITHFULNESS))
    # Their mean, or of several checkpoints the best.
    column, beside = ("baseline", FAITHFULNESS) if alone else ("value", LARGEST_RANDOM)
    row = {**part.loc[metric], "metric": metric, "clean": part.loc[metric, "baseline"]}
    row["beside"] = float(part[column].get(beside, math.nan))
    return row | {f"{FAITHFULNESS}{end}": part[f"value{end}"].get(FAITHFULNESS, math.nan) for end in ENDS}


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of one circuit and its sizes, or of the circuits of several checkpoints."""
    metric = str(rows["metric"].iloc[0]) if rows["metric"].nunique() == 1 else "metric"
    shared = [
        Column("size", "size", lambda row: "–" if row["size"] != row["size"] else f"{row['size']:.0f}"),
        Column("share", "share", cell_writer("share", ".1%")),
        Column("faithfulness [95% CI]", "faithfulness", faithfulness_text),
    ]
    beside = Column("random", "beside", cell_writer("beside", three_decimals))
    if "checkpoint" not in rows and rows["size"].notna().all():
        return [*shared, beside, Column(f"{metric} [95% CI]", "value", value_text), Column("", "mark")]
    several = [Column("checkpoint", "checkpoint")] if "checkpoint" in rows else []
    several += [Column("metric", "metric")] if metric == "metric" else []
    columns = [*several, Column(f"{metric}, clean", "clean"), *shared]
    columns += [replace(beside, header="best of random")] if rows["beside"].notna().any() else []
    gap = Column("gap [95% CI]", "clean", lambda row: value_text(row["gap"]))
    return [*columns, gap] if rows["size"].isna().any() else columns


def faithfulness_text(row: Mapping[str, Any]) -> str:
    """Returns faithfulness with its interval; says where there is nothing to be faithful to."""
    value, low, high = (row[f"{FAITHFULNESS}{end}"] for end in ENDS)
    if value != value:
        return "no gap"
    return (
        three_decimals(value)
        if low != low
        else f"{three_decimals(value)} [{three_decimals(low)}, {three_decimals(high)}]"
    )


def three_decimals(value: float) -> str:
    """Returns a faithfulness to three decimals: of a circuit that does nothing only rounding is left."""
    return "–" if value != value else f"{round(value, 3) + 0.0:.3f}"


def figures(result: Result) -> list[Figure]:
    """Returns sizes over steps, where there are several checkpoints; and curves and pictures of the last two."""
    from circuits.figures.circuit_graph import DRAWN as EDGES
    from interp_tasks.measurement.result_table_plots import values_figure

    drawn, circuits, curves, metrics = [], *(result.data[name] for name in ("circuits", "curves", "metrics"))
    if len(metrics) > 1 or not circuits:
        shown = result.frame["metric"].isin([SIZE, FAITHFULNESS, *metrics.values()])
        over_steps = values_figure(result.frame[shown & (result.frame["variant"] == CIRCUIT)])
        drawn.append(Figure(over_steps, "The smallest circuit over training", OVER_STEPS))
    for ref in list(circuits)[-DRAWN:]:
        if ref in curves:
            drawn.append(Figure(curves[ref].plot(), f"Faithfulness of growing circuits, {ref}", GROWING))
        one = circuits[ref]
        caption = f"Hover for the effects of {one.kind}, estimated or measured."
        if one.kind == "edges" and len(one) > EDGES:
            caption += f" Drawn are the {EDGES} largest of {len(one)} edges."
        drawn.append(Figure(one.plot(), f"The circuit, {ref}", caption))
    return drawn
