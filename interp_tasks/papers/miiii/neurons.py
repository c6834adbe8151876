"""Neurons and attention weights as functions on the grid of inputs: images, spectra, variance explained.

By ``variant``: ``neuron 0`` (of heads ``0.1 to a``), the chosen ones; ``in clusters``; ``all neurons``. Variance
explained of several neurons is of their variance in sum. The ``baseline`` of "pairs of frequencies for half of the
variance" is that number after one relabelling of the digits. Of three checkpoints of one run or more also the
published count of active frequencies, which needs them all: above mean + 1 or 2 standard deviations, for the chosen
neurons and as a mean over all, and as a control ``without size``; the step at which it peaks, beside the end of the
run's drop; and the last count over the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import THRESHOLD, check_choice, check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import logged_drop
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, run_of
from interp_tasks.measurement.table import Row, numbers
from interp_tasks.pages import Figure
from interp_tasks.papers.miiii.features import (
    DEVIATIONS,
    MIN_CHECKPOINTS,
    Features,
    MeasuredFeatures,
    active_counts,
    amplitudes,
    features_at,
    input_axes,
    measured,
    of_equal_size,
)

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from typing_extensions import Unpack

SITES = ("mlp_post", "pattern")
NEURONS = (0, 1, 2)
#: Metrics of a neuron, of a cluster, and of all of them.
MEAN, FREQUENCY = "mean", "frequency"
FIRST, SECOND, ONE = "variance explained, degree 1", "variance explained, degree 2", "variance by one digit"
TO_ONE = "share of attention to one digit"
PAIRS = "pairs of frequencies for half of the variance"
ACTIVE, ACTIVE_EACH = "active frequencies", "active frequencies per neuron"
COUNT, CLUSTERS, CLUSTERED = "neurons", "clusters", "share of neurons in clusters"
#: The published counts of active frequencies, and the control.
KINDS = (*(f"{deviations} sd" for deviations in DEVIATIONS), f"{DEVIATIONS[0]} sd, without size")
#: Variants that are about no single neuron.
ALL, IN_CLUSTERS = "all neurons", "in clusters"


def parse_neurons(given: str | Sequence[int]) -> tuple[int, ...]:
    """Parses neurons such as ``0,1,2``.

    Raises:
        UserError: for something else.
    """
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(map(str, given))
    if not parts or not all(part.isdecimal() and part.isascii() and len(part) < 9 for part in parts):
        raise UserError(f"--neurons {given}: write neurons counted from 0, such as 0,1,2")
    return tuple(dict.fromkeys(map(int, parts)))


NEURONS_OPTION = typer.Option(
    "--neurons", metavar="N,N", help="Draw these, counted from 0; heads are all drawn."
)
SITE = typer.Option("--site", metavar="SITE", help="mlp_post, or pattern: attention to each digit.")
DRAWS = typer.Option("--draws", help="Relabellings of the digits that active frequencies are held against.")


class Image(NamedTuple):
    """One neuron or attention weight over the grid: ``values [a b]``, ``share [k_a k_b]`` of its variance."""

    axes: tuple[str, str]
    values: np.ndarray
    share: np.ndarray


@experiment("modular", says={"site": None})
def neurons(
    refs: str | Sequence[str],
    neurons: Annotated[Sequence[int], NEURONS_OPTION, str, parse_neurons] = NEURONS,
    site: Annotated[str, SITE] = "mlp_post",
    *,
    draws: Annotated[int, DRAWS] = 19,
    **options: Unpack[Options],
) -> Result:
    """See neurons, or heads' attention to each digit, as images over all inputs, with what explains their variance.

    Clusters by frequency, variance explained, active frequencies; over three checkpoints of a run or more also the
    published count of active frequencies. A neuron is in the cluster of its first frequency k if the products of
    {1, cos k, sin k} over both digits explain more than 0.85 of its variance (Nanda et al. 2023, code).

    Args:
        refs: one or several REFs.
        neurons: whose images and rows are wanted; at ``"pattern"`` all are.
        site: ``"mlp_post"``, in every layer; ``"pattern"``: each head's attention from where the task reads to a digit.
        draws: relabellings of the digits behind ``active frequencies``; see ``relabelled.active``.
        options: seed, task, task_config, device, progress: see :class:`Options`; samples and split play no part.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without a grid of two input digits.
    """
    check_choice("--site", site, SITES)
    check_draws(draws)
    chosen = parse_neurons(neurons)
    images: dict[str, dict[str, Image]] = {}
    history: dict[tuple[str, str], list[CheckpointCounts]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        rows: list[Row] = []
        drawn = images.setdefault(str(subject.labels["ref"]), {})
        for features in features_at(subject, input_axes(subject), site):
            measures = measured(features, draws, subject.seed)
            wanted = range(len(features.names)) if site == "pattern" else chosen
            rows += rows_of(measures, wanted)
            drawn |= {f"{features.names[at]} of {features.label}": image(measures, at) for at in wanted}
            if site != "pattern" and subject.checkpoint.run is not None:
                counts = CheckpointCounts.of(subject, measures)
                history.setdefault((run_of(subject), features.label), []).append(counts)
        return rows

    def check_sizes(sizes: Any, name: str) -> None:
        if site != "pattern" and max(chosen) >= sizes.d_mlp:
            raise UserError(f"--neurons {max(chosen)}: {site} of {name} has neurons 0-{sizes.d_mlp - 1}")

    config = {"neurons": list(chosen), "site": site, "draws": draws}
    checks: dict[str, Any] = {"check_sizes": check_sizes, "check": input_axes}
    result = measure(
        "neurons",
        refs,
        options,
        measure_checkpoint,
        config=config,
        later=lambda: later_rows(history, chosen),
        **checks,
    )
    over_time = bool(result.frame["metric"].str.startswith(f"{ACTIVE}, mean").any())
    return replace(result, notes=tuple(notes(site, draws, over_time)), data={"images": images})


def notes(site: str, draws: int, over_time: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    yield "The grid of inputs is complete and all neurons count: nothing is sampled, there are no intervals."
    yield (
        "degree 1: cos and sin of the first frequency in either digit. degree 2: also their products. one digit alone: "
        "any function of it, of the digit that explains more."
    )
    yield (
        f"{ACTIVE}: a larger share of the variance than any frequency has under any of {draws} random relabellings of "
        f"the digits (by chance 1 neuron in {draws + 1} has one); of all neurons: of their variance in sum."
    )
    if site != "pattern":
        yield f"in clusters: degree 2 explains more than {THRESHOLD:g}."
    if over_time:
        yield (
            "+1 sd, +2 sd: the published counts above the mean, of each frequency's share of its own sum over the "
            "checkpoints; they depend on which checkpoints these are, and on the size of a neuron as much as on its "
            "frequencies. without size: after division by the sum over frequencies, at each checkpoint."
        )


def image(measures: MeasuredFeatures, at: int) -> Image:
    first, second = measures.features.grid.axes
    values = measures.features.grid.arrange(measures.features.values[:, at]).numpy()
    return Image((first, second), values, measures.spectrum.share[..., at].numpy())


class CheckpointCounts(NamedTuple):
    """What the published counts of a run are made of, of one of its checkpoints."""

    ref: str
    step: int
    shared: Row
    amplitudes: np.ndarray
    active_each: float

    @classmethod
    def of(cls, subject: LoadedCheckpoint, measures: MeasuredFeatures) -> CheckpointCounts:
        arranged = measures.features.grid.arrange(measures.features.values)
        ref, step, shared = str(subject.labels["ref"]), subject.stored.step, shared_columns(measures.features)
        return cls(ref, step, shared, amplitudes(arranged), active_each(measures))


def active_each(measures: MeasuredFeatures) -> float:
    """Returns the mean number of active frequencies of the neurons that vary; 0 where none does."""
    counts = measures.active[measures.clusters.best >= 0]
    return float(counts.double().mean()) if len(counts) else 0.0


def later_rows(
    history: Mapping[tuple[str, str], Sequence[CheckpointCounts]], wanted: Sequence[int]
) -> dict[str, list[Row]]:
    """Returns what needs all checkpoints of a run, by REF."""
    rows: dict[str, list[Row]] = {}
    for (run, _), entries in history.items():
        for ref, row in rows_of_run(run, entries, wanted):
            rows.setdefault(ref, []).append(row)
    return rows


def rows_of_run(
    run: str, entries: Sequence[CheckpointCounts], wanted: Sequence[int]
) -> Iterator[tuple[str, Row]]:
    """Yields REFs and rows: the published counts at every checkpoint; where they and the other counts peak."""
    import numpy as np

    if len(entries) < MIN_CHECKPOINTS:
        return
    entries = sorted(entries, key=lambda entry: entry.step)
    over_time = np.stack([entry.amplitudes for entry in entries])
    varying = (over_time[:, 1:] > 0).any((0, 1))
    drop = logged_drop(Path(run))
    series = {(ALL, ACTIVE_EACH): np.array([entry.active_each for entry in entries])}
    counted = [(over_time, deviations) for deviations in DEVIATIONS]
    counted.append((of_equal_size(over_time), DEVIATIONS[0]))
    for kind, (of, deviations) in zip(KINDS, counted, strict=True):
        name = f"{ACTIVE}, mean + {kind}"
        counts = active_counts(of, deviations)
        series |= {(f"neuron {at}", name): counts[:, at].astype(float) for at in wanted}
        if varying.any():
            series[ALL, name] = counts[:, varying].mean(1)
    for (variant, name), values in series.items():
        if name != ACTIVE_EACH:
            for entry, value in zip(entries, values, strict=True):
                yield entry.ref, {**entry.shared, "variant": variant, **row(name, value)}
        last, at = {**entries[-1].shared, "variant": variant}, int(values.argmax())
        end = None if drop is None else drop.end
        yield entries[-1].ref, {**last, **row(f"{name}, step of the peak", entries[at].step, end)}
        if values[at] > 0:
            yield entries[-1].ref, {**last, **row(f"{name}, end / peak", values[-1] / values[at])}


def rows_of(measures: MeasuredFeatures, wanted: Sequence[int]) -> Iterator[Row]:
    """Yields rows of the chosen features; of heads their preferences, of neurons those of clusters and of all."""
    features, common = measures.features, shared_columns(measures.features)
    for at in wanted:
        about = {**common, "variant": features.names[at], "head": features.heads[at]}
        yield from ({**about, **row} for row in one_feature(measures, at))
    if features.site == "pattern":
        # The share of a head's mean attention to both digits that the one with more gets: 0.5 to 1.
        for head, pair in enumerate(features.values.double().mean(0).unflatten(0, (-1, 2))):
            about = {**common, "variant": f"{features.layer}.{head}", "head": head}
            yield {**about, **row(TO_ONE, float(pair.max() / pair.sum()))}
        return
    for variant, metrics in together(measures).items():
        yield from ({**common, "variant": variant, **row} for row in metrics)


def shared_columns(features: Features) -> Row:
    """Returns the columns that all rows of one tensor share."""
    about = {"site": features.site, "layer": features.layer, "position": features.position, "split": "grid"}
    return {**about, "intervention": features.label, "n": features.grid.cells}


def one_feature(measures: MeasuredFeatures, at: int) -> Iterator[Row]:
    """Yields the rows of one feature; of one that does not vary only its mean."""
    yield row(MEAN, measures.features.values[:, at].double().mean())
    if float(measures.spectrum.variance[at]) <= 0 or int(measures.clusters.best[at]) < 0:
        return
    yield row(FREQUENCY, measures.clusters.labels[int(measures.clusters.best[at])])
    yield row(FIRST, measures.first[at])
    yield row(SECOND, measures.clusters.share[at])
    yield row(ONE, measures.one[at])
    yield row(PAIRS, measures.pairs[at], measures.pairs_relabelled[at])
    yield row(ACTIVE, measures.active[at])


def together(measures: MeasuredFeatures) -> dict[str, list[Row]]:
    """Returns rows of the neurons of all clusters, and of all that vary, by variant."""
    import torch

    clusters, varying = measures.clusters, measures.clusters.best >= 0
    inside = clusters.assigned >= 0
    groups = {IN_CLUSTERS: inside.nonzero().flatten(), ALL: varying.nonzero().flatten()}
    rows: dict[str, list[Row]] = {}
    for variant, members in groups.items():
        weights = measures.spectrum.variance[members]
        total = float(weights.sum())
        rows[variant] = [row(COUNT, len(members))]
        if total > 0:
            for name, share in ((FIRST, measures.first), (SECOND, clusters.share)):
                rows[variant].append(row(name, float((share[members] * weights).sum()) / total))
    rows[IN_CLUSTERS] += [row(CLUSTERS, len(clusters.sizes)), row(CLUSTERED, float(inside.double().mean()))]
    if bool(varying.any()):
        rows[ALL] += [
            row(PAIRS, *(torch.nanmedian(each) for each in (measures.pairs, measures.pairs_relabelled))),
            row(ACTIVE, measures.active_together),
            row(ACTIVE_EACH, active_each(measures)),
        ]
    return rows


def row(metric: str, value: Any, baseline: Any = None) -> Row:
    return {"metric": metric, **numbers(value, baseline=baseline)}


def images_figure(images: Mapping[str, Image]) -> plotly.graph_objects.Figure:
    """Draws a row per image: the values on the left, the shares of pairs of frequencies on the right."""
    panels = []
    for name, ((first, second), values, shares) in images.items():
        options: dict[str, Any] = {"numbers": False, "row": max(6, 280 // min(60, len(values))), "width": 230}
        ends: dict[str, Any] = {"start": float(values.min()), "end": float(values.max())}
        panels.append(heat(values, name, across=second, down=first, **ends, **options))
        options |= {"unit": "share of variance (%)", "row": max(6, 280 // min(60, len(shares)))}
        options |= {"across": f"frequency in {second}", "down": f"frequency in {first}"}
        # A neuron that is nowhere active has no share above 0.
        panels.append(heat(100 * shares, "its spectrum", end=float(100 * shares.max()) or 100, **options))
    return draw(panels, columns=2)


def figures(result: Result) -> list[Figure]:
    """Returns the images of every checkpoint; of many what changes over training, and images of two of them."""
    from interp_tasks.measurement.figure import figure

    drawn, images = [], result.data["images"]
    refs = list(images)
    if len(refs) >= MIN_CHECKPOINTS:
        shown = result.frame[result.frame["variant"].isin([ALL, IN_CLUSTERS])]
        drawn.append(Figure(figure(shown), "Over training", "By stored checkpoint."))
        refs = [refs[0], refs[-1]]
    caption = (
        "Left: the value for every input, first coordinate down, second across. Right: the share of its variance "
        "in each pair of frequencies, without the constant. Each image has its own colour scale."
    )
    return drawn + [Figure(images_figure(images[ref]), f"Over the inputs, {ref}", caption) for ref in refs]
