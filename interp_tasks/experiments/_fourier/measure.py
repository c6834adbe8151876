"""Decomposes embeddings and neurons into frequencies over the task's grid of inputs or of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.experiments._fourier.table import KEY, KEYS, NEURONS, OTHER, REST, SHARE, SPECTRUM
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import THRESHOLD, check_threshold, read_rule
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import TOKENS_PER_PASS, Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits.fourier import Spectrum
    from tasks import GridAxis

#: Where there are no more frequencies than this, each has a row.
MAX_ROWS = 16


@dataclass(frozen=True)
class Analysed:
    """The spectrum of one tensor of one checkpoint.

    Attributes:
        label, site, layer, position: what it is of.
        spectrum: with one axis of features.
        by: how its frequencies are told apart, as ``Spectrum.bands`` takes it.
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


@dataclass(frozen=True, repr=False)
class FourierResult(Result):
    """A :class:`Result` with the spectra behind it, by REF and tensor."""

    spectra: Mapping[tuple[str, str], Whole] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """Returns the share of each frequency, key frequencies marked; over two coordinates each combination too."""
        from interp_tasks.experiments._fourier.figure import figure

        maps = {key: one.pairs() for key, one in self.spectra.items()}
        bars = figure(
            {key: one.bars() for key, one in self.spectra.items()},
            {key: one for key, one in maps.items() if one is not None},
        )
        return self.titled(bars, self.heading())

    def heading(self) -> str:
        return "Share of variance by frequency"

    def caption(self) -> str:
        return (
            "Bars: the share of the variance that each frequency carries, key frequencies in the second colour. "
            "Dashes: what it would carry of white noise. Maps: each combination of the two coordinates' frequencies."
        )


@experiment(says={"rule": None, "threshold": THRESHOLD})
def fourier(
    refs: str | Sequence[str],
    *,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            metavar="NAME[=NUMBER]",
            help="Which frequencies are key: noise, of-largest, above-mean or preferred; as in above-mean=2.",
        ),
    ] = "noise",
    threshold: Annotated[
        float, typer.Option("--threshold", help="A neuron follows what explains more than this share of it.")
    ] = THRESHOLD,
    every: Annotated[bool, typer.Option("--every", help="A row for every frequency.")] = False,
    **options: Unpack[Options],
) -> FourierResult:
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        A :class:`FourierResult`. For each tensor it has the number of key frequencies, then for each frequency (the
        ``variant``) the ``share of variance`` and of MLPs how many ``neurons`` follow it, and the rest as ``other
        frequencies``. The column ``intervention`` says of which tensor, and whether the frequency is key.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without a grid.
    """
    name, number = read_rule(rule)
    check_threshold(threshold)
    spectra: dict[tuple[str, str], Whole] = {}
    on_inputs: list[str] = []
    rules: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures the spectrum of each tensor of one checkpoint."""
        ref = str(subject.labels["ref"])
        axes = read_axes(subject)
        examples = len(subject.tokens)
        if axes[0].position is not None:
            on_inputs.append(ref)
            examples = cells(axes)
        rows: list[dict[str, Any]] = []
        done: dict[str, Any] = {}
        for one in analysed(subject, axes):
            tensor_rows = rows_of(one, examples, name, number, threshold, every)
            rows += tensor_rows.rows
            done[one.label] = tensor_rows.described
            spectra[ref, one.label] = Whole(one.spectrum.total(), one.by, tensor_rows.keys)
            rules[f"{tensor_rows.rule}."] = None
        import pandas

        return Measured(pandas.DataFrame(rows), done)

    result = measure(
        "fourier",
        refs,
        options,
        measure_checkpoint,
        config={"rule": f"{name}={number:g}", "threshold": threshold},
    )
    frame = result.frame
    # On a complete grid nothing is sampled and nothing drawn.
    frame.loc[frame["ref"].isin(on_inputs), "split"] = "grid"
    return FourierResult.of(
        result,
        frame=frame,
        notes=(*rules, *notes(threshold, every, on_inputs, frame)),
        spectra=spectra,
    )


def notes(threshold: float, every: bool, on_inputs: list[str], frame: Any) -> Iterator[str]:
    yield "share of variance: of all features together, over the grid; the constant is no frequency."
    if on_inputs:
        yield (
            "Grid of inputs: complete, whatever --samples. frequency k of neurons: all products of {1, cos, sin} of "
            "k over the coordinates; what mixes frequencies is among the other frequencies."
        )
    if set(frame["ref"]) - set(on_inputs):
        yield "Grid of positions: neurons are averaged over the examples first; frequencies are (row, column)."
    yield f"neurons: those of whose variance the frequency explains more than {threshold:g}."
    if not every:
        yield (
            f"Of more than {MAX_ROWS} frequencies only key ones and those with neurons have rows; --every shows all."
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
    places = [axis.position is None for axis in axes]
    sizes = " × ".join(str(len(axis.values)) for axis in axes)
    if any(places) and not all(places):
        raise UserError(f"task {task.name!r}: grid_axes are of the inputs or of the positions, not both")
    if not any(places) and not hasattr(task, "input_grid"):
        raise UserError(
            f"task {task.name!r} has grid_axes of its inputs, and no input_grid() to give the inputs"
        )
    if all(places) and cells(axes) > task.sequence_length:
        raise UserError(
            f"task {task.name!r}: its grid is {sizes}, its sequence {task.sequence_length} positions long"
        )
    return axes


def cells(axes: Sequence[GridAxis]) -> int:
    count = 1
    for axis in axes:
        count *= len(axis.values)
    return count


def analysed(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields the tensors of one checkpoint, in the order in which the model computes them."""
    if axes[0].position is None:
        yield from over_positions(subject, axes)
    else:
        yield from over_inputs(subject, axes)


def over_inputs(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields spectra of embeddings over each coordinate and of neurons over the complete grid of inputs."""
    from circuits.fourier import Grid, spectrum

    task: Any = subject.task
    weight = subject.model.W_E
    tables = {axis.values: axis.name for axis in axes}
    for values, axis_name in tables.items():
        label = "W_E" if len(tables) == 1 else f"W_E ({axis_name})"
        rows = weight[list(values)]
        named = {"digit" if len(tables) == 1 else axis_name: len(values)}
        yield Analysed(label, "embed", None, None, spectrum(rows, named), "block", False)
    tokens = task.input_grid().tokens.to(subject.tokens.device)
    grid = Grid.of_inputs(
        tokens, {axis.name: int(axis.position or 0) for axis in axes}, [axis.values for axis in axes]
    )
    positions = task.read_positions
    for layer, neurons in enumerate(neurons_at(subject.model, tokens, positions)):
        for index, position in enumerate(positions):
            at = f", position {position}" if len(positions) > 1 else ""
            spectra = spectrum(neurons[:, index], grid)
            yield Analysed(f"mlp_post.{layer}{at}", "mlp_post", layer, position, spectra, "block", True)


def over_positions(subject: LoadedCheckpoint, axes: Sequence[GridAxis]) -> Iterator[Analysed]:
    """Yields spectra, over positions, of their embeddings and of each neuron's mean over the examples."""
    from circuits.fourier import Grid, spectrum

    grid = Grid({axis.name: len(axis.values) for axis in axes})
    used = tuple(range(grid.cells))
    table = dict(subject.model.named_parameters()).get("pos_embed.W_pos")
    if table is not None:
        spectra = spectrum(table[: grid.cells], grid)
        yield Analysed("W_pos", "pos_embed", None, None, spectra, "component", False)
    for layer, neurons in enumerate(mean_neurons(subject.model, subject.tokens, used)):
        yield Analysed(
            f"mlp_post.{layer}", "mlp_post", layer, None, spectrum(neurons, grid), "component", True
        )


def passes(model: Any, tokens: Tensor, positions: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yields neurons of every layer [batch pos neuron] at some positions, a few examples at a time."""
    from circuits import cache

    hooks = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    hooks = [hook for hook in hooks if hook in model.hook_dict]
    step = max(1, TOKENS_PER_PASS // tokens.shape[1])
    for start in range(0, len(tokens) if hooks else 0, step):
        seen = cache(model, tokens[start : start + step], hooks)
        yield [seen[hook][:, list(positions)] for hook in hooks]


def neurons_at(model: Any, tokens: Tensor, positions: Sequence[int]) -> list[Tensor]:
    """Returns neurons [example pos neuron] by layer."""
    import torch

    return [torch.cat(parts) for parts in zip(*passes(model, tokens, positions), strict=True)]


def mean_neurons(model: Any, tokens: Tensor, positions: Sequence[int]) -> list[Tensor]:
    """Returns each layer's mean over examples [pos neuron], float64."""
    sums = [[part.double().sum(0) for part in parts] for parts in passes(model, tokens, positions)]
    return [sum(parts[1:], start=parts[0]) / len(tokens) for parts in zip(*sums, strict=True)]


@dataclass(frozen=True)
class Rows:
    """The rows of one tensor, without the labels of its checkpoint, and the rule and frequencies to record."""

    rows: list[dict[str, Any]]
    keys: tuple[Any, ...]
    rule: str
    described: dict[str, Any]


def rows_of(one: Analysed, examples: int, name: str, number: float, threshold: float, every: bool) -> Rows:
    """Returns shares, keys and neurons by frequency, then those of all other frequencies together."""
    from circuits.fourier import clusters, key_frequencies
    from circuits.fourier._key_frequencies import RULES as MADE

    bands = one.spectrum.bands(one.by).total()
    keys = key_frequencies(one.spectrum, MADE[name](number), one.by)
    shares = dict(zip(bands.labels, bands.share.tolist(), strict=True))
    sizes = clusters(one.spectrum, threshold, one.by).sizes if one.neurons else {}
    every = every or len(shares) <= MAX_ROWS
    listed = [label for label in bands.labels if every or label in keys.keys or label in sizes]
    common = {"site": one.site, "layer": one.layer, "position": one.position, "n": examples}
    rows: list[dict[str, Any]] = [
        {
            **common,
            "variant": "all frequencies",
            "intervention": SPECTRUM + one.label,
            "metric": KEYS,
            "value": float(len(keys.keys)),
        }
    ]
    for label in listed:
        values = {SHARE: shares[label]}
        if one.neurons:
            values[NEURONS] = float(sizes.get(label, 0))
        kind = KEY if label in keys.keys else OTHER
        about = {**common, "variant": f"frequency {label}", "intervention": kind + one.label}
        rows += [{**about, "metric": metric, "value": value} for metric, value in values.items()]
    rest = {"intervention": REST + one.label, **common}
    if len(listed) < len(shares) or sum(bands.degrees) < one.spectrum.grid.cells - 1:
        # A tensor that does not vary has no shares at all.
        left = max(0.0, float(any(shares.values())) - sum(shares[label] for label in listed))
        rows.append({**rest, "variant": "other frequencies", "metric": SHARE, "value": left})
    if one.neurons:
        none = one.spectrum.power.shape[-1] - sum(sizes.values())
        rows.append({**rest, "variant": "no frequency", "metric": NEURONS, "value": float(none)})
    described = {
        "grid": dict(one.spectrum.grid.axes),
        "frequencies by": one.by,
        "key frequencies": [list(key) if isinstance(key, tuple) else key for key in keys.keys],
        "rule": keys.rule,
    }
    return Rows(rows, keys.keys, keys.rule, described)
