"""Finds the smallest circuit that is as faithful as asked, at each checkpoint, and tests it on other examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.experiments._circuit.rows import CIRCUIT, CURVE, TOP
from interp_tasks.experiments._circuit.search import FoundCircuit, find_circuit
from interp_tasks.experiments._circuit.settings import Search
from interp_tasks.experiments._circuit.stored import check_circuit, read_circuit
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, resolve_refs
from interp_tasks.pages import Figure, check_writable_file

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Unpack

    from circuits.circuit import Circuit, Curve

#: Examples where nothing is said: half of them find, half test.
SAMPLES = 128
#: Checkpoints whose circuits are drawn.
DRAWN = 2
#: Members that the notes name.
LISTED = 5


@dataclass(frozen=True, repr=False)
class CircuitResult(Result):
    """A :class:`Result` with the circuits behind it.

    Attributes:
        circuits: the circuit of each checkpoint, by REF; those without one are left out.
        curves: faithfulness over sizes of each, by REF; none of a circuit that was given.
        metrics: the metric that each is faithful in, by REF.
    """

    circuits: Mapping[str, Circuit] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Returns faithfulness over sizes at one checkpoint (default: the last with a circuit); of circuits that were
        given, and where there is none, the figure over steps.
        """
        if ref is None and not self.curves:
            return self.over_steps()
        ref = list(self.curves)[-1] if ref is None else ref
        return self.titled(self.curves[ref].plot(), f"Faithfulness of growing circuits, {ref}")

    def over_steps(self) -> plotly.graph_objects.Figure:
        """Returns size, faithfulness and the metric over steps."""
        from interp_tasks.experiments._circuit.figure import over_steps

        return over_steps(self.frame, next(iter(self.metrics.values())))

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns sizes over steps, where there are several checkpoints; and curves and pictures of the last two."""
        figures = []
        if len(self.metrics) > 1 or not self.circuits:
            figures.append(Figure(self.over_steps(), "The smallest circuit over training", self.caption()))
        caption = "Kept on the half of the examples that did not find it, beside as many members at random."
        for ref in list(self.circuits)[-DRAWN:]:
            if ref in self.curves:
                figures.append(
                    Figure(self.curves[ref].plot(), f"Faithfulness of growing circuits, {ref}", caption)
                )
            circuit = self.circuits[ref]
            figures.append(Figure(circuit.plot(), f"The circuit, {ref}", drawn(circuit)))
        return figures

    def caption(self) -> str:
        return (
            "Members of the smallest circuit that is faithful enough on the half that finds it, its faithfulness on "
            "the other half with 95% intervals, and the unedited model's metric. No point: clean and source run do "
            "not differ."
        )


def drawn(circuit: Circuit) -> str:
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
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="SOURCE",
            help="What cut edges hear: resample, or a name of the task's.",
            show_default="values, or resample",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="NAME", help="What is to be faithful.", show_default="the task's own"
        ),
    ] = None,
    rank_by: Annotated[
        str | None,
        typer.Option(
            "--rank-by", metavar="NAME", help="Metric that ranks; has a gradient.", show_default="as --metric"
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="edges or nodes.", show_default="edges")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="Ranking: gradient, integrated or exact.",
            show_default="integrated",
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            metavar="RANK",
            help="By the mean effect, or by the mean size of effects.",
            show_default="mean",
        ),
    ] = None,
    faithfulness: Annotated[
        float | None,
        typer.Option(
            "--faithfulness", metavar="SHARE", help="What the circuit has at least.", show_default="0.9"
        ),
    ] = None,
    random: Annotated[
        int, typer.Option("--random", help="Random circuits of its size to compare with.")
    ] = 20,
    curve: Annotated[
        bool | None,
        typer.Option("--curve/--no-curve", help="Measure faithfulness over sizes too.", show_default="curve"),
    ] = None,
    keep: Annotated[
        str | Path | None,
        typer.Option("--keep", metavar="FILE.json", help="Test this circuit instead of finding one."),
        str | None,
    ] = None,
    write: Annotated[
        str | Path | None,
        typer.Option(
            "--write", metavar="FILE.json", help="Write the circuit there, for --keep and circuit.read."
        ),
        str | None,
    ] = None,
    **options: Unpack[Options],
) -> CircuitResult:
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

    Returns:
        A :class:`CircuitResult`. The variant ``circuit`` has the rows ``size`` (``baseline``: of how many),
        ``faithfulness`` (``baseline``: mean of the random circuits), ``faithfulness, finding half``,
        ``faithfulness, best of random``, the metric where it is kept (``baseline``: of the unedited model), and
        ``gap``, the metric of the clean minus that of the source run; where its interval on the finding half holds 0,
        there is no circuit, and ``size`` is empty. ``top 12``: the first 12 of the ranking; ``baseline`` of
        ``faithfulness`` are 12 at random. ``curve``: the areas ``CPR`` and ``CMD``. And a row per member with its
        ``effect``: exact where ``engine`` says so, else the estimate.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    finding: dict[str, Any] = {
        "rank_by": rank_by,
        "kind": kind,
        "method": method,
        "rank": rank,
        "faithfulness": faithfulness,
        "curve": curve,
    }
    finding = {name: value for name, value in finding.items() if value is not None}
    if keep is not None:
        check_given(keep, finding, write)
    search = Search(source, metric, random=random, **finding)
    search.check()
    if write is not None:
        check_writable_file(Path(write))
    kept = None if keep is None else read_circuit(Path(keep))
    examples = Examples.of(options)
    refs = resolve_refs(refs, examples)
    if kept is not None:
        for named in refs.named:
            sizes = SimpleNamespace(**named.resolved.meta["model"])
            check_circuit(kept, sizes, f"--keep {keep} on {named.resolved.ref}")
    if write is not None and len(refs.named) > 1:
        raise UserError(
            f"--write {write}: one circuit, and --ckpt names {len(refs.named)} checkpoints; name one"
        )
    if kept is not None:
        search = replace(search, kind=kept.kind, keep=kept)
    found: dict[str, FoundCircuit] = {}
    progress = options.get("progress")

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        ref = str(subject.labels["ref"])

        def report_stage(stage: str) -> None:
            if progress is not None:
                progress(min(len(found), len(refs.named) - 1), len(refs.named), f"{ref}: {stage}")

        found[ref] = find_circuit(subject, search, report_stage)
        circuit = found[ref].circuit
        done = {} if circuit is None else {"circuit": {"size": len(circuit), "sha256": circuit.sha256}}
        return Measured(pandas.DataFrame(found[ref].rows), done)

    result = measure(
        "circuit",
        refs,
        options | {"samples": options.get("samples") or (SAMPLES if examples.tokens is None else None)},
        measure_checkpoint,
        config=search.describe() | {"method": "given" if kept is not None else search.method},
        check=search.check_planned,
    )
    circuits = {ref: each.circuit for ref, each in found.items() if each.circuit is not None}
    if write is not None:
        for each in circuits.values():
            # As for the files of --out; what could not be made was refused before anything was measured.
            Path(write).parent.mkdir(parents=True, exist_ok=True)
            each.write(write)
        if not circuits:
            raise UserError(f"--write {write}: there is no circuit, since clean and source run do not differ")
    return CircuitResult.of(
        result,
        notes=notes(found, search),
        circuits=circuits,
        curves={ref: each.curve for ref, each in found.items() if each.curve is not None},
        metrics={ref: each.metric for ref, each in found.items()},
    )


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
        "the circuit. Intervals: 95%, bootstrap over examples.",
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
