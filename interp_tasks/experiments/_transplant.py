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
from interp_tasks.measurement.experiment import experiment, metrics_of_task
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import EACH, called, check_components, check_layers
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, swept
from interp_tasks.measurement.source_checkpoints import (
    SourceCheckpoint,
    check_architecture,
    source_checkpoints,
)
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, resolve_refs
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack


SOURCE = typer.Option(
    "--source", metavar="REF", help="The checkpoint that weights come from. Repeat for several."
)
COMPONENTS_OPTION = typer.Option(
    "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp; each. Repeat for rows."
)
LAYERS = typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all")


@experiment("Intervene", says={"source": None, "components": None, "layers": None}, metrics=metrics_of_task)
def transplant(
    refs: str | Sequence[str],
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
            biases; ``"qkv+mlp"`` moves both; ``"each"``: a row for all that the source has; a list: a row each.
        layers: only in these layers (default: all).
        options: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    given = [check_components(each) for each in ([components] if isinstance(components, str) else components)]
    if not given:
        raise UserError("--components: nothing to transplant; write qkv, mlp, attn, ...")
    chosen_layers = check_layers(layers, given)
    sources = source_checkpoints(source)
    refs = resolve_refs(refs, Examples.of(options))
    check_architecture(sources, refs)
    variants_of: dict[SourceCheckpoint, dict[str, Any]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint with each component of each source."""
        variants, rows, names = {}, {}, {}
        for one in sources:
            if one not in variants_of:
                variants_of[one] = variants_from(one, given, chosen_layers, options.get("device", "cpu"))
            for row, variant in variants_of[one].items():
                label = row if len(sources) == 1 else f"{row} of {one.label}"
                variants[label], rows[label] = variant, row
                names[label] = called(row, {"layers": chosen_layers, "source": one.label})
        measured = swept(subject, variants, names)
        return replace(measured, frame=measured.frame.assign(variant=measured.frame["variant"].map(rows)))

    limited = "" if chosen_layers is None else f", in layers {', '.join(map(str, chosen_layers))} only"
    resolved = [one.resolved.ref for one in sources]
    whose = str(sources[0]) if len(sources) == 1 else f"each of {len(sources)} checkpoints"
    source = resolved if len(sources) > 1 else resolved[0]
    config = {"source": source, "components": given, "layers": chosen_layers}
    # Sources have the architecture of every REF.
    parts = ModelParts(layers=chosen_layers or ())
    result = measure("transplant", refs, options, measure_checkpoint, config=config, parts=parts)
    moved = (f"{row}: {', '.join(parameters(one))}" for row, one in variants_of[sources[0]].items())
    notes = (
        f"Weights come from {whose}{limited}; everything else stays the checkpoint's own.",
        f"Moved, N being every such layer: {'; '.join(moved)}.",
    )
    return replace(result, notes=(*result.notes, *notes))


def variants_from(
    checkpoint: SourceCheckpoint, given: Sequence[str], layers: Any, device: str
) -> dict[str, Any]:
    """Returns the intervention that gives each component the checkpoint's weights."""
    from circuits import transplant as transplants

    model = checkpoint.load(device).model
    rows: list[str] = []
    for row in given:
        rows += all_of(model, layers) if row == EACH else [row]
    return {row: transplants.weights(model, row.split("+"), layers) for row in dict.fromkeys(rows)}


def all_of(model: Any, layers: Any) -> list[str]:
    """Returns every component that a model has, in these layers where they are given."""
    from circuits.model.hooked_model import HookedModel
    from circuits.transplant import selected

    weights = HookedModel.of(model).named_weights()

    def is_there(component: str) -> bool:
        chosen = selected(weights, (component,), layers)
        return bool(chosen) and (layers is None or any(layer is not None for _, layer in chosen.values()))

    return [component for component in COMPONENTS if is_there(component)]


def parameters(intervention: Any) -> list[str]:
    """Returns the state_dict names of what moves, those that differ by their layer alone as one."""
    names: Mapping[str, None] = dict.fromkeys(
        re.sub(r"\.\d+\.", ".N.", name) for name, _ in intervention.values
    )
    return list(names)


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Returns a row of maps for each component, one map per metric; its colours mean the same in each."""
    metrics = list(dict.fromkeys(frame["metric"]))
    panels = [
        component_map(
            rows[rows["metric"] == metric], f"{component}: {metric}", frame[frame["metric"] == metric]
        )
        for component, rows in frame.groupby("variant", sort=False)
        for metric in metrics
    ]
    return draw(panels, columns=len(metrics), share_y=True)


def component_map(rows: pandas.DataFrame, title: str, of_metric: pandas.DataFrame) -> Panel:
    """Returns one component's values, receivers down, sources across, both by step where steps differ."""
    import numpy as np

    cells = rows.assign(source=rows["intervention"].map(source_of)).pivot_table(
        index="ref", columns="source", values="value", sort=False, dropna=False
    )
    steps = rows.drop_duplicates("ref").set_index("ref")["step"]
    refs = [str(ref) for ref in cells.index]
    of_one_run = all("@" in ref for ref in refs) and len({ref.rpartition("@")[0] for ref in refs}) == 1
    if of_one_run:
        cells.index = [short(ref, refs) for ref in refs]
    elif steps.is_unique:
        cells.index = [str(steps[ref]) for ref in refs]
    cells.columns = [short(source, list(cells.columns)) for source in cells.columns]
    values = of_metric["value"].dropna()
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    text = cells.map("{:.3g}".format)
    # Colours of a metric that spans two powers of ten are those of its logarithm.
    log: Any = np.log10 if low > 0 and high > 100 * low else lambda number: number
    axes: dict[str, Any] = {"across": "weights of", "down": "run", "text": text, "bar": False}
    drawn = heat(log(cells), title, unit=title, start=float(log(low)), end=float(log(high)), **axes)
    hover = "run %{y}, weights of %{x}<br>%{text}<extra></extra>"
    return Panel(
        [{**drawn.traces[0], "hovertemplate": hover}], title, drawn.x, drawn.y, max(120, drawn.height), 180
    )


def source_of(intervention: str) -> str:
    """Returns the source of the weights that a row's ``intervention`` names."""
    return intervention.rpartition("source=")[2].removesuffix(")")


def short(source: str, sources: list[str]) -> str:
    """Returns a REF without its run, where all are of one run."""
    runs = {each.rpartition("@")[0] for each in sources}
    return source.rpartition("@")[2] if len(runs) == 1 else source


def figures(result: Result) -> list[Figure]:
    """Returns with several sources a map per component, receiver by source; else the usual figure."""
    from interp_tasks.measurement.figure import figure as usual

    if not isinstance(result.config["source"], list):
        return [Figure(usual(result.frame), result.heading(), result.caption())]
    runs = list(dict.fromkeys(result.frame["run"].dropna()))
    of = f"All checkpoints are of {runs[0]}. " if len(runs) == 1 else ""
    caption = (
        f"{of}Down: the checkpoint that is run. Across: the one whose weights it gets. A cell that gets its own is "
        "the unedited model. Colours mean the same in every map of a metric; of one that spans two powers of ten "
        f"they are by its logarithm. {result.examples()}"
    ).strip()
    return [
        Figure(figure(result.frame), "Every metric, by who receives the weights and whose they are", caption)
    ]
