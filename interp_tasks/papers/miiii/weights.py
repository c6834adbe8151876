"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models.

``variant`` says of what, ``intervention`` which part of it. The spectrum is left out for a task that has no grid of
inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, bars, curve, heat, scatter
from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import WEIGHTS, Tables, interval, resamples, tables_of
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
from interp_tasks.measurement.table import filled, value_text
from interp_tasks.measurement.untrained import untrained as untrained_model
from interp_tasks.pages import Column, Figure, number, p_value, with_interval
from interp_tasks.papers.miiii.tensors import (
    ABOVE_MEAN,
    ABOVE_RELABELLED,
    BESIDE,
    BEST,
    LEADING,
    NORM,
    ORDERS,
    SPECTRUM,
    TableView,
    of_tables,
    rows_with_untrained,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import plotly.graph_objects
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings import Array
    from tasks import Task

#: How many untrained models stand beside a checkpoint.
MODELS = 20
MAPS = "Every tensor that is not 0 throughout, in 255 steps from minus to plus its largest entry; heads side by side."
#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
PEARSON, COSINE = "Pearson correlation", "cosine similarity"
#: Singular vectors that are drawn, and steps of a map's scale on either side of 0: whole numbers of a byte.
VECTORS, STEPS = 4, 127
GREY = 6
CONTROL = typer.Option(
    "--control", metavar="REF", help="A model to compare with, such as one of shuffled answers. Repeat."
)
UNTRAINED = typer.Option("--untrained/--no-untrained", help="Compare with untrained models.")
EVERY = typer.Option("--every", help="A row for every frequency.")


@dataclass(frozen=True)
class CheckpointView:
    """The contents of one checkpoint's figures: its tables, the compared rows of W_pos by name, and every weight."""

    tables: tuple[TableView, ...]
    positions: Mapping[str, tuple[Array, Array]]
    weights: Mapping[str, NDArray[np.float32]]


@experiment("modular")
def weights(
    refs: str | Sequence[str],
    control: Annotated[str | Sequence[str], CONTROL, list[str]] = (),
    *,
    untrained: Annotated[bool, UNTRAINED] = True,
    every: Annotated[bool, EVERY] = False,
    **options: Unpack[Options],
) -> Result:
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

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    check_has_task("weights", options)
    examples = Examples.of(options)
    examined = resolve_refs(refs, examples)
    controls = resolve_refs(control, examples) if control else ResolvedRefs([], [])
    check_control(examined, controls)
    every_ref = ResolvedRefs([*examined, *controls], [*examined.named, *controls.named])
    measures = Measures(untrained, every)
    config = {"control": list(controls), "untrained": untrained, "every": every}
    result = measure("weights", every_ref, options, measures.measured, config=config)
    frame = result.frame.assign(split=WEIGHTS)
    # No run trained these.
    frame.loc[frame["intervention"].str.startswith(BESIDE), "n_runs"] = 0
    note_texts = tuple(notes(controls, untrained, every, measures.has_order))
    return replace(result, frame=frame, notes=note_texts, data={"shown": measures.shown})


@dataclass
class Measures:
    """What is measured of each checkpoint beside untrained models, and the contents of the figures by REF.

    Attributes:
        has_order: whether the rows of some table stand in an order.
    """

    untrained: bool
    every: bool
    shown: dict[str, CheckpointView] = field(default_factory=dict)
    controls: dict[Any, list[Tables]] = field(default_factory=dict)
    has_order: bool = False

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures the embedding tables of one checkpoint, beside those of untrained models."""
        import pandas

        task, model_tables = subject.task, Tables.of(subject.model)
        assert task is not None
        others = self.others(subject) if self.untrained else []
        tables = tables_of(task, model_tables)
        self.has_order |= any(table.axis is not None for table in tables)
        rows, seen = of_tables(tables, [tables_of(task, one) for one in others], subject.seed, self.every)
        similarity_rows, compared = of_positions(task, model_tables, others, subject.seed)
        self.shown[str(subject.labels["ref"])] = CheckpointView(tuple(seen), compared, raw(subject.model))
        return Measured(pandas.DataFrame([*similarity_rows, *rows]), {})

    def others(self, subject: LoadedCheckpoint) -> list[Tables]:
        """Returns the tables of untrained models, the same for all checkpoints of a run and architecture."""
        key = (run_of(subject), subject.task, *(tuple(one.shape) for one in subject.model.parameters()))
        if key not in self.controls:
            self.controls[key] = [Tables.of(untrained_model(subject, draw)) for draw in range(MODELS)]
        return self.controls[key]


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


def pairs_of(task: Task, positions: int) -> list[tuple[int, int]]:
    """Returns the positions compared: those of the grid's coordinates, else the first two."""
    places = sorted({axis.position for axis in task.grid_axes() if axis.position is not None}) or [0, 1]
    return [pair for pair in itertools.combinations(places, 2) if pair[1] < positions]


def of_positions(
    task: Task, tables: Tables, others: Sequence[Tables], seed: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[Array, Array]]]:
    """Returns rows of the similarity of positions, and the compared rows of W_pos; empty without that table."""
    import numpy as np

    if tables.positions is None:
        return [], {}
    rows: list[dict[str, Any]] = []
    compared = {}
    for one, other in pairs_of(task, len(tables.positions)):
        name = f"positions {one} and {other}"
        compared[name] = (tables.positions[one], tables.positions[other])
        for dimensions in dict.fromkeys([tables.positions.shape[1], PUBLISHED_DIMENSIONS]):
            if dimensions > tables.positions.shape[1]:
                continue
            is_full = dimensions == tables.positions.shape[1]
            about = "all dimensions" if is_full else f"first {dimensions} dimensions"
            resampled = similarities(tables.positions, (one, other), dimensions, resamples(dimensions, seed))
            plain = np.ones((1, dimensions))
            control_values = [
                similarities(each.positions, (one, other), dimensions, plain)
                for each in others
                if each.positions is not None
            ]
            for metric, values in resampled.items():
                low, high = interval(values[1:])
                row = {"site": "pos_embed", "n": dimensions, "value_ci_low": low, "value_ci_high": high}
                key = (name, about, metric)
                rows += rows_with_untrained(
                    key, float(values[0]), [float(each[metric][0]) for each in control_values], row
                )
    return rows, compared


def similarities(table: Array, pair: tuple[int, int], dimensions: int, weights: Array) -> dict[str, Array]:
    """Returns Pearson and cosine of two rows over their first dimensions, weighted ``[draws dimension]``."""
    import numpy as np

    from interp_tasks.measurement.embeddings import correlation

    one, other = (table[position, :dimensions] for position in pair)
    products = weights @ (one * other)
    scale = np.sqrt((weights @ one**2) * (weights @ other**2))
    cosine = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return {PEARSON: correlation(one, other, weights), COSINE: cosine}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns, ``beside low`` and ``beside high``, of the rows of untrained models."""
    of_others = frame["intervention"].str.startswith(BESIDE)
    ranges = frame[of_others].assign(
        intervention=frame.loc[of_others, "intervention"].str.removeprefix(BESIDE)
    )
    keys = ["ref", "variant", "intervention", "metric"]
    ranges = ranges[[*keys, "value_ci_low", "value_ci_high"]].rename(
        columns={"value_ci_low": "beside low", "value_ci_high": "beside high"}
    )
    rows = frame[~of_others].merge(ranges, on=keys, how="left")
    labels = [subject_and_metric(row) for row in rows.to_dict("records")]
    return rows.assign(of=[of for of, _ in labels], what=[what for _, what in labels])


def subject_and_metric(row: Mapping[Any, Any]) -> tuple[str, str]:
    """Returns what a row is about, the same for rows of one kind, and its metric in few words."""
    of, metric, part = str(row["variant"]), str(row["metric"]), str(row["intervention"])
    kind, _, number = of.partition(" ")
    table, _, rest = part.partition(", ")
    if metric in (PEARSON, COSINE):
        return f"{of}, over dimensions", f"{metric.partition(' ')[0]}, {part.removesuffix(' dimensions')}"
    if metric == NORM:
        above = "above both" if " and " in rest else rest.removesuffix(" digits")
        return f"{table}, norms by frequency", f"{number}: {above}"
    if metric == BEST and kind == "vector":
        return f"{table}, share of each vector at its best frequency", f"{number}: at {rest}"
    if part == LEADING:
        return f"{of}, {LEADING}", metric.replace("the best", "best")
    if part == SPECTRUM:
        return f"{of}, frequencies", metric.removeprefix("frequencies ").removesuffix(" of the components")
    return of, metric


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    columns = [Column("of", "of"), Column("metric", "what"), Column("value [95% CI]", "value", value_text)]
    if frame["baseline"].notna().any():
        columns.append(Column("untrained [95% range]", "baseline", beside_text))
    if frame["p_adjusted"].notna().any():
        columns.append(Column("p adj.", "p_adjusted", filled("p_adjusted", p_value)))
    return columns


def beside_text(row: Mapping[str, Any]) -> str:
    return with_interval(number(row["baseline"]), row["beside low"], row["beside high"])


def overview(
    tables: Sequence[TableView], compared: Mapping[str, tuple[Any, Any]]
) -> plotly.graph_objects.Figure:
    """Draws for each table singular values and vectors and its spectrum; last the positions.

    Args:
        compared: name -> the two rows of W_pos that are compared.
    """
    panels: list[Panel] = []
    for table in tables:
        panels.append(values_panel(table))
        if table.axis is not None:
            panels += [vectors_panel(table), spectrum_panel(table)]
    panels += [positions_panel(name, one, other) for name, (one, other) in compared.items()]
    return draw(panels, barmode="overlay")


def values_panel(table: TableView) -> Panel:
    """Returns the singular values of a table and of untrained ones, and how many make up 50% and 90% of the sum."""
    sizes = table.singular.values
    places = list(range(1, len(sizes) + 1))
    series = {"singular values": Series(places, sizes.tolist(), style={"mode": "lines"}, look=0)}
    if table.beside is not None:
        style: dict[str, Any] = {"mode": "lines", "line": {"dash": "dot"}}
        series["untrained, mean"] = Series(places, table.beside.tolist(), style=style, look=GREY)
    for share, symbol in ((0.5, "diamond"), (0.9, "square")):
        if at := table.singular.needed(share):
            style = {"mode": "markers", "marker": {"symbol": symbol, "size": 11}}
            series[f"{share:.0%} of ΣS"] = Series([at], [float(sizes[at - 1])], style=style, look=1)
    return curve(series, f"singular values of {table.label}", x="number of the singular value", y="size")


def vectors_panel(table: TableView) -> Panel:
    """Returns the first singular vectors, one above the other so that lines do not cross."""
    import numpy as np

    from interp_tasks.papers.miiii.singular import periodicity

    vectors = table.singular.vectors[:, :VECTORS]
    about = periodicity(vectors)
    apart = 2.2 * float(np.abs(vectors).max() or 1.0)
    series = {}
    for k in range(vectors.shape[1]):
        style: dict[str, Any] = {"mode": "lines", "showlegend": False, "line": {"width": 1.2}}
        hover = [f"vector {k + 1}, {table.axis} {at}: {value:.3g}" for at, value in enumerate(vectors[:, k])]
        rows = list(range(len(vectors))), (vectors[:, k] - k * apart).tolist()
        series[f"vector {k + 1}"] = Series(*rows, hover=hover, style=style, look=0)
    ticks = {
        "tickmode": "array",
        "tickvals": [-k * apart for k in range(len(series))],
        "ticktext": [f"{k + 1} ({about.frequency[k]})" for k in range(len(series))],
        "zeroline": False,
    }
    title = f"leading singular vectors of {table.label} (frequency)"
    return curve(series, title, x=str(table.axis), y="vector", y_axis=ticks)


def spectrum_panel(table: TableView) -> Panel:
    """Returns the norm of each frequency of a table, with the bounds that tell it from chance."""
    frequencies = table.frequencies
    assert frequencies is not None
    norms, significant = frequencies.norms, frequencies.significant
    series = {}
    for look, (name, chosen) in enumerate(
        (("norm: not significant", ~significant), ("norm: above relabelled digits", significant))
    ):
        if chosen.any():
            series[name] = Series((chosen.nonzero()[0] + 1).tolist(), norms[chosen].tolist(), look=look)
    places = list(range(1, len(norms) + 1))
    bounds = [("threshold by relabelled digits", [frequencies.threshold] * len(norms), 1, "dash")]
    if table.above_mean is not None:
        bounds.append(("threshold mean + 1 sd", table.above_mean.tolist(), 2, "dashdot"))
    if table.norms_beside is not None:
        bounds.append(("untrained, mean", table.norms_beside.tolist(), GREY, "dot"))
    lines = {
        name: Series(places, values, style={"mode": "lines", "line": {"dash": dash}}, look=look)
        for name, values, look, dash in bounds
    }
    drawn = bars(series, f"Fourier norms of {table.label}", x="frequency", y="norm of cos and sin")
    traces = [{**trace, "offsetgroup": "norm"} for trace in drawn.traces]
    return Panel([*traces, *curve(lines).traces], drawn.title, drawn.x, drawn.y, 260)


def positions_panel(name: str, one: Any, other: Any) -> Panel:
    """Returns two rows of the position embedding against each other, a point per dimension."""
    parts = {
        f"dimensions 0–{PUBLISHED_DIMENSIONS - 1}": (slice(PUBLISHED_DIMENSIONS), 1),
        "other dimensions": (slice(PUBLISHED_DIMENSIONS, None), 0),
    }
    series = {
        label: Series(one[part].tolist(), other[part].tolist(), look=look)
        for label, (part, look) in parts.items()
        if len(one[part])
    }
    axes: dict[str, Any] = {"x": "W_pos at the first position", "y": "at the second position"}
    return scatter(series, f"W_pos, {name}: a point per dimension", height=300, **axes)


def heatmaps(weights: Mapping[str, NDArray[np.float32]]) -> plotly.graph_objects.Figure:
    """Draws a map of each tensor, each in the colours of its own largest entry."""
    import numpy as np

    panels = []
    for name, values in weights.items():
        largest = float(np.abs(values).max())
        # Bytes, which plotly writes as they are: a model has millions of weights.
        levels = np.round(values / largest * STEPS).astype(np.int8)
        title = f"{name} {' × '.join(map(str, values.shape))}, ±{largest:.3g}"
        axes: dict[str, Any] = {"across": "column", "down": "row", "numbers": False, "row": 6}
        drawn = heat(levels, title, unit="of the largest", signed=True, end=float(STEPS), **axes)
        hover = f"[%{{y}}, %{{x}}]: %{{z}} / {STEPS} of {largest:.3g}<extra></extra>"
        scale: dict[str, Any] = {"tickvals": [-STEPS, 0, STEPS], "ticktext": ["−1", "0", "1"]}
        bar = drawn.traces[0]["colorbar"] | scale
        trace = {**drawn.traces[0], "hovertemplate": hover, "colorbar": bar}
        panels.append(Panel([trace], title, drawn.x, drawn.y, drawn.height, drawn.width, bar=True))
    return draw(panels)


def figures(result: Result) -> list[Figure]:
    """Returns of every checkpoint positions, singular values and vectors and spectrum; and every weight as a map."""
    caption = (
        "Singular values: the marks say how many reach 50% and 90% of their sum. Spectrum: norms by frequency, in "
        "the second colour above those of relabelled digits. Dotted: the mean of untrained models."
    )
    drawn = []
    for ref, one in result.data["shown"].items():
        drawn.append(Figure(overview(one.tables, one.positions), f"Embeddings, {ref}", caption))
        if one.weights:
            drawn.append(Figure(heatmaps(one.weights), f"Weights, {ref}", MAPS))
    return drawn
