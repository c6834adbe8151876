"""Decomposes embeddings and neurons into frequencies over the task's grid of inputs.

For each tensor it has the number of key frequencies, then for each frequency (the ``variant``) the ``share of
variance`` and of MLPs how many ``neurons`` follow it, and the rest as ``other frequencies``. The column
``intervention`` says of which tensor, and whether the frequency is key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import heatmap, spectrum
from interp_tasks.measurement.activations_in_passes import record_in_passes
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, Refs
from interp_tasks.measurement.measure_checkpoints import MeasuredRows, measure
from interp_tasks.measurement.option_parsing import THRESHOLD, parse_frequency_rule
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, cell_writer, experiment, merge_rows
from interp_tasks.pages import Column, Figure
from interp_tasks.papers.input_grid_and_answers import GridInputs

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from circuits.fourier import Spectrum

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
NEURONS_NOTE = (
    f"neurons: those of whose variance the frequency explains more than {THRESHOLD:g}. Of more than {MAX_ROWS} "
    "frequencies only key ones and those with neurons have rows."
)
RULE = typer.Option(
    "--rule",
    metavar="NAME[=NUMBER]",
    help="Which frequencies are key: noise, of-largest, above-mean or preferred; as in above-mean=2.",
)


@dataclass(frozen=True)
class TensorSpectrum:
    """The spectrum of one tensor of one checkpoint, with one axis of features, and its key frequencies.

    Attributes:
        label: what it is of.
        place: the columns ``site``, ``layer``, ``position`` that say so.
    """

    label: str
    place: Mapping[str, Any]
    spectrum: Spectrum
    keys: tuple[Any, ...] = ()

    @property
    def is_of_neurons(self) -> bool:
        """Whether the features are neurons, to be clustered."""
        return self.place["site"] == "mlp_post"


@experiment(says={"rule": None}, without=("tokens", "prompts", "samples", "split"))
def fourier(refs: Refs, *, rule: Annotated[str, RULE] = "noise", **options: Unpack[Options]) -> Result:
    """Say which frequencies embeddings and neurons are made of, over the task's grid of inputs.

    Of each tensor: how much of its variance the key frequencies carry, and how many neurons follow each.
    Tensors are the embedding of the coordinates' tokens, and neurons at the positions that the task reads, over the
    complete grid.

    Args:
        refs: one or several REFs.
        rule: which frequencies are key: ``"noise"``, ``"of-largest"``, ``"above-mean"`` or ``"preferred"``, or with
            a number of yours, ``"above-mean=2"``; see ``circuits.fourier``.
        options: seed, task, task_config, device, progress: see :class:`Examples`.
    """
    name, number = parse_frequency_rule(rule)
    spectra: dict[tuple[str, str], TensorSpectrum] = {}
    rules: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> MeasuredRows:
        import pandas

        from circuits.fourier import key_frequencies

        rows: list[Row] = []
        done: dict[str, Any] = {}
        inputs = GridInputs.of(subject.task, "fourier")
        for one in tensor_spectra(subject, inputs):
            found = key_frequencies(one.spectrum, name, number)
            one = spectra[str(subject.labels["ref"]), one.label] = replace(one, keys=found.keys)
            rows += spectrum_rows(one)
            rules.setdefault(f"{found.rule}.")
            grid, keys = dict(one.spectrum.grid.axes), list(found.keys)
            done[one.label] = {"grid": grid, "key frequencies": keys, "rule": found.rule}
        # On a complete grid nothing is sampled and nothing drawn.
        return MeasuredRows(pandas.DataFrame(rows).assign(split="grid", n=inputs.grid.cells), done)

    config = {"rule": f"{name}={number:g}"}
    check = lambda subject: GridInputs.of(subject.task, "fourier")  # noqa: E731
    result = measure("fourier", refs, options, measure_checkpoint, config=config, check=check)
    return replace(result, notes=(SHARES_NOTE, *rules, INPUTS_NOTE, NEURONS_NOTE), data={"spectra": spectra})


def tensor_spectra(subject: LoadedCheckpoint, inputs: GridInputs) -> Iterator[TensorSpectrum]:
    """Yields spectra of embeddings over each coordinate and of neurons over the complete grid of inputs."""
    from circuits.fourier import spectrum

    def place_columns(site: str, layer: int | None = None, position: int | None = None) -> dict[str, Any]:
        return {"site": site, "layer": layer, "position": position}

    task: Any = subject.task
    model = subject.model
    tables = {axis.values: axis.name for axis in inputs.axes}
    for values, axis_name in tables.items():
        label, name = ("W_E", "digit") if len(tables) == 1 else (f"W_E ({axis_name})", axis_name)
        yield TensorSpectrum(
            label, place_columns("embed"), spectrum(model.W_E[list(values)], {name: len(values)})
        )
    tokens, positions = inputs.tokens.to(subject.tokens.device), list(task.read_positions)
    hooks = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    hooks = [hook for hook in hooks if hook in model.hook_dict]
    seen = record_in_passes(model, tokens, hooks, lambda values: values[:, positions])
    for layer, neurons in enumerate(seen.values()):
        for index, position in enumerate(positions):
            at = f", position {position}" if len(positions) > 1 else ""
            of_neurons = spectrum(neurons[:, index], inputs.grid)
            yield TensorSpectrum(
                f"mlp_post.{layer}{at}", place_columns("mlp_post", layer, position), of_neurons
            )


def spectrum_rows(one: TensorSpectrum) -> list[Row]:
    """Returns shares, keys and neurons by frequency, then those of all other frequencies together."""
    from circuits.fourier import clusters

    bands = one.spectrum.bands().total()
    shares = dict(zip(bands.labels, bands.share.tolist(), strict=True))
    sizes = clusters(one.spectrum, THRESHOLD).sizes if one.is_of_neurons else {}
    few = len(shares) <= MAX_ROWS
    listed = [label for label in bands.labels if few or label in one.keys or label in sizes]
    found: list[tuple[str, str, str, float]] = [(SPECTRUM, "all frequencies", KEYS, len(one.keys))]
    for label in listed:
        kind, variant = KEY if label in one.keys else OTHER, f"frequency {label}"
        found.append((kind, variant, SHARE, shares[label]))
        if one.is_of_neurons:
            found.append((kind, variant, NEURONS, sizes.get(label, 0)))
    if len(listed) < len(shares) or sum(bands.degrees) < one.spectrum.grid.cells - 1:
        # A tensor that does not vary has no shares at all.
        left = max(0.0, float(any(shares.values())) - sum(shares[label] for label in listed))
        found.append((REST, "other frequencies", SHARE, left))
    if one.is_of_neurons:
        found.append((REST, "no frequency", NEURONS, one.spectrum.power.shape[-1] - sum(sizes.values())))
    return [
        {
            **one.place,
            "variant": variant,
            "intervention": kind + one.label,
            "metric": metric,
            "value": float(value),
        }
        for kind, variant, metric, value in found
    ]


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
    return merge_rows(blank, lambda row: (row["ref"], row["tensor"], row["variant"]), cells)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    return [
        Column("tensor", "tensor"),
        Column("frequency", "variant"),
        Column("", "key"),
        Column(SHARE, SHARE, cell_writer(SHARE, ".4f")),
        Column(NEURONS, NEURONS, cell_writer(NEURONS, ".0f")),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns for each tensor of each checkpoint bars by frequency, and over two coordinates a map of their pairs."""
    caption = (
        "Bars: the share of the variance that each frequency carries, key frequencies in the second colour. "
        "Dashes: what it would carry of white noise. Maps: each combination of the two coordinates' frequencies."
    )
    panels = []
    for (ref, label), one in result.data["spectra"].items():
        total, axes, cells = one.spectrum.total(), one.spectrum.grid.axes, one.spectrum.grid.cells
        bands = total.bands()
        noise = [100 * degrees / (cells - 1) for degrees in bands.degrees]
        labels, keys = (list(map(str, names)) for names in (bands.labels, one.keys))
        panels.append(spectrum(labels, (100 * bands.share).tolist(), keys, f"{label}<br>{ref}", noise=noise))
        if len(axes) == 2:
            down, across = (f"frequency in {name}" for name in axes)
            options: dict[str, Any] = {"across": across, "down": down, "numbers": False, "row": 6}
            pairs, title = 100 * total.share.numpy(), f"{label}: pairs of frequencies<br>{ref}"
            panels.append(heatmap(pairs, title, unit="share of variance (%)", **options))
    return [Figure(draw_panels(panels, barmode="overlay"), "Share of variance by frequency", caption)]
