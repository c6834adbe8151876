"""Neurons and attention weights as functions on the grid of inputs: images, spectra, variance explained.

By ``variant``: ``neuron 0`` (of heads ``0.1 to a``), the chosen ones; ``cluster 14``, the neurons of one frequency
together; ``in clusters``; ``all neurons``. Variance explained of several neurons is of their variance in sum. The
``baseline`` of "pairs of frequencies for half of the variance" is that number after one relabelling of the digits. Of
three checkpoints of one run or more also the published count of active frequencies, which needs them all: above mean
+ 1 or 2 standard deviations, for the chosen neurons and as a mean over all, and as a control ``without size``; where
it peaks, with the last checkpoint's as ``baseline``, of the step the end of the run's drop; and the last over the
largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import THRESHOLD, check_threshold
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import logged_drop
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options
from interp_tasks.measurement.table import Row, filled, numbers, side_by_side, tidy
from interp_tasks.pages import Column, Figure
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
    wanted_of,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

SITES = ("mlp_pre", "mlp_post", "mlp_out", "pattern")
NEURONS = (0, 1, 2)
PEAK, PEAK_STEP, END = ", peak", ", step of the peak", ", end / peak"
#: Metrics of a neuron, of a cluster, and of all of them.
FREQUENCY, FIRST, SECOND = "frequency", "variance explained, degree 1", "variance explained, degree 2"
ALONE, JOINTLY, ONE = "variance by {} alone", "variance by both jointly", "variance by one digit"
TO_ONE = "share of attention to one digit"
PAIRS = "pairs of frequencies for half of the variance"
MEAN, ACTIVE, ACTIVE_EACH = "mean", "active frequencies", "active frequencies per neuron"
COUNT, CLUSTERS, CLUSTERED, DEAD = "neurons", "clusters", "share of neurons in clusters", "constant neurons"
#: Variants that are about no single neuron.
ALL, IN_CLUSTERS, CLUSTER = "all neurons", "in clusters", "cluster "
SIZE = ", without size"
BEFORE, AFTER = ALONE.split("{}")
#: The published counts of active frequencies, and the control.
KINDS = (*(f"{deviations} sd" for deviations in DEVIATIONS), f"{DEVIATIONS[0]} sd{SIZE}")
NEURONS_OPTION = typer.Option(
    "--neurons", metavar="N,N", help="Draw these, counted from 0; heads are all drawn."
)
SITE = typer.Option(
    "--site",
    metavar="SITE[.LAYER]",
    help="mlp_pre, mlp_post, mlp_out, or pattern: attention from where the task reads to each digit.",
)
THRESHOLD_OPTION = typer.Option(
    "--threshold", help="A cluster's frequency explains more than this share of a neuron."
)
DRAWS = typer.Option("--draws", help="Relabellings of the digits that active frequencies are held against.")


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


@experiment("modular", says={"site": None, "threshold": THRESHOLD})
def neurons(
    refs: str | Sequence[str],
    neurons: Annotated[Sequence[int], NEURONS_OPTION, str, read_neurons] = NEURONS,
    site: Annotated[str, SITE] = "mlp_post",
    *,
    threshold: Annotated[float, THRESHOLD_OPTION] = THRESHOLD,
    draws: Annotated[int, DRAWS] = 19,
    **options: Unpack[Options],
) -> Result:
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

        rows: list[Row] = []
        drawn = images.setdefault(str(subject.labels["ref"]), {})
        for features in features_at(subject, input_axes(subject), kind, layer):
            measures = measured(features, threshold, draws, subject.seed)
            wanted = wanted_of(features, chosen)
            rows += rows_of(measures, wanted)
            drawn |= {f"{features.names[at]} of {features.label}": image(measures, at) for at in wanted}
            if kind != "pattern":
                history.add(subject, measures, wanted)
        return Measured(pandas.DataFrame(rows), {})

    config = {"neurons": list(chosen), "site": site, "threshold": threshold, "draws": draws}
    parts = ModelParts(sites=[site.strip()], neurons=() if kind == "pattern" else chosen)
    result = measure(
        "neurons", refs, options, measure_checkpoint, config=config, parts=parts, check=input_axes
    )
    later = history.rows()
    note_texts = tuple(notes(kind, threshold, draws, bool(later)))
    return replace(result, frame=joined(result.frame, later), notes=note_texts, data={"images": images})


def joined(frame: pandas.DataFrame, later: Sequence[Row]) -> pandas.DataFrame:
    """Returns rows with those that need all checkpoints of a run, each below the others of its checkpoint."""
    import pandas

    order = {ref: index for index, ref in enumerate(dict.fromkeys(frame["ref"]))}
    if later:
        frame = pandas.concat([frame, tidy(pandas.DataFrame(later))])
    frame = frame.sort_values("ref", key=lambda refs: refs.map(order), kind="stable", ignore_index=True)
    return frame.assign(split="grid")


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


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a run: the labels of its rows, the measures of its neurons, and those with rows of their own."""

    labels: Mapping[str, Any]
    amplitudes: np.ndarray
    active_each: float
    wanted: Sequence[int]


@dataclass
class History:
    """Measures that need all checkpoints of a run: the published count of active frequencies, and its peaks."""

    seen: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)

    def add(self, subject: LoadedCheckpoint, measures: MeasuredFeatures, wanted: Sequence[int]) -> None:
        if subject.checkpoint.run is None:
            return
        features, varying = measures.features, measures.clusters.best >= 0
        labels = {**subject.labels, **common_of(features), "experiment": "neurons", "n_runs": 1}
        each = float(measures.active.counts[varying].double().mean()) if bool(varying.any()) else 0.0
        entry = Entry(labels, amplitudes(features.grid.arrange(features.values)), each, wanted)
        # A checkpoint's folder lies in the run's folder of checkpoints.
        run = str(subject.checkpoint.path.parent.parent)
        self.seen.setdefault((run, features.label), []).append(entry)

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for (run, _), entries in self.seen.items():
            if len(entries) >= MIN_CHECKPOINTS:
                rows += of_run(run, sorted(entries, key=lambda entry: entry.labels["step"]))
        return rows


def of_run(run: str, entries: Sequence[Entry]) -> Iterator[Row]:
    """Yields the published counts at every checkpoint; where they and the counts against relabelled digits peak."""
    import numpy as np

    over_time = np.stack([entry.amplitudes for entry in entries])
    varying = (over_time[:, 1:] > 0).any((0, 1))
    end = end_of(run)
    series = {(ALL, ACTIVE_EACH): np.array([entry.active_each for entry in entries])}
    counted = [(over_time, deviations) for deviations in DEVIATIONS]
    counted.append((of_equal_size(over_time), DEVIATIONS[0]))
    for kind, (of, deviations) in zip(KINDS, counted, strict=True):
        name = f"{ACTIVE}, mean + {kind}"
        counts = active_counts(of, deviations)
        series |= {(f"neuron {at}", name): counts[:, at].astype(float) for at in entries[0].wanted}
        if varying.any():
            series[ALL, name] = counts[:, varying].mean(1)
    for (variant, name), values in series.items():
        if name != ACTIVE_EACH:
            for entry, value in zip(entries, values, strict=True):
                yield {**entry.labels, "variant": variant, **row(name, value)}
        last, at = {**entries[-1].labels, "variant": variant}, int(values.argmax())
        yield {**last, **row(name + PEAK, values[at], values[-1])}
        yield {**last, **row(name + PEAK_STEP, entries[at].labels["step"], end)}
        if values[at] > 0:
            yield {**last, **row(name + END, values[-1] / values[at])}


def end_of(run: str) -> int | None:
    """Returns the end of the drop that a run logged; ``None`` where there is none."""
    drop = logged_drop(Path(run))
    return None if drop is None else drop.end


def rows_of(measures: MeasuredFeatures, wanted: Sequence[int]) -> list[Row]:
    """Returns rows of the chosen features, of clusters and of all."""
    features, common = measures.features, common_of(measures.features)
    rows: list[Row] = []
    for at in wanted:
        about = {**common, "variant": features.names[at], "head": features.heads[at]}
        rows += [{**about, **row} for row in one_feature(measures, at)]
    if features.site == "pattern":
        return rows + [{**common, **row} for row in preferences(features)]
    for variant, metrics in together(measures).items():
        rows += [{**common, "variant": variant, **row} for row in metrics]
    return rows


def common_of(features: Features) -> dict[str, Any]:
    """Returns the columns that all rows of one tensor share."""
    return {
        "intervention": features.label,
        "site": features.site,
        "layer": features.layer,
        "position": features.position,
        "n": features.grid.cells,
    }


def preferences(features: Features) -> Iterator[Row]:
    """Yields for each head the share of its mean attention to both digits that the one with more gets: 0.5 to 1."""
    means = features.values.double().mean(0).unflatten(0, (-1, 2))
    for head, pair in enumerate(means):
        about = {"variant": f"{features.layer}.{head}", "head": head}
        yield {**about, **row(TO_ONE, float(pair.max() / pair.sum()))}


def one_feature(measures: MeasuredFeatures, at: int) -> Iterator[Row]:
    """Yields the rows of one feature; of one that does not vary only its mean."""
    yield row(MEAN, measures.features.values[:, at].double().mean())
    if float(measures.variance[at]) <= 0 or int(measures.clusters.best[at]) < 0:
        return
    yield row(FREQUENCY, measures.clusters.labels[int(measures.clusters.best[at])])
    yield row(FIRST, measures.first[at])
    yield row(SECOND, measures.second[at])
    for axis, share in measures.alone.items():
        yield row(ALONE.format(axis), share[at])
    yield row(JOINTLY, measures.jointly[at])
    yield row(ONE, max(float(share[at]) for share in measures.alone.values()))
    yield row(PAIRS, measures.pairs[at], measures.pairs_relabelled[at])
    yield row(ACTIVE, measures.active.counts[at])


def together(measures: MeasuredFeatures) -> dict[str, list[Row]]:
    """Returns rows of the neurons of each cluster, of all clusters, of all neurons, by variant."""
    import torch

    clusters, varying = measures.clusters, measures.clusters.best >= 0
    inside = clusters.assigned >= 0
    rows: dict[str, list[Row]] = {}
    groups = {f"{CLUSTER}{label}": clusters.neurons(label) for label in clusters.sizes}
    groups |= {IN_CLUSTERS: inside.nonzero().flatten(), ALL: varying.nonzero().flatten()}
    for variant, members in groups.items():
        weights = measures.variance[members]
        total_weight = float(weights.sum())
        rows[variant] = [row(COUNT, len(members))]
        if total_weight > 0:
            rows[variant] += [
                row(name, float((share[members] * weights).sum()) / total_weight)
                for name, share in ((FIRST, measures.first), (SECOND, measures.second))
            ]
    rows[IN_CLUSTERS] += [row(CLUSTERS, len(clusters.sizes)), row(CLUSTERED, float(inside.double().mean()))]
    constant = row(DEAD, int((~varying).sum()))
    if not bool(varying.any()):
        rows[ALL] += [constant]
        return rows
    weights = measures.variance / measures.variance.sum()
    rows[ALL] += [
        *(row(ALONE.format(axis), (share * weights).sum()) for axis, share in measures.alone.items()),
        row(JOINTLY, (measures.jointly * weights).sum()),
        row(PAIRS, *(torch.nanmedian(each) for each in (measures.pairs, measures.pairs_relabelled))),
        row(ACTIVE, len(measures.active.keys)),
        row(ACTIVE_EACH, measures.active.counts[varying].double().mean()),
        constant,
    ]
    return rows


def row(metric: str, value: Any, baseline: Any = None) -> Row:
    return {"metric": metric, **numbers(value, baseline=baseline)}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, tensor and variant, with a column for each metric; or per checkpoint and tensor."""

    def cells(row: Row) -> Row:
        relabelled = {"relabelled": row["baseline"]} if row["metric"] == PAIRS else {}
        return {row["metric"]: row["value"], **relabelled}

    rows = side_by_side(frame, lambda row: (row["ref"], row["intervention"], row["variant"]), cells)
    if frame["ref"].nunique() < MIN_CHECKPOINTS or (frame["variant"] != ALL).all():
        return rows
    return over_steps(rows)


def over_steps(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint and tensor, with the published counts of the first single neuron."""
    alone = ~rows["variant"].isin([ALL, IN_CLUSTERS]) & ~rows["variant"].str.startswith(CLUSTER)
    single = rows["variant"][alone].iloc[0]
    shown = rows.assign(checkpoint=rows["ref"], at=rows["step"], single=single)

    def cells(row: Row) -> Row:
        group = "single" if row["variant"] == single else row["variant"]
        return (
            {f"{group}: {name}": value for name, value in row.items()}
            if group in ("single", ALL, IN_CLUSTERS)
            else {}
        )

    lines = side_by_side(shown, lambda row: (row["checkpoint"], row["intervention"]), cells)
    steps, refs = lines["at"], lines["checkpoint"].nunique()
    return lines.assign(ref=f"{refs} checkpoints", step=f"{steps.min()} to {steps.max()}")


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of groups of neurons, or of clusters over checkpoints."""

    def column(header: str, key: str, digits: str) -> Column:
        return Column(header, key, filled(key, digits))

    tensors = [Column("tensor", "intervention")] if frame["intervention"].nunique() > 1 else []
    if "checkpoint" in frame:
        name = str(frame["single"].iloc[0])
        counts = [
            column(f"+{kind}\n{heading}", f"{key}: {ACTIVE}, mean + {kind}", digits)
            for kind in KINDS
            for heading, key, digits in ((name, "single", ".0f"), (ALL, ALL, ".1f"))
        ]
        return [
            Column("step", "at") if frame["run"].nunique() == 1 else Column("checkpoint", "checkpoint"),
            *tensors,
            column("clusters", f"{IN_CLUSTERS}: {CLUSTERS}", ".0f"),
            column("in clusters", f"{IN_CLUSTERS}: {CLUSTERED}", ".1%"),
            column("degree 2", f"{ALL}: {SECOND}", ".1%"),
            column("active", f"{ALL}: {ACTIVE}", ".0f"),
            column("active\nper neuron", f"{ALL}: {ACTIVE_EACH}", ".1f"),
            *(each for each in counts if each.key in frame),
        ]
    alone = [str(name) for name in frame if str(name).startswith(BEFORE) and str(name).endswith(AFTER)]
    columns = [
        *tensors,
        Column("", "variant"),
        column("neurons", COUNT, ".0f"),
        column("mean", MEAN, ".3g"),
        column("to one\ndigit", TO_ONE, ".1%"),
        column("frequency", FREQUENCY, ".0f"),
        column("degree 1", FIRST, ".1%"),
        column("degree 2", SECOND, ".1%"),
        *(column(f"{name.removeprefix(BEFORE).removesuffix(AFTER)} alone", name, ".1%") for name in alone),
        column("jointly", JOINTLY, ".1%"),
        Column("pairs\n(relabelled)", PAIRS, pairs),
        column("active", ACTIVE, ".0f"),
    ]
    return [each for each in columns if each.key in frame]


def pairs(row: Mapping[str, Any]) -> str:
    return "" if math.isnan(row[PAIRS]) else f"{row[PAIRS]:.0f} ({row['relabelled']:.0f})"


def images_figure(images: Mapping[str, Image]) -> plotly.graph_objects.Figure:
    """Draws a row per image: the values on the left, the shares of pairs of frequencies on the right."""
    panels = []
    for name, one in images.items():
        (first, second), values, shares = one.axes, one.values, one.share
        options: dict[str, Any] = {"numbers": False, "row": max(6, 280 // min(60, len(values))), "width": 230}
        ends: dict[str, Any] = {"start": float(values.min()), "end": float(values.max())}
        panels.append(heat(values, name, across=second, down=first, **ends, **options))
        options |= {"unit": "share of variance (%)", "row": max(6, 280 // min(60, len(shares)))}
        options |= {"across": f"frequency in {second}", "down": f"frequency in {first}"}
        # A neuron that is nowhere active has no share above 0.
        panels.append(heat(100 * shares, "its spectrum", end=float(100 * shares.max()) or 100, **options))
    return draw(panels, columns=2)


def steps_figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws numbers of active frequencies and shares in two panels, a line per run, tensor and quantity."""
    single = next((str(name) for name in frame["variant"] if str(name).startswith("neuron ")), ALL)
    counted = {
        (ALL, ACTIVE): "all together",
        (ALL, ACTIVE_EACH): "per neuron",
        (IN_CLUSTERS, CLUSTERS): CLUSTERS,
    }
    for kind in KINDS:
        for variant in dict.fromkeys((single, ALL)):
            counted[variant, f"{ACTIVE}, mean + {kind}"] = f"mean + {kind}, {variant}"
    shares = {(IN_CLUSTERS, CLUSTERED): "neurons in clusters", (ALL, SECOND): "variance explained, degree 2"}
    tensors = list(frame.groupby(["run", "intervention"], sort=False, dropna=False))
    panels, looks = [], 0
    for title, wanted, axis in (
        ("Number of frequencies", counted, {"rangemode": "tozero"}),
        ("Share", shares, {"range": [0, 1.03]}),
    ):
        series = {}
        for (variant, metric), name in wanted.items():
            for (run, tensor), rows in tensors:
                part = rows[(rows["variant"] == variant) & (rows["metric"] == metric)].sort_values("step")
                if len(part):
                    called = name if len(tensors) == 1 else f"{name}, {tensor} of {run}"
                    series[called] = Series(part["step"].tolist(), part["value"].tolist(), look=looks)
                    looks += 1
        panels.append(curve(series, title, y=title.lower().partition(" ")[0], y_axis=axis, height=300))
    return draw(panels)


def figures(result: Result) -> list[Figure]:
    """Returns the images of every checkpoint; of many what changes over training, and images of two of them."""
    drawn, images = [], result.data["images"]
    refs = list(images)
    if len(refs) >= MIN_CHECKPOINTS:
        drawn.append(Figure(steps_figure(result.frame), "Over training", "By stored checkpoint."))
        refs = [refs[0], refs[-1]]
    caption = (
        "Left: the value for every input, first coordinate down, second across. Right: the share of its variance "
        "in each pair of frequencies, without the constant. Each image has its own colour scale."
    )
    return drawn + [Figure(images_figure(images[ref]), f"Over the inputs, {ref}", caption) for ref in refs]
