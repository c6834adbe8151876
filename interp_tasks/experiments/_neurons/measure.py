"""Neurons and attention weights as functions on the grid of inputs: images, spectra, variance explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.experiments._neurons.active_counts import MIN_CHECKPOINTS
from interp_tasks.experiments._neurons.active_history import History
from interp_tasks.experiments._neurons.features import (
    MeasuredFeatures,
    features_at,
    input_axes,
    measured,
    wanted_of,
)
from interp_tasks.experiments._neurons.rows import rows_of
from interp_tasks.experiments._neurons.table import ACTIVE
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import THRESHOLD, check_threshold
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from typing_extensions import Unpack

SITES = ("mlp_pre", "mlp_post", "mlp_out", "pattern")
NEURONS = (0, 1, 2)


@dataclass(frozen=True)
class Image:
    """One neuron or attention weight over the grid.

    Attributes:
        axes: names of the two coordinates.
        values: ``[a b]``. share: ``[k_a k_b]``, of its variance.
    """

    axes: tuple[str, str]
    values: np.ndarray
    share: np.ndarray


@dataclass(frozen=True, repr=False)
class NeuronsResult(Result):
    """A :class:`Result` with the images of the chosen neurons, by REF and by ``"neuron 0 of mlp_post.0"``."""

    images: Mapping[str, Mapping[str, Image]] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Returns each chosen neuron of one checkpoint (default: the last) over the grid, with its 2-D spectrum."""
        from interp_tasks.experiments._neurons.figure import images_figure

        ref = list(self.images)[-1] if ref is None else ref
        images = self.images[ref]
        axes = next(iter(images.values())).axes
        figure = images_figure(axes, {name: (one.values, one.share) for name, one in images.items()})
        return self.titled(figure, f"Over the inputs, {ref}")

    def over_steps(self) -> plotly.graph_objects.Figure:
        """Draws active frequencies, clusters and explained variance at the steps of each run."""
        from interp_tasks.experiments._neurons.figure import steps_figure

        return steps_figure(self.frame)

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns the images of every checkpoint; of many what changes over training, and images of two of them."""
        figures, refs = [], list(self.images)
        if len(refs) >= MIN_CHECKPOINTS:
            figures.append(Figure(self.over_steps(), "Over training", "By stored checkpoint."))
            refs = [refs[0], refs[-1]]
        return figures + [Figure(self.plot(ref), f"Over the inputs, {ref}", self.caption()) for ref in refs]

    def caption(self) -> str:
        return (
            "Left: the value for every input, first coordinate down, second across. Right: the share of its variance "
            "in each pair of frequencies, without the constant. Each image has its own colour scale."
        )


@experiment("modular", says={"site": None, "threshold": THRESHOLD})
def neurons(
    refs: str | Sequence[str],
    neurons: Annotated[
        Sequence[int],
        typer.Option("--neurons", metavar="N,N", help="Draw these, counted from 0; heads are all drawn."),
        str,
        read_neurons,
    ] = NEURONS,
    site: Annotated[
        str,
        typer.Option(
            "--site",
            metavar="SITE[.LAYER]",
            help="mlp_pre, mlp_post, mlp_out, or pattern: attention from where the task reads to each digit.",
        ),
    ] = "mlp_post",
    *,
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="A cluster's frequency explains more than this share of a neuron."),
    ] = THRESHOLD,
    draws: Annotated[
        int,
        typer.Option("--draws", help="Relabellings of the digits that active frequencies are held against."),
    ] = 19,
    **options: Unpack[Options],
) -> NeuronsResult:
    """See neurons, or heads' attention to each digit, as images over all inputs, with what explains their variance.

    Clusters by frequency, variance explained, active frequencies; over three checkpoints of a run or more also the
    published count of active frequencies.

    Args:
        refs: one or several REFs.
        neurons: whose images and rows are wanted; at ``"pattern"`` all are.
        site: ``"mlp_pre"``, ``"mlp_post"`` or ``"mlp_out"``, in every layer or as in ``"mlp_post.0"``; ``"pattern"``
            for the attention of each head from the positions that the task reads to each digit.
        threshold: a neuron is in the cluster of its first frequency k if the products of {1, cos k, sin k} over both
            digits explain more than this share of its variance (Nanda et al. 2023, code).
        draws: relabellings of the digits behind ``active frequencies``; see ``circuits.fourier.active``.
        options: seed, task, task_config, device, progress: see :class:`Options`; samples and split play no part.

    Returns:
        A :class:`NeuronsResult`. By ``variant``: ``neuron 0`` (of heads ``0.1 to a``), the chosen ones;
        ``cluster 14``, the neurons of one frequency together; ``in clusters``; ``all neurons``. Variance explained
        of several neurons is of their variance in sum. The ``baseline`` of "pairs of frequencies for half of the
        variance" is that number after one relabelling of the digits. Of three checkpoints of one run or more also the
        published count of active frequencies, which needs them all: above mean + 1 or 2 standard deviations, for the
        chosen neurons and as a mean over all, and as a control ``without size``; where it peaks, with the last
        checkpoint's as ``baseline``, of the step the end of the run's drop; and the last over the largest.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without a grid of two input digits.
    """
    kind, layer = read_site(site)
    chosen = read_neurons(neurons)
    check_threshold(threshold)
    check_draws(draws)
    images: dict[str, dict[str, Image]] = {}
    history = History()

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures the neurons, or heads, of one checkpoint over all inputs, and draws the chosen ones."""
        import pandas

        ref = str(subject.labels["ref"])
        axes = input_axes(subject)
        rows: list[dict[str, Any]] = []
        for features in features_at(subject, axes, kind, layer):
            measures = measured(features, threshold, draws, subject.seed)
            wanted = wanted_of(features, chosen)
            rows += rows_of(measures, wanted)
            for at in wanted:
                images.setdefault(ref, {})[f"{features.names[at]} of {features.label}"] = image(measures, at)
            if kind != "pattern":
                history.add(subject, measures, wanted)
        return Measured(pandas.DataFrame(rows), {})

    config = {"neurons": list(chosen), "site": site, "threshold": threshold, "draws": draws}
    parts = ModelParts(sites=[site.strip()], neurons=() if kind == "pattern" else chosen)
    result = measure(
        "neurons", refs, options, measure_checkpoint, config=config, parts=parts, check=input_axes
    )
    import pandas

    from interp_tasks.measurement.table import tidy

    later = history.rows()
    frame = pandas.concat([result.frame, tidy(pandas.DataFrame(later))]) if later else result.frame
    order = {ref: index for index, ref in enumerate(dict.fromkeys(result.frame["ref"]))}
    frame = frame.sort_values("ref", key=lambda each: each.map(order), kind="stable", ignore_index=True)
    frame["split"] = "grid"
    note_texts = tuple(notes(kind, threshold, draws, bool(later)))
    return NeuronsResult.of(result, frame=frame, notes=note_texts, images=images)


def notes(kind: str, threshold: float, draws: int, over_time: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    yield "The grid of inputs is complete and all neurons count: nothing is sampled, there are no intervals."
    yield (
        "degree 1: cos and sin of the first frequency in either digit. degree 2: also their products. alone: any "
        "function of this digit."
    )
    yield (
        f"{ACTIVE}: a larger share of the variance than any frequency has under any of {draws} random relabellings of "
        f"the digits (by chance 1 neuron in {draws + 1} has one); of all neurons: of their variance in sum."
    )
    if kind != "pattern":
        yield f"in clusters: degree 2 explains more than {threshold:g}."
    if over_time:
        yield (
            "mean + 1 sd, mean + 2 sd: the published counts, of each frequency's share of its own sum over the "
            "checkpoints; they depend on which checkpoints these are, and on the size of a neuron as much as on its "
            "frequencies. without size: after division by the sum over frequencies, at each checkpoint."
        )


def read_site(site: str) -> tuple[str, int | None]:
    """Returns a site and its layer.

    Raises:
        UserError: for a site that has no neurons.
    """
    name, dot, layer = site.strip().partition(".")
    if name not in SITES or (dot and not (layer.isdecimal() and layer.isascii())):
        raise UserError(
            f"--site {site!r}: choose {', '.join(SITES[:-1])} or {SITES[-1]}, in one layer as in {SITES[1]}.0"
        )
    return name, int(layer) if dot else None


def read_neurons(given: str | Sequence[int]) -> tuple[int, ...]:
    """Parses neurons such as ``0,1,2``.

    Raises:
        UserError: for something else.
    """
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(map(str, given))
    if not parts or not all(part.isdecimal() and part.isascii() and len(part) < 9 for part in parts):
        raise UserError(f"--neurons {given}: write neurons counted from 0, such as 0,1,2")
    return tuple(dict.fromkeys(map(int, parts)))


def check_draws(draws: int) -> None:
    if not 1 <= draws < 10_000:
        raise UserError(
            f"--draws {draws}: relabellings of the digits, from 1 to 9999; 19 is one chance in 20"
        )


def image(measures: MeasuredFeatures, at: int) -> Image:
    first, second = measures.features.grid.axes
    values = measures.features.grid.arrange(measures.features.values[:, at]).numpy()
    return Image((first, second), values, measures.spectrum.share[..., at].numpy())
