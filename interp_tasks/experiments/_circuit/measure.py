"""Finds the smallest circuit that is as faithful as asked, at each checkpoint, and tests it on other examples.

The variant ``circuit`` has the rows ``size`` (``baseline``: of how many), ``faithfulness`` (``baseline``: mean of the
random circuits), ``faithfulness, finding half``, ``faithfulness, best of random``, the metric where it is kept
(``baseline``: of the unedited model), and ``gap``, the metric of the clean minus that of the source run; where its
interval on the finding half holds 0, there is no circuit, and ``size`` is empty. ``top 12``: the first 12 of the
ranking; ``baseline`` of ``faithfulness`` are 12 at random. ``curve``: the areas ``CPR`` and ``CMD``. And a row per
member with its ``effect``: exact where ``engine`` says so, else the estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import curve as lines
from circuits.figures.panels import of_rows
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
)
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, Refs, resolve_refs
from interp_tasks.measurement.table import filled
from interp_tasks.pages import Column, Figure, check_writable_file, number, signed, with_interval

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from circuits.circuit import Circuit
    from interp_tasks.checkpoints import ResolvedCheckpoint

#: Examples where nothing is said: half of them find, half test.
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
        from circuits import circuit as circuits

        check_file(Path(keep), "--keep")
        kept = circuits.read(keep)
        search = replace(search, kind=kept.kind, keep=kept)
    examples = Examples.of(options)
    refs = resolve_refs(refs, examples)
    if write is not None:
        check_writable_file(Path(write))
        if len(refs) > 1 or keep is not None:
            raise UserError(f"--write {write}: the circuit found at one checkpoint; name one, without --keep")
    samples = options.get("samples") or (SAMPLES if examples.tokens is None else None)
    result = find_circuits(refs, search, {**options, "samples": samples})
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

        one = found[ref] = find_circuit(subject, search, report_stage)
        done = {} if one.circuit is None else {"size": len(one.circuit), "sha256": one.circuit.sha256}
        return Measured(pandas.DataFrame(one.rows), {"circuit": done} if done else {})

    result = measure(
        "circuit", refs, options, measure_checkpoint, config=search.describe(), check=search.check
    )
    data = {
        "circuits": {ref: each.circuit for ref, each in found.items() if each.circuit is not None},
        "curves": {ref: each.curve for ref, each in found.items() if each.curve is not None},
        "metrics": {ref: each.metric for ref, each in found.items()},
    }
    return replace(result, notes=notes(found, search), data=data)


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
    members = [
        row
        for each in found.values()
        for row in each.rows
        if not str(row["variant"]).startswith((TOP, CIRCUIT, CURVE))
    ]
    if len(found) == 1 and members:
        # A ranking by estimates is not in the order of the effects that were measured.
        largest = sorted(members, key=lambda row: -abs(row["effect"]))[:LISTED]
        texts = ", ".join(f"{row['variant']} {signed(row['effect'])}" for row in largest)
        sentences.append(f"Largest effects on {members[0]['metric']} of taking one from the source: {texts}.")
    sentences += dict.fromkeys(
        note.replace('rank="size"', "--rank size") for each in found.values() for note in each.notes
    )
    return tuple(sentences)


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
        value = Column(f"{metric} [95% CI]", "value", interval_text)
        return [*shared, Column("random", "beside", filled("beside", share)), value, Column("", "mark")]
    several = [Column("checkpoint", "checkpoint")] if "checkpoint" in rows else []
    several += [Column("metric", "metric")] if metric == "metric" else []
    best = Column("best of random", "beside", filled("beside", share))
    gap = Column("gap [95% CI]", "clean", lambda row: interval_text(row["gap"]))
    return [
        *several,
        Column(f"{metric}, clean", "clean"),
        *shared,
        *([best] if rows["beside"].notna().any() else []),
        *([gap] if rows["size"].isna().any() else []),
    ]


def interval_text(row: Mapping[str, Any]) -> str:
    """Returns a value with its interval."""
    return with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"])


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
