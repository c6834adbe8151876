"""Transplants components: a model gets another checkpoint's weights of them, and metrics say what that changes.

``variant`` is the component and ``intervention`` says whose. Its ``config["done"]`` lists every parameter that moved,
with its sha256.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import heat
from circuits.model.components import COMPONENTS
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import called, check_layer, check_positions, parse_parts
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    Refs,
    check_architecture,
    labelled,
    resolve_refs,
)
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint

SOURCE = typer.Option(
    "--source", metavar="REF", help="The checkpoint that weights come from. Repeat for several."
)
COMPONENTS_OPTION = typer.Option(
    "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp. Repeat for rows."
)
LAYERS = typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all")


@experiment("Intervene", says={"source": None, "components": None, "layers": None}, judged_by_task=True)
def transplant(
    refs: Refs,
    source: Annotated[str | Sequence[str], SOURCE, list[str]],
    components: Annotated[str | Sequence[str], COMPONENTS_OPTION, list[str]] = "qkv",
    layers: Annotated[str | Sequence[int] | None, LAYERS, str | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Give a model some weights of another checkpoint, and see which metrics move.

    Weights go from each --source to each --ckpt, with their biases; every parameter that moved is listed in the
    configuration that --out and --plot write. With several sources the figure is a map per component.

    Args:
        refs: one or several REFs, which receive the weights; all see the same examples.
        source: the REF of the checkpoint which lends them, of the same architecture. A list, or a REF that names
            several: rows for each, and ``plot()`` gives a map per component.
        components: ``q k v qkv o attn (= qkv+o) mlp embed pos_embed unembed ln1 ln2 ln_embed ln_final ln``, with
            biases; ``"qkv+mlp"`` moves both; a list: a row each.
        layers: only in these layers (default: all).
        options: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    rows = [parse_components(each) for each in ([components] if isinstance(components, str) else components)]
    if not rows:
        raise UserError("--components: nothing to transplant; write qkv, mlp, attn, ...")
    chosen_layers = check_positions("--layers", layers) if isinstance(layers, str) else layers
    sources, found = labelled(source), resolve_refs(refs, Examples.of(options))
    check_architecture(sources, found)
    device = options.get("device") or "cpu"
    variants_of: dict[str, dict[str, Any]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        variants, components_of, names = {}, {}, {}
        for one in sources:
            if one.ref not in variants_of:
                variants_of[one.ref] = variants_from(one, rows, chosen_layers, device)
            for row, variant in variants_of[one.ref].items():
                label = row if len(sources) == 1 else f"{row} of {one.label}"
                variants[label], components_of[label] = variant, row
                names[label] = called(row, {"layers": chosen_layers, "source": one.label})
        measured = run_sweep(subject, variants, names)
        named = measured.frame["variant"].map(components_of)
        return replace(measured, frame=measured.frame.assign(variant=named))

    def check_sizes(sizes: Any, name: str) -> None:
        for layer in chosen_layers or ():
            check_layer(f"--layers {layer}", layer, sizes, name)

    resolved = [one.ref for one in sources]
    config = {
        "source": resolved if len(sources) > 1 else resolved[0],
        "components": rows,
        "layers": chosen_layers,
    }
    result = measure("transplant", found, options, measure_checkpoint, config=config, check_sizes=check_sizes)
    return replace(result, notes=(*result.notes, *notes_of(sources, chosen_layers, variants_of[resolved[0]])))


def notes_of(sources: Sequence[ResolvedCheckpoint], layers: Any, variants: Mapping[str, Any]) -> list[str]:
    """Returns whose weights they are, and what moves."""
    limited = "" if layers is None else f", in layers {', '.join(map(str, layers))} only"
    whose = sources[0].label if len(sources) == 1 else f"each of {len(sources)} checkpoints"
    moved = (f"{row}: {', '.join(parameters(one))}" for row, one in variants.items())
    return [
        f"Weights come from {whose}{limited}; everything else stays the checkpoint's own.",
        f"Moved, N being every such layer: {'; '.join(moved)}.",
    ]


def parse_components(spec: str) -> str:
    """Returns components of a model with ``+`` between them.

    Raises:
        UserError: for a component that there is not.
    """
    for part in parse_parts(spec):
        if part not in COMPONENTS:
            raise UserError(
                f"--components {spec!r}: no component {part!r}; choose from {', '.join(COMPONENTS)}"
            )
    return "+".join(dict.fromkeys(parse_parts(spec)))


def variants_from(
    source: ResolvedCheckpoint, rows: Sequence[str], layers: Any, device: str
) -> dict[str, Any]:
    """Returns the intervention that gives each component the source's weights."""
    from circuits import transplant as transplants
    from interp_tasks.checkpoints.load import load_resolved

    model = load_resolved(source, device).model
    return {row: transplants.weights(model, row.split("+"), layers) for row in dict.fromkeys(rows)}


def parameters(intervention: Any) -> list[str]:
    """Returns the state_dict names of what moves, those that differ by their layer alone as one."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name, _ in intervention.values))


def component_map(rows: pandas.DataFrame, title: str, of_metric: pandas.DataFrame) -> Panel:
    """Returns one component's values, receivers down, sources across."""
    import numpy as np

    sources = rows["intervention"].str.rpartition("source=")[2].str.removesuffix(")")
    cells = rows.assign(source=sources).pivot_table(
        index="ref", columns="source", values="value", sort=False, dropna=False
    )
    cells.index, cells.columns = (short(list(map(str, names))) for names in (cells.index, cells.columns))
    values = of_metric["value"].dropna()
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    # Colours of a metric that spans two powers of ten are those of its logarithm.
    log: Any = np.log10 if low > 0 and high > 100 * low else lambda number: number
    axes: dict[str, Any] = {
        "across": "weights of",
        "down": "run",
        "text": cells.map("{:.3g}".format),
        "bar": False,
    }
    drawn = heat(log(cells), title, unit=title, start=float(log(low)), end=float(log(high)), **axes)
    hover = "run %{y}, weights of %{x}<br>%{text}<extra></extra>"
    traces = [{**drawn.traces[0], "hovertemplate": hover}]
    return Panel(traces, title, drawn.x, drawn.y, max(120, drawn.height), 180)


def short(refs: list[str]) -> list[str]:
    """Returns REFs without their run, where all are of one run."""
    one_run = len({ref.rpartition("@")[0] for ref in refs}) == 1
    return [ref.rpartition("@")[2] if one_run else ref for ref in refs]


def figures(result: Result) -> list[Figure]:
    """Returns with several sources a row of maps per component, receiver by source; else the usual figure."""
    from interp_tasks.measurement.figure import figures as usual

    if not isinstance(result.config["source"], list):
        return usual(result.frame, result.examples())
    frame = result.frame
    panels = [
        component_map(rows, f"{component}: {metric}", frame[frame["metric"] == metric])
        for component, of_component in frame.groupby("variant", sort=False)
        for metric, rows in of_component.groupby("metric", sort=False)
    ]
    caption = (
        "Down: the checkpoint that is run. Across: the one whose weights it gets. A cell that gets its own is "
        "the unedited model. Colours mean the same in every map of a metric; of one that spans two powers of ten "
        f"they are by its logarithm. {result.examples()}"
    ).strip()
    figure = draw(panels, columns=frame["metric"].nunique(), share_y=True)
    return [Figure(figure, "Every metric, by who receives the weights and whose they are", caption)]
