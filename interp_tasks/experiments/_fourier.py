"""Decomposes embeddings and neurons into frequencies over the task's grid of inputs or of positions.

For each tensor it has the number of key frequencies, then for each frequency (the ``variant``) the ``share of
variance`` and of MLPs how many ``neurons`` follow it, and the rest as ``other frequencies``. The column
``intervention`` says of which tensor, and whether the frequency is key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat, spectrum
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of, recorded
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import THRESHOLD, check_threshold, parse_rule
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs
from interp_tasks.measurement.table import Row, filled, side_by_side
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits.fourier import Spectrum
    from tasks import GridAxis

SHARE, KEYS, NEURONS = "share of variance", "key frequencies", "neurons"
#: How ``intervention`` begins, before the name of the tensor.
SPECTRUM, KEY, OTHER, REST = "spectrum of ", "key frequency of ", "frequency of ", "frequencies of "
#: Where there are no more frequencies than this, each has a row.
MAX_ROWS = 16
SHARES_NOTE = "share of variance: of all features together, over the grid; the constant is no frequency."
INPUTS_NOTE = (
    "Grid of inputs: complete, whatever --samples. frequency k of neurons: all products of {1, cos, sin} of k over the "
    "coordinates; what mixes frequencies is among the other frequencies."
)
POSITIONS_NOTE = (
    "Grid of positions: neurons are averaged over the examples first; frequencies are (row, column)."
)
NEURONS_NOTE = (
    f"neurons: those of whose variance the frequency explains more than {{:g}}. Of more than {MAX_ROWS} frequencies "
    "only key ones and those with neurons have rows."
)
RULE = typer.Option(
    "--rule",
    metavar="NAME[=NUMBER]",
    help="Which frequencies are key: noise, of-largest, above-mean or preferred; as in above-mean=2.",
)
THRESHOLD_OPTION = typer.Option(
    "--threshold", help="A neuron follows what explains more than this share of it."
)


@dataclass(frozen=True)
class Analysed:
    """The spectrum of one tensor of one checkpoint.

    Attributes:
        label, site, layer, position: what it is of.
        spectrum: with one axis of features.
        by: how its frequencies are told apart, as ``Spectrum.bands`` takes it.
        neurons: whether the features are neurons, to be clustered.
        keys: its key frequencies.
    """

    label: str
    site: str
    layer: int | None
    position: int | None
    spectrum: Spectrum
    by: str
    neurons: bool
    keys: tuple[Any, ...] = ()


@experiment(says={"rule": None, "threshold": THRESHOLD})
def fourier(
    refs: Refs,
    *,
    rule: Annotated[str, RULE] = "noise",
    threshold: Annotated[float, THRESHOLD_OPTION] = THRESHOLD,
    **options: Unpack[Options],
) -> Result:
    """Say which frequencies embeddings and neurons are made of, over the task's grid of inputs or of positions.

    Of each tensor: how much of its variance the key frequencies carry, and how many neurons follow each.
    Of a grid of inputs: the embedding of the coordinates' tokens, and neurons at the positions that the task reads,
    over the complete grid whatever ``samples`` is. Of a grid of positions: position embeddings, and neurons
    averaged over the examples.

    Args:
        refs: one or several REFs.
        rule: which frequencies are key: ``"noise"``, ``"of-largest"``, ``"above-mean"`` or ``"preferred"``, or with
            a number of yours, ``"above-mean=2"``; see ``circuits.fourier``.
        threshold: a neuron belongs to the frequency that explains more than this share of its variance.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without a grid.
    """
    name, number = parse_rule(rule)
    check_threshold(threshold)
    spectra: dict[tuple[str, str], Analysed] = {}
    notes = {SHARES_NOTE: None}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        from circuits.fourier import key_frequencies
        from circuits.fourier._spectrum import RULES as MADE

        axes, examples = read_axes(subject), len(subject.tokens)
        tensors, shared, note = position_spectra, {}, POSITIONS_NOTE
        if axes[0].position is not None:
            # On a complete grid nothing is sampled and nothing drawn.
            tensors, shared, note = input_spectra, {"split": "grid"}, INPUTS_NOTE
            examples = math.prod(len(axis.values) for axis in axes)
        rows: list[Row] = []
        done: dict[str, Any] = {}
        for one in tensors(subject, axes):
            found = key_frequencies(one.spectrum, MADE[name](number), one.by)
            one = replace(one, keys=found.keys)
            rows += ({**row, **shared, "n": examples} for row in rows_of(one, threshold))
            spectra[str(subject.labels["ref"]), one.label] = one
            notes.update(dict.fromkeys((f"{found.rule}.", note)))
            keys = [list(key) if isinstance(key, tuple) else key for key in found.keys]
            done[one.label] = {
                "grid": dict(one.spectrum.grid.axes),
                "key frequencies": keys,
                "rule": found.rule,
            }
        return Measured(pandas.DataFrame(rows), done)

    config = {"rule": f"{name}={number:g}", "threshold": threshold}
    result = measure("fourier", refs, options, measure_checkpoint, config=config)
    return replace(result, notes=(*notes, NEURONS_NOTE.format(threshold)), data={"spectra": spectra})


def read_axes(subject: LoadedCheckpoint) -> tuple[GridAxis, ...]:
    """Returns the grid of a checkpoint's task.

    Raises:
        UserError: for no task, for a task without a grid or with half of one.
    """
    task = subject.task
    if task is None:
        raise UserError(
            "fourier needs a task that declares a grid: leave --tokens out, or give --task NAME instead"
        )
    axes = task.grid_axes()
    if not axes:
        raise UserError(
            f"task {task.name!r} declares no grid of inputs or positions (grid_axes), so there is no spectrum to take"
        )
    if len({axis.position is None for axis in axes}) > 1:
        raise UserError(f"task {task.name!r}: grid_axes are of the inputs or of the positions, not both")
    return axes


def input_spectra(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields spectra of embeddings over each coordinate and of neurons over the complete grid of inputs."""
    from circuits.fourier import spectrum

    task: Any = subject.task
    weight = subject.model.W_E
    tables = {axis.values: axis.name for axis in axes}
    for values, axis_name in tables.items():
        label = "W_E" if len(tables) == 1 else f"W_E ({axis_name})"
        rows = weight[list(values)]
        named = {"digit" if len(tables) == 1 else axis_name: len(values)}
        yield Analysed(label, "embed", None, None, spectrum(rows, named), "block", False)
    tokens = task.input_grid().tokens.to(subject.tokens.device)
    grid, positions = grid_of(axes, tokens), list(task.read_positions)
    seen = recorded(subject.model, tokens, neuron_hooks(subject.model), lambda values: values[:, positions])
    for layer, neurons in enumerate(seen.values()):
        for index, position in enumerate(positions):
            at = f", position {position}" if len(positions) > 1 else ""
            spectra = spectrum(neurons[:, index], grid)
            yield Analysed(f"mlp_post.{layer}{at}", "mlp_post", layer, position, spectra, "block", True)


def position_spectra(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields spectra, over positions, of their embeddings and of each neuron's mean over the examples."""
    from circuits.fourier import Grid, spectrum

    grid = Grid({axis.name: len(axis.values) for axis in axes})
    table = dict(subject.model.named_parameters()).get("pos_embed.W_pos")
    if table is not None:
        spectra = spectrum(table[: grid.cells], grid)
        yield Analysed("W_pos", "pos_embed", None, None, spectra, "component", False)

    def sums(values: Tensor) -> Tensor:
        return values[:, : grid.cells].double().sum(0, keepdim=True)

    seen = recorded(subject.model, subject.tokens, neuron_hooks(subject.model), sums)
    for layer, summed in enumerate(seen.values()):
        mean = spectrum(summed.sum(0) / len(subject.tokens), grid)
        yield Analysed(f"mlp_post.{layer}", "mlp_post", layer, None, mean, "component", True)


def neuron_hooks(model: Any) -> list[str]:
    hooks = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    return [hook for hook in hooks if hook in model.hook_dict]


def rows_of(one: Analysed, threshold: float) -> list[Row]:
    """Returns shares, keys and neurons by frequency, then those of all other frequencies together."""
    from circuits.fourier import clusters

    bands = one.spectrum.bands(one.by).total()
    shares = dict(zip(bands.labels, bands.share.tolist(), strict=True))
    sizes = clusters(one.spectrum, threshold, one.by).sizes if one.neurons else {}
    few = len(shares) <= MAX_ROWS
    listed = [label for label in bands.labels if few or label in one.keys or label in sizes]
    rows: list[Row] = []

    def add(kind: str, variant: str, metric: str, value: float) -> None:
        place = {"site": one.site, "layer": one.layer, "position": one.position}
        about = {"variant": variant, "intervention": kind + one.label, "metric": metric}
        rows.append({**place, **about, "value": float(value)})

    add(SPECTRUM, "all frequencies", KEYS, len(one.keys))
    for label in listed:
        kind = KEY if label in one.keys else OTHER
        add(kind, f"frequency {label}", SHARE, shares[label])
        if one.neurons:
            add(kind, f"frequency {label}", NEURONS, sizes.get(label, 0))
    if len(listed) < len(shares) or sum(bands.degrees) < one.spectrum.grid.cells - 1:
        # A tensor that does not vary has no shares at all.
        left = max(0.0, float(any(shares.values())) - sum(shares[label] for label in listed))
        add(REST, "other frequencies", SHARE, left)
    if one.neurons:
        add(REST, "no frequency", NEURONS, one.spectrum.power.shape[-1] - sum(sizes.values()))
    return rows


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of a frequency's metrics; ``key`` marks key frequencies and counts them in the row of all."""
    tensors = frame["intervention"].str.partition(" of ")[2]

    def cells(row: Row) -> Row:
        if row["metric"] == KEYS:
            return {"key": f"{row['value']:.0f} key"}
        return {"key": "key" if row["intervention"].startswith(KEY) else "", row["metric"]: row["value"]}

    blank = frame.assign(
        **{SHARE: math.nan, NEURONS: math.nan},
        tensor=tensors,
        variant=frame["variant"].str.removeprefix("frequency "),
    )
    return side_by_side(blank, lambda row: (row["ref"], row["tensor"], row["variant"]), cells)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    return [
        Column("tensor", "tensor"),
        Column("frequency", "variant"),
        Column("", "key"),
        Column(SHARE, SHARE, filled(SHARE, ".4f")),
        Column(NEURONS, NEURONS, filled(NEURONS, ".0f")),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns for each tensor of each checkpoint bars by frequency, and over two coordinates a map of their pairs."""
    import pandas

    caption = (
        "Bars: the share of the variance that each frequency carries, key frequencies in the second colour. "
        "Dashes: what it would carry of white noise. Maps: each combination of the two coordinates' frequencies."
    )
    panels = []
    for (ref, label), one in result.data["spectra"].items():
        total, axes = one.spectrum.total(), one.spectrum.grid.axes
        bands = total.bands(one.by)
        shares, cells = (100 * bands.share).tolist(), one.spectrum.grid.cells
        labels = [str(each) for each in bands.labels]
        noise = [100 * degrees / (cells - 1) for degrees in bands.degrees]
        across = f"frequencies ({', '.join(axes)})" if one.by == "component" else "frequency"
        keys = [str(key) for key in one.keys]
        panels.append(spectrum(labels, shares, keys, f"{label}<br>{ref}", x=across, noise=noise))
        if len(axes) == 2:
            down, across = (f"frequency in {name}" for name in axes)
            title = f"{label}: pairs of frequencies<br>{ref}"
            options: dict[str, Any] = {"across": across, "down": down, "numbers": False, "row": 6}
            pairs = pandas.DataFrame(100 * total.share.numpy())
            panels.append(heat(pairs, title, unit="share of variance (%)", **options))
    return [Figure(draw(panels, barmode="overlay"), "Share of variance by frequency", caption)]
