"""Decomposes embeddings and neurons into frequencies over the task's grid of inputs or of positions.

For each tensor it has the number of key frequencies, then for each frequency (the ``variant``) the ``share of
variance`` and of MLPs how many ``neurons`` follow it, and the rest as ``other frequencies``. The column
``intervention`` says of which tensor, and whether the frequency is key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat, spectrum
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of, in_passes, recorded
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
RULE = typer.Option(
    "--rule",
    metavar="NAME[=NUMBER]",
    help="Which frequencies are key: noise, of-largest, above-mean or preferred; as in above-mean=2.",
)
THRESHOLD_OPTION = typer.Option(
    "--threshold", help="A neuron follows what explains more than this share of it."
)
EVERY = typer.Option("--every", help="A row for every frequency.")


@dataclass(frozen=True)
class Analysed:
    """The spectrum of one tensor of one checkpoint.

    Attributes:
        label, site, layer, position: what it is of.
        spectrum: with one axis of features.
        by: how its frequencies are note_texts apart, as ``Spectrum.bands`` takes it.
        neurons: whether the features are neurons, to be clustered.
    """

    label: str
    site: str
    layer: int | None
    position: int | None
    spectrum: Spectrum
    by: str
    neurons: bool


@dataclass(frozen=True)
class Whole:
    """The spectrum of a tensor over all its features, the axis that labels frequencies, and its key frequencies."""

    spectrum: Spectrum
    by: str
    keys: tuple[Any, ...]

    def bars(self) -> pandas.DataFrame:
        """Returns a row per frequency: ``share``, the share that white ``noise`` would have, and ``key``."""
        import pandas

        bands = self.spectrum.bands(self.by)
        names = ", ".join(self.spectrum.grid.axes)
        kind = f"frequencies ({names})" if self.by == "component" else "frequency"
        return pandas.DataFrame(
            {
                "share": bands.share.numpy(),
                "noise": [degrees / (self.spectrum.grid.cells - 1) for degrees in bands.degrees],
                "key": [label in self.keys for label in bands.labels],
            },
            index=pandas.Index([str(label) for label in bands.labels], name=kind),
        )

    def pairs(self) -> pandas.DataFrame | None:
        """Returns the share of each pair of frequencies; ``None`` unless there are two coordinates."""
        import pandas

        if len(self.spectrum.grid.axes) != 2:
            return None
        first, second = self.spectrum.grid.axes
        return pandas.DataFrame(self.spectrum.share.numpy()).rename_axis(index=first, columns=second)


@experiment(says={"rule": None, "threshold": THRESHOLD})
def fourier(
    refs: Refs,
    *,
    rule: Annotated[str, RULE] = "noise",
    threshold: Annotated[float, THRESHOLD_OPTION] = THRESHOLD,
    every: Annotated[bool, EVERY] = False,
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
        every: a row for every frequency, also where there are more than 16, of which otherwise only key frequencies
            and those with neurons have rows.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without a grid.
    """
    name, number = parse_rule(rule)
    check_threshold(threshold)
    spectra = Spectra(name, number, threshold, every)
    config = {"rule": f"{name}={number:g}", "threshold": threshold}
    result = measure("fourier", refs, options, spectra.measured, config=config)
    # On a complete grid nothing is sampled and nothing drawn.
    result.frame.loc[result.frame["ref"].isin(spectra.on_inputs), "split"] = "grid"
    notes = (*spectra.rules, *spectra.notes(set(result.frame["ref"])))
    return replace(result, notes=notes, data={"spectra": spectra.wholes})


@dataclass(frozen=True)
class Spectra:
    """By which rule frequencies are key, and what was found.

    Attributes:
        wholes: the spectrum of each tensor, by REF and label.
        on_inputs: REFs of checkpoints whose task has a grid of inputs.
        rules: the rules in words.
    """

    name: str
    number: float
    threshold: float
    every: bool
    wholes: dict[tuple[str, str], Whole] = field(default_factory=dict)
    on_inputs: list[str] = field(default_factory=list)
    rules: dict[str, None] = field(default_factory=dict)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures the spectrum of each tensor of one checkpoint."""
        import pandas

        from circuits.fourier import key_frequencies
        from circuits.fourier._spectrum import RULES as MADE

        ref, axes = str(subject.labels["ref"]), read_axes(subject)
        examples, tensors = len(subject.tokens), over_positions
        if axes[0].position is not None:
            self.on_inputs.append(ref)
            examples, tensors = math.prod(len(axis.values) for axis in axes), over_inputs
        rows: list[Row] = []
        done: dict[str, Any] = {}
        for one in tensors(subject, axes):
            keys = key_frequencies(one.spectrum, MADE[self.name](self.number), one.by)
            rows += rows_of(one, keys.keys, examples, self.threshold, every=self.every)
            self.wholes[ref, one.label] = Whole(one.spectrum.total(), one.by, keys.keys)
            self.rules[f"{keys.rule}."] = None
            done[one.label] = {
                "grid": dict(one.spectrum.grid.axes),
                "frequencies by": one.by,
                "key frequencies": [list(key) if isinstance(key, tuple) else key for key in keys.keys],
                "rule": keys.rule,
            }
        return Measured(pandas.DataFrame(rows), done)

    def notes(self, refs: set[str]) -> Iterator[str]:
        """Yields the notes below the table."""
        yield "share of variance: of all features together, over the grid; the constant is no frequency."
        if self.on_inputs:
            yield (
                "Grid of inputs: complete, whatever --samples. frequency k of neurons: all products of {1, cos, sin} "
                "of k over the coordinates; what mixes frequencies is among the other frequencies."
            )
        if refs - set(self.on_inputs):
            yield "Grid of positions: neurons are averaged over the examples first; frequencies are (row, column)."
        yield f"neurons: those of whose variance the frequency explains more than {self.threshold:g}."
        if not self.every:
            yield (
                f"Of more than {MAX_ROWS} frequencies only key ones and those with neurons have rows; --every shows "
                "all."
            )


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


def over_inputs(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
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


def over_positions(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields spectra, over positions, of their embeddings and of each neuron's mean over the examples."""
    from circuits.fourier import Grid, spectrum

    grid = Grid({axis.name: len(axis.values) for axis in axes})
    table = dict(subject.model.named_parameters()).get("pos_embed.W_pos")
    if table is not None:
        spectra = spectrum(table[: grid.cells], grid)
        yield Analysed("W_pos", "pos_embed", None, None, spectra, "component", False)
    for layer, neurons in enumerate(mean_neurons(subject.model, subject.tokens, grid.cells)):
        yield Analysed(
            f"mlp_post.{layer}", "mlp_post", layer, None, spectrum(neurons, grid), "component", True
        )


def neuron_hooks(model: Any) -> list[str]:
    hooks = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    return [hook for hook in hooks if hook in model.hook_dict]


def mean_neurons(model: Any, tokens: Tensor, positions: int) -> list[Tensor]:
    """Returns each layer's mean over examples [pos neuron] at the first positions, float64."""
    from circuits import cache

    hooks = neuron_hooks(model)
    sums: list[list[Tensor]] = []
    for part in in_passes(tokens) if hooks else ():
        seen = cache(model, part, hooks)
        sums.append([seen[hook][:, :positions].double().sum(0) for hook in hooks])
    return [sum(parts[1:], start=parts[0]) / len(tokens) for parts in zip(*sums, strict=True)]


def rows_of(one: Analysed, keys: Sequence[Any], examples: int, threshold: float, *, every: bool) -> list[Row]:
    """Returns shares, keys and neurons by frequency, then those of all other frequencies together."""
    from circuits.fourier import clusters

    bands = one.spectrum.bands(one.by).total()
    shares = dict(zip(bands.labels, bands.share.tolist(), strict=True))
    sizes = clusters(one.spectrum, threshold, one.by).sizes if one.neurons else {}
    every = every or len(shares) <= MAX_ROWS
    listed = [label for label in bands.labels if every or label in keys or label in sizes]
    rows: list[Row] = []

    def add(kind: str, variant: str, metric: str, value: float) -> None:
        place = {"site": one.site, "layer": one.layer, "position": one.position, "n": examples}
        about = {"variant": variant, "intervention": kind + one.label, "metric": metric}
        rows.append({**place, **about, "value": float(value)})

    add(SPECTRUM, "all frequencies", KEYS, len(keys))
    for label in listed:
        kind = KEY if label in keys else OTHER
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
    kinds = (SPECTRUM, KEY, OTHER, REST)

    def tensor_of(row: Row) -> tuple[str, str]:
        kind = next(one for one in kinds if row["intervention"].startswith(one))
        return kind, row["intervention"].removeprefix(kind)

    def cells(row: Row) -> Row:
        kind, tensor = tensor_of(row)
        shown = {"tensor": tensor, "variant": row["variant"].removeprefix("frequency ")}
        if row["metric"] == KEYS:
            return {**shown, "key": f"{row['value']:.0f} key"}
        return {**shown, "key": "key" if kind == KEY else "", row["metric"]: row["value"]}

    blank = frame.assign(**{SHARE: math.nan, NEURONS: math.nan})
    return side_by_side(blank, lambda row: (row["ref"], tensor_of(row)[1], row["variant"]), cells)


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
    caption = (
        "Bars: the share of the variance that each frequency carries, key frequencies in the second colour. "
        "Dashes: what it would carry of white noise. Maps: each combination of the two coordinates' frequencies."
    )
    panels = []
    for (ref, label), whole in result.data["spectra"].items():
        table = whole.bars()
        shares, noise = (100 * table["share"]).tolist(), (100 * table["noise"]).tolist()
        keys = table.index[table["key"].astype(bool)].tolist()
        axis = str(table.index.name)
        panels.append(spectrum(table.index.tolist(), shares, keys, f"{label}<br>{ref}", x=axis, noise=noise))
        if (pairs := whole.pairs()) is not None:
            down, across = (f"frequency in {name}" for name in (pairs.index.name, pairs.columns.name))
            axes: dict[str, Any] = {"across": across, "down": down, "numbers": False, "row": 6}
            title = f"{label}: pairs of frequencies<br>{ref}"
            panels.append(heat(100 * pairs, title, unit="share of variance (%)", **axes))
    return [Figure(draw(panels, barmode="overlay"), "Share of variance by frequency", caption)]
