"""Finds the smallest circuit that is as faithful as asked, at each checkpoint, and tests it on other examples.

The variant ``circuit`` has the rows ``size`` (``baseline``: of how many), ``faithfulness`` (``baseline``: mean of the
random circuits), ``faithfulness, finding half``, ``faithfulness, best of random``, the metric where it is kept
(``baseline``: of the unedited model), and ``gap``, the metric of the clean minus that of the source run; where its
interval on the finding half holds 0, there is no circuit, and ``size`` is empty. ``top 12``: the first 12 of the
ranking; ``baseline`` of ``faithfulness`` are 12 at random. ``curve``: the areas ``CPR`` and ``CMD``. And a row per
member with its ``effect``: exact where ``engine`` says so, else the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import curve, of_rows
from interp_tasks.errors import UserError
from interp_tasks.experiments._circuit.search import (
    CIRCUIT,
    CURVE,
    FAITHFULNESS,
    GAP,
    LARGEST_RANDOM,
    SIZE,
    TOP,
    FoundCircuit,
    Search,
    find_circuit,
    how_found,
)
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, resolve_refs
from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column, Figure, check_writable_file, number, with_interval

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from circuits.circuit import Circuit
    from circuits.circuit._graph import Graph

#: Examples where nothing is place: half of them find, half test.
SAMPLES = 128
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
#: What stands beside the smallest circuit that is faithful enough.
MARK = "the circuit"
SOURCE = typer.Option(
    "--source",
    metavar="SOURCE",
    help="What cut edges hear: resample, or a name of the task's.",
    show_default="values, or resample",
)
METRIC = typer.Option(
    "--metric", metavar="NAME", help="What is to be faithful.", show_default="the task's own"
)
RANK_BY = typer.Option(
    "--rank-by", metavar="NAME", help="Metric that ranks; has a gradient.", show_default="as --metric"
)
KIND = typer.Option("--kind", metavar="KIND", help="edges or nodes.", show_default="edges")
METHOD = typer.Option(
    "--method", metavar="METHOD", help="Ranking: gradient, integrated or exact.", show_default="integrated"
)
RANK = typer.Option(
    "--rank", metavar="RANK", help="By the mean effect, or by the mean size of effects.", show_default="mean"
)
FAITHFULNESS_OPTION = typer.Option(
    "--faithfulness", metavar="SHARE", help="What the circuit has at least.", show_default="0.9"
)
RANDOM = typer.Option("--random", help="Random circuits of its size to compare with.")
CURVE_OPTION = typer.Option(
    "--curve/--no-curve", help="Measure faithfulness over sizes too.", show_default="curve"
)
KEEP = typer.Option("--keep", metavar="FILE.json", help="Test this circuit instead of finding one.")
WRITE = typer.Option(
    "--write", metavar="FILE.json", help="Write the circuit there, for --keep and circuit.read."
)


@experiment(
    "Intervene",
    says={
        "source": None,
        "metric": None,
        "rank_by": None,
        "kind": "edges",
        "method": None,
        "rank": "mean",
        "faithfulness": 0.9,
    },
    samples=SAMPLES,
)
def circuit(
    refs: str | Sequence[str],
    source: Annotated[str | None, SOURCE] = None,
    metric: Annotated[str | None, METRIC] = None,
    rank_by: Annotated[str | None, RANK_BY] = None,
    kind: Annotated[str | None, KIND] = None,
    method: Annotated[str | None, METHOD] = None,
    rank: Annotated[str | None, RANK] = None,
    faithfulness: Annotated[float | None, FAITHFULNESS_OPTION] = None,
    random: Annotated[int, RANDOM] = 20,
    curve: Annotated[bool | None, CURVE_OPTION] = None,
    keep: Annotated[str | Path | None, KEEP, str | None] = None,
    write: Annotated[str | Path | None, WRITE, str | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Find the smallest circuit that does what the model does, and test it on other examples.

    All edges outside a circuit carry the source's values. One half of the examples ranks all edges and finds the
    smallest circuit of --faithfulness; the other half tests it, beside random circuits of its size. Faithfulness is 0
    as on the source, 1 as the whole model.

    Args:
        refs: one or several REFs; all see the same examples.
        source: what edges outside a circuit hear: ``"resample"`` (another example of the same half), or a name that the
            task declares in ``attention_moves(batch, seed)`` (``"values"``, of matrix completion: another matrix under
            the same mask; ``"mask"``) or ``patch_sources(batch)`` (``"negated"``; of modular arithmetic ``"shifted"``,
            ``"swapped"``). Default: ``"values"`` where there is one, else ``"resample"``.
        metric: the metric that faithfulness is of.
        rank_by: the metric whose effects rank members. Default: the same, or the task's first that has a gradient.
        kind: ``"edges"`` (default) or ``"nodes"``.
        method: members are ranked by estimates of their effects, from the ``"gradient"`` or ``"integrated"`` gradients
            (default), or by ``"exact"`` effects, one forward pass each.
        rank: by the size of the ``"mean"`` effect over examples (default), or by the mean ``"size"``, where signs
            differ between examples.
        faithfulness: what the circuit has at least, on the half it is found on. Default: 0.9.
        random: random circuits of its size.
        curve: whether faithfulness over about 20 sizes is measured, on the half that tests, beside a random order.
            Default: yes.
        keep: the file of a circuit that is tested instead, on the half that tests; options that say how one is found
            are refused beside it.
        write: a file for the circuit of the one checkpoint, as ``circuits.circuit.read`` reads it.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    finding = {"rank_by": rank_by, "kind": kind, "method": method, "rank": rank, "curve": curve}
    search = read_search(source, metric, random, finding | {"faithfulness": faithfulness}, keep, write)
    examples = Examples.of(options)
    refs = resolve_refs(refs, examples)
    if write is not None and len(refs.named) > 1:
        raise UserError(
            f"--write {write}: one circuit, and --ckpt names {len(refs.named)} checkpoints; name one"
        )
    if search.keep is not None:
        for named in refs.named:
            sizes = SimpleNamespace(**named.resolved.meta["model"])
            check_circuit(search.keep, sizes, f"--keep {keep} on {named.resolved.ref}")
    samples = options.get("samples") or (SAMPLES if examples.tokens is None else None)
    return found_circuits(refs, search, write, {**options, "samples": samples})


def read_search(
    source: str | None,
    metric: str | None,
    random: int,
    finding: Mapping[str, Any],
    keep: str | Path | None,
    write: str | Path | None,
) -> Search:
    """Returns what is sought, or tested where a circuit is given; refuses what does not go together.

    Raises:
        UserError: in one line.
    """
    finding = {name: value for name, value in finding.items() if value is not None}
    if keep is not None:
        check_given(keep, finding, write)
    search = Search(source, metric, random=random, **finding)
    search.check()
    if write is not None:
        check_writable_file(Path(write))
    if keep is None:
        return search
    kept = read_circuit(Path(keep))
    return replace(search, kind=kept.kind, keep=kept)


def found_circuits(refs: Any, search: Search, write: str | Path | None, options: Options) -> Result:
    """Finds, or tests, the circuit of each checkpoint, and writes it to a file where one is named."""
    found: dict[str, FoundCircuit] = {}
    progress, total = options.get("progress"), len(refs.named)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        ref = str(subject.labels["ref"])

        def report_stage(stage: str) -> None:
            if progress is not None:
                progress(min(len(found), total - 1), total, f"{ref}: {stage}")

        found[ref] = find_circuit(subject, search, report_stage)
        circuit = found[ref].circuit
        done = {} if circuit is None else {"circuit": {"size": len(circuit), "sha256": circuit.sha256}}
        return Measured(pandas.DataFrame(found[ref].rows), done)

    config = search.describe() | {"method": how_found(search)}
    result = measure("circuit", refs, options, measure_checkpoint, config=config, check=search.check_planned)
    circuits = {ref: each.circuit for ref, each in found.items() if each.circuit is not None}
    if write is not None:
        for each in circuits.values():
            # As for the files of --out; what could not be made was refused before anything was measured.
            Path(write).parent.mkdir(parents=True, exist_ok=True)
            each.write(write)
        if not circuits:
            raise UserError(f"--write {write}: there is no circuit, since clean and source run do not differ")
    data = {
        "circuits": circuits,
        "curves": {ref: each.curve for ref, each in found.items() if each.curve is not None},
        "metrics": {ref: each.metric for ref, each in found.items()},
    }
    return replace(result, notes=notes(found, search), data=data)


def check_given(keep: str | Path, finding: Mapping[str, Any], write: str | Path | None) -> None:
    """Refuses what says how a circuit is found, or where to write it, beside one that is given.

    Raises:
        UserError: in one line.
    """
    # Of a circuit that is given there is no curve anyway.
    options = [f"--{name.replace('_', '-')}" for name, value in finding.items() if value is not False]
    if options:
        raise UserError(
            f"{', '.join(options)} with --keep {keep}: the circuit is given, and none is sought; leave out one "
            "or the other"
        )
    if write is not None:
        raise UserError(f"--write {write} with --keep: nothing is found that could be written")
    check_file(Path(keep), "--keep")


def notes(found: Mapping[str, FoundCircuit], search: Search) -> tuple[str, ...]:
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
    if any(each.circuit is None for each in found.values()):
        sentences.append(
            "no gap: clean and source run do not surely differ on the finding half, so that there is nothing to "
            "be faithful to."
        )
    if len(found) == 1 and search.keep is None:
        (only,) = found.values()
        if only.circuit is not None:
            sentences.append(largest(only))
    sentences += dict.fromkeys(
        note.replace('rank="size"', "--rank size") for each in found.values() for note in each.notes
    )
    return tuple(sentences)


def largest(found: FoundCircuit) -> str:
    """Names the members with the largest effects."""
    from interp_tasks.pages import signed

    rows = [row for row in found.rows if not str(row["variant"]).startswith((TOP, CIRCUIT, CURVE))]
    # A ranking by estimates is not in the order of the effects that were measured.
    rows.sort(key=lambda row: -abs(row["effect"]))
    texts = [f"{row['variant']} {signed(row['effect'])}" for row in rows[:LISTED]]
    return f"Largest effects on {rows[0]['metric']} of taking one from the source: {', '.join(texts)}."


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per size of a ranking's circuits; of several checkpoints, or of a circuit that was given, one for
    each.
    """
    import pandas

    refs = list(dict.fromkeys(frame["ref"]))
    rows = [row for ref in refs for row in of_checkpoint(frame[frame["ref"] == ref], alone=len(refs) == 1)]
    shown = pandas.DataFrame(rows)
    if len(refs) == 1:
        return shown
    steps = [str(step) for step in dict.fromkeys(shown["step"])]
    return shown.assign(
        checkpoint=shown["ref"],
        ref=f"{len(refs)} checkpoints",
        step=f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0],
    )


def of_checkpoint(frame: pandas.DataFrame, *, alone: bool) -> list[dict[str, Any]]:
    """Returns one checkpoint's rows for people: its circuit, and where it is alone other sizes of its ranking."""
    own = frame[frame["variant"] == CIRCUIT].set_index("metric")
    total = own.loc[SIZE, "baseline"]
    first: dict[Any, Any] = frame.iloc[0].to_dict()
    row = {
        **first,
        **numbers(own),
        "size": own.loc[SIZE, "value"],
        "total": total,
        "beside": at_random(own, alone=alone),
        "gap": own.loc[GAP].to_dict(),
        "mark": MARK,
    }
    row["share"] = row["size"] / total
    sizes = frame[frame["variant"].str.startswith(TOP)]
    if not alone or sizes.empty:
        return [row]
    rows = [row]
    for variant, part in sizes.groupby("variant", sort=False):
        size = int(str(variant).removeprefix(TOP))
        if size != row["size"] and 0 < size < total:
            of_size = part.set_index("metric")
            about = {
                "size": size,
                "share": size / total,
                "beside": at_random(of_size, alone=alone),
                "mark": "",
            }
            rows.append({**first, **numbers(of_size), **about})
    return sorted(rows, key=lambda one: one["size"])


def at_random(rows: pandas.DataFrame, *, alone: bool) -> float:
    """Returns the faithfulness of random circuits of the same size: their mean, or of several checkpoints the best."""
    column, metric = ("baseline", FAITHFULNESS) if alone else ("value", LARGEST_RANDOM)
    return float(rows[column].get(metric, float("nan")))


def numbers(rows: pandas.DataFrame) -> dict[str, Any]:
    """Returns faithfulness and the metric of a circuit that is kept, from its rows by metric."""
    (metric,) = (name for name in rows.index if name not in (SIZE, GAP) and not name.startswith(FAITHFULNESS))
    of_metric = rows.loc[metric]
    faithfulness = (
        rows.loc[FAITHFULNESS] if FAITHFULNESS in rows.index else of_metric.map(lambda _: float("nan"))
    )
    return {
        "metric": metric,
        "clean": of_metric["baseline"],
        "value": of_metric["value"],
        "value_ci_low": of_metric["value_ci_low"],
        "value_ci_high": of_metric["value_ci_high"],
        "faithfulness": faithfulness["value"],
        "faithfulness_ci_low": faithfulness["value_ci_low"],
        "faithfulness_ci_high": faithfulness["value_ci_high"],
    }


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of one circuit and its sizes, or of the circuits of several checkpoints."""
    metric = str(rows["metric"].iloc[0]) if rows["metric"].nunique() == 1 else "metric"
    size = Column("size", "size", lambda row: "–" if row["size"] != row["size"] else f"{row['size']:.0f}")
    shared = [
        size,
        Column("share", "share", filled("share", ".1%")),
        Column("faithfulness [95% CI]", "faithfulness", faithfulness_text),
    ]
    if "checkpoint" in rows or rows["size"].isna().any():
        several = [Column("checkpoint", "checkpoint")] if "checkpoint" in rows else []
        several += [Column("metric", "metric")] if metric == "metric" else []
        gap = Column("gap [95% CI]", "clean", gap_text)
        best = Column("best of random", "beside", filled("beside", share))
        return [
            *several,
            Column(f"{metric}, clean", "clean"),
            *shared,
            *([best] if rows["beside"].notna().any() else []),
            *([gap] if rows["size"].isna().any() else []),
        ]
    return [
        *shared,
        Column("random", "beside", filled("beside", share)),
        Column(
            f"{metric} [95% CI]",
            "value",
            lambda row: with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"]),
        ),
        Column("", "mark"),
    ]


def faithfulness_text(row: Mapping[str, Any]) -> str:
    """Returns faithfulness with its interval; says where there is nothing to be faithful to."""
    values = [row[name] for name in ("faithfulness", "faithfulness_ci_low", "faithfulness_ci_high")]
    if values[0] != values[0]:
        return "no gap"
    value, low, high = map(share, values)
    return value if low == share(float("nan")) else f"{value} [{low}, {high}]"


def share(value: float) -> str:
    """Returns a faithfulness to three decimals: of a circuit that does nothing only rounding is left."""
    return "–" if value != value else f"{round(value, 3) + 0.0:.3f}"


def gap_text(row: Mapping[str, Any]) -> str:
    gap = row["gap"]
    return with_interval(number(gap["value"]), gap["value_ci_low"], gap["value_ci_high"])


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
        panels.append(curve(series, y=name, bars=True, height=200))
    return draw(panels)


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


def check_circuit(circuit: Circuit, sizes: Any, place: str) -> None:
    """Refuses a circuit of a model of another shape, or with members that this one lacks, by its configuration alone.

    Args:
        sizes: as in :class:`PendingCheckpoint`.
        place: names the file and the model.

    Raises:
        CircuitsError: in one line.
    """
    graph = graph_of(sizes)
    graph.check_same(circuit.graph, place)
    graph.fitted(circuit.where, circuit.kind, place)


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


def drawn_circuit(circuit: Circuit) -> str:
    """Returns the caption of a circuit's picture."""
    from circuits.figures.circuit_graph import DRAWN as EDGES

    if circuit.kind == "nodes":
        return "Hover for the effects of nodes, estimated or measured."
    caption = (
        "Lines are as wide as effects, estimated or measured; hover for them. A click on a node fades the edges of "
        "others, until the next click on it."
    )
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
        drawn.append(Figure(circuits[ref].plot(), f"The circuit, {ref}", drawn_circuit(circuits[ref])))
    return drawn
