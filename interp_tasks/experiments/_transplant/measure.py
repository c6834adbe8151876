"""Transplants components: a model gets another checkpoint's weights of them, and metrics say what that changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Unpack


@dataclass(frozen=True, repr=False)
class TransplantResult(Result):
    """A :class:`Result`; with several sources its figure is a map per component, receiver by source."""

    @property
    def is_grid(self) -> bool:
        return isinstance(self.config["source"], list)

    def plot(self) -> plotly.graph_objects.Figure:
        if not self.is_grid:
            return super().plot()
        from interp_tasks.experiments._transplant.figure import figure

        return self.titled(figure(self.frame), self.heading())

    def heading(self) -> str:
        if not self.is_grid:
            return super().heading()
        return "Every metric, by who receives the weights and whose they are"

    def caption(self) -> str:
        if not self.is_grid:
            return super().caption()
        runs = list(dict.fromkeys(self.frame["run"].dropna()))
        of = f"All checkpoints are of {runs[0]}. " if len(runs) == 1 else ""
        return (
            f"{of}Down: the checkpoint that is run. Across: the one whose weights it gets. A cell that gets its own is "
            "the unedited model. Colours mean the same in every map of a metric; of one that spans two powers of ten "
            f"they are by its logarithm. {self.examples()}"
        ).strip()


@experiment("Intervene", says={"source": None, "components": None, "layers": None}, metrics=metrics_of_task)
def transplant(
    refs: str | Sequence[str],
    source: Annotated[
        str | Sequence[str],
        typer.Option(
            "--source", metavar="REF", help="The checkpoint that weights come from. Repeat for several."
        ),
        list[str],
    ],
    components: Annotated[
        str | Sequence[str],
        typer.Option(
            "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp; each. Repeat for rows."
        ),
        list[str],
    ] = "qkv",
    layers: Annotated[
        str | Sequence[int] | None,
        typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all"),
        str | None,
    ] = None,
    **options: Unpack[Options],
) -> TransplantResult:
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        A :class:`Result`; ``variant`` is the component and ``intervention`` says whose. Its ``config["done"]`` lists
        every parameter that moved, with its sha256.

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
    variants_of_source: dict[SourceCheckpoint, dict[str, Any]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint with each component of each source."""
        for checkpoint in sources:
            if checkpoint not in variants_of_source:
                variants_of_source[checkpoint] = variants_from(
                    checkpoint, given, chosen_layers, options.get("device", "cpu")
                )
        variants = {
            labelled(row, checkpoint, sources): one
            for checkpoint in sources
            for row, one in variants_of_source[checkpoint].items()
        }
        rows = {
            labelled(row, checkpoint, sources): row
            for checkpoint in sources
            for row in variants_of_source[checkpoint]
        }
        names = {
            labelled(row, checkpoint, sources): called(
                row, {"layers": chosen_layers, "source": checkpoint.label}
            )
            for checkpoint in sources
            for row in variants_of_source[checkpoint]
        }
        measured = swept(subject, variants, names)
        return Measured(
            measured.frame.assign(variant=measured.frame["variant"].map(rows)), measured.interventions
        )

    limited = "" if chosen_layers is None else f", in layers {', '.join(map(str, chosen_layers))} only"
    resolved = [checkpoint.resolved.ref for checkpoint in sources]
    whose = str(sources[0]) if len(sources) == 1 else f"each of {len(sources)} checkpoints"
    result = measure(
        "transplant",
        refs,
        options,
        measure_checkpoint,
        config={
            "source": resolved if len(sources) > 1 else resolved[0],
            "components": given,
            "layers": chosen_layers,
        },
        notes=(f"Weights come from {whose}{limited}; everything else stays the checkpoint's own.",),
        # Sources have the architecture of every REF.
        parts=ModelParts(layers=chosen_layers or ()),
    )
    moved = (f"{row}: {', '.join(parameters(one))}" for row, one in variants_of_source[sources[0]].items())
    notes = (*result.notes, f"Moved, N being every such layer: {'; '.join(moved)}.")
    return TransplantResult(result.experiment, result.frame, result.config, notes, result.versions)


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


def labelled(row: str, checkpoint: SourceCheckpoint, sources: Sequence[SourceCheckpoint]) -> str:
    """Returns a row's name among those of one checkpoint; alone its component says it."""
    return row if len(sources) == 1 else f"{row} of {checkpoint.label}"


def parameters(intervention: Any) -> list[str]:
    """Returns the state_dict names of what moves, those that differ by their layer alone as one."""
    names: Mapping[str, None] = dict.fromkeys(
        re.sub(r"\.\d+\.", ".N.", name) for name, _ in intervention.values
    )
    return list(names)
