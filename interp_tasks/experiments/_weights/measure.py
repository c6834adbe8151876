"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.experiments._weights.position_similarity import PUBLISHED_DIMENSIONS, of_positions
from interp_tasks.experiments._weights.tensors import (
    ABOVE_MEAN,
    ABOVE_RELABELLED,
    LEADING,
    ORDERS,
    TableView,
    of_tables,
)
from interp_tasks.measurement.embeddings.tables import WEIGHTS, Tables, tables_of
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    ResolvedRefs,
    check_has_task,
    resolve_refs,
    run_of,
)
from interp_tasks.measurement.untrained import BESIDE
from interp_tasks.measurement.untrained import untrained as untrained_model
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings.geometry import Array

#: How many untrained models stand beside a checkpoint.
MODELS = 20


@dataclass(frozen=True)
class CheckpointView:
    """The contents of one checkpoint's figures: its tables, the compared rows of W_pos by name, and every weight."""

    tables: tuple[TableView, ...]
    positions: Mapping[str, tuple[Array, Array]]
    weights: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, repr=False)
class WeightsResult(Result):
    """A :class:`Result` with the tables of its figures, by REF."""

    shown: Mapping[str, CheckpointView] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Draws one checkpoint (default: the first): positions, singular values and vectors, spectrum."""
        from interp_tasks.experiments._weights.figure import overview

        ref = next(iter(self.shown)) if ref is None else ref
        return self.titled(overview(self.shown[ref].tables, self.shown[ref].positions), f"Embeddings, {ref}")

    def maps(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Draws every weight tensor of one checkpoint (default: the first) as a heat map."""
        from interp_tasks.experiments._weights.figure import heatmaps

        ref = next(iter(self.shown)) if ref is None else ref
        if not self.shown[ref].weights:
            raise UserError(f"{ref}: every weight is 0, there is no map to draw")
        return heatmaps(self.shown[ref].weights)

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns both figures of every checkpoint."""
        figures = []
        for ref in self.shown:
            figures.append(Figure(self.plot(ref), f"Embeddings, {ref}", self.caption()))
            if self.shown[ref].weights:
                figures.append(Figure(self.maps(ref), f"Weights, {ref}", MAPS))
        return figures

    def caption(self) -> str:
        return (
            "Singular values: the marks say how many reach 50% and 90% of their sum. Spectrum: norms by frequency, in "
            "the second colour above those of relabelled digits. Dotted: the mean of untrained models."
        )


MAPS = "Every tensor that is not 0 throughout, in 255 steps from minus to plus its largest entry; heads side by side."


@experiment("modular")
def weights(
    refs: str | Sequence[str],
    control: Annotated[
        str | Sequence[str],
        typer.Option(
            "--control",
            metavar="REF",
            help="A model to compare with, such as one of shuffled answers. Repeat.",
        ),
        list[str],
    ] = (),
    *,
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with untrained models.")
    ] = True,
    every: Annotated[bool, typer.Option("--every", help="A row for every frequency.")] = False,
    **options: Unpack[Options],
) -> WeightsResult:
    """See embeddings as tables: similar positions, singular values and vectors, frequencies over the digits.

    Beside each number stands that of untrained models. With --plot also a map of every weight.

    Syrkis & Søgaard 2024 (MIIII), figures 7 to 13 and 23 to 26; the spectrum also Nanda et al. 2023, figure 3.
    Examples play no part.

    Args:
        refs: one or several REFs.
        control: REFs of models to compare them with, such as one trained on shuffled answers: rows of their own.
        untrained: compare with ``MODELS`` untrained models of the architecture: ``baseline`` is their mean, and a row
            more has it with the range of 95% of them.
        every: a row for every frequency, also where it is not significant.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples, random
            orders and untrained models.

    Returns:
        A :class:`WeightsResult`; ``variant`` says of what, ``intervention`` which part of it. The spectrum is left out
        for a task that has no grid of inputs.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    check_has_task("weights", options)
    examples = Examples.of(options)
    examined = resolve_refs(refs, examples)
    controls = resolve_refs(control, examples) if control else ResolvedRefs([], [])
    check_control(examined, controls)
    every_ref = ResolvedRefs([*examined, *controls], [*examined.named, *controls.named])
    shown: dict[str, CheckpointView] = {}
    control_tables: dict[Any, list[Tables]] = {}
    ordered: dict[bool, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures the embedding tables of one checkpoint, beside those of untrained models."""
        import pandas

        task = subject.task
        assert task is not None
        if untrained:
            key = (run_of(subject), task, *(tuple(one.shape) for one in subject.model.parameters()))
            if key not in control_tables:
                control_tables[key] = [Tables.of(untrained_model(subject, draw)) for draw in range(MODELS)]
            others = control_tables[key]
        else:
            others = []
        model_tables = Tables.of(subject.model)
        tables = tables_of(task, model_tables)
        ordered.update(dict.fromkeys(table.axis is not None for table in tables))
        rows, seen = of_tables(tables, [tables_of(task, one) for one in others], subject.seed, every)
        similarity_rows, compared = of_positions(task, model_tables, others, subject.seed)
        shown[str(subject.labels["ref"])] = CheckpointView(tuple(seen), compared, raw(subject.model))
        return Measured(pandas.DataFrame([*similarity_rows, *rows]), {})

    config = {"control": list(controls), "untrained": untrained, "every": every}
    result = measure("weights", every_ref, options, measure_checkpoint, config=config)
    frame = result.frame.assign(split=WEIGHTS)
    # No run trained these.
    frame.loc[frame["intervention"].str.startswith(BESIDE), "n_runs"] = 0
    return WeightsResult.of(
        result,
        frame=frame,
        notes=tuple(notes(controls, untrained, every, True in ordered)),
        shown=shown,
    )


def notes(controls: Sequence[str], untrained: bool, every: bool, ordered: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    if controls:
        yield f"Controls: {', '.join(controls)}."
    yield (
        "Similarity of positions: of the rows of W_pos, over dimensions; intervals: 95%, bootstrap over dimensions. "
        f"{PUBLISHED_DIMENSIONS} dimensions are what the published number was computed over."
    )
    yield "Vectors for a share: the fewest leading singular values that reach it, of ΣS or of ΣS²; not centred."
    if ordered:
        yield (
            f"{LEADING}: those for 50% of ΣS. periodic: a larger share of their variance at one frequency than white "
            "noise has at its best one with probability 0.05."
        )
        yield (
            f"{ABOVE_RELABELLED}: a norm that no frequency of the same rows in random order reaches with probability "
            f"0.95 ({ORDERS} orders); p adj. of a frequency is that test's. {ABOVE_MEAN}: the published rule, over "
            "all frequencies with 0; about a sixth of any noise is above it."
        )
        if not every:
            yield "Of the frequencies those above either bound have rows; --every shows all."
    else:
        yield "No spectrum: the task has no grid of inputs (grid_axes) whose values would put tokens in an order."
    if untrained:
        yield f"untrained: mean of {MODELS} untrained models of the architecture, with the range of 95% of them."


def check_control(refs: ResolvedRefs, controls: ResolvedRefs) -> None:
    """Refuses a control that is the checkpoint itself."""
    named = {each.resolved.path for each in refs.named}
    for each in controls.named:
        if each.resolved.path in named:
            raise UserError(f"--control {each.label} is a checkpoint of --ckpt too: give another model")


def raw(model: Any) -> dict[str, NDArray[np.float32]]:
    """Returns every weight that is not 0 throughout, as a matrix: heads side by side, a vector as one row."""
    arrays = {}
    for name, weight in model.named_parameters():
        values = weight.detach().float().cpu()
        if not values.any():
            continue
        kind = name.rsplit(".", 1)[-1]
        if values.ndim == 3:
            # [head d_model d_head] of what reads the residual stream, [head d_head d_model] of W_O.
            values = values.flatten(0, 1) if kind == "W_O" else values.permute(1, 0, 2).flatten(1)
        arrays[name] = values.reshape(-1, values.shape[-1]).numpy() if values.ndim != 2 else values.numpy()
    return arrays
