"""Neurons and attention weights as functions on the grid of inputs: images, spectra, variance explained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.activity import DEVIATIONS, LEAST, active_counts, amplitudes, of_equal_size
from interp_tasks.experiments.arguments import checked
from interp_tasks.experiments.measuring import Found, measure
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.spectral import THRESHOLD, TOKENS_PER_PASS, check_threshold
from interp_tasks.experiments.subjects import Options, Subject
from interp_tasks.reporting import Figure, Page

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits.fourier import Active, Clusters, Grid, Spectrum
    from tasks import GridAxis

SITES = ("mlp_pre", "mlp_post", "mlp_out", "pattern")
NEURONS = (0, 1, 2)
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
PEAK, PEAK_STEP, END = ", peak", ", step of the peak", ", end / peak"


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


@dataclass(frozen=True)
class NeuronsResult(Result):
    """A :class:`Result` with the images of the chosen neurons, by REF and by ``"neuron 0 of mlp_post.0"``."""

    images: Mapping[str, Mapping[str, Image]] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Each chosen neuron of one checkpoint (default: the last) over the grid, its 2-D spectrum beside it."""
        from interp_tasks.experiments.imaging_plots import images_figure

        ref = list(self.images)[-1] if ref is None else ref
        return self.titled(images_figure(self.images[ref]), f"Over the inputs, {ref}")

    def over_steps(self) -> plotly.graph_objects.Figure:
        """Active frequencies, clusters and variance explained at the steps of each run."""
        from interp_tasks.experiments.imaging_plots import steps_figure

        return steps_figure(self.frame)

    def page(self, title: str | None = None) -> Page:
        """The images of every checkpoint; of many checkpoints what changes over training, and images of two of them."""
        page = super().page(title or "neurons")
        figures, refs = [], list(self.images)
        if len(refs) >= LEAST:
            steps = self.over_steps()
            figures.append(
                Figure(steps, "Over training", "By stored checkpoint.", height=int(steps.layout.height))
            )
            refs = [refs[0], refs[-1]]
        for ref in refs:
            figure = self.plot(ref)
            figures.append(
                Figure(figure, f"Over the inputs, {ref}", self.caption(), height=int(figure.layout.height))
            )
        return Page(page.title, [*figures, *page.sections[1:]], page.config, page.versions)

    def caption(self) -> str:
        return (
            "Left: the value for every input, first coordinate down, second across. Right: the share of its variance "
            "in each pair of frequencies, without the constant. Each image has its own colour scale."
        )


@dataclass(frozen=True)
class Features:
    """Activations at one site on the complete grid: ``values [cell feature]``, with what the features are called."""

    label: str
    site: str
    layer: int
    position: int
    names: tuple[str, ...]
    heads: tuple[int | None, ...]
    values: Tensor
    grid: Grid


@dataclass(frozen=True)
class Measured:
    """What is said of each feature, ``[feature]``.

    Attributes:
        clusters: each feature with its first frequency, which explains ``second`` of its variance.
        first: of this, what cos and sin of one coordinate alone explain: the degree-1 part.
        alone: by coordinate, what any function of it alone explains; ``jointly`` is the rest.
        pairs, pairs_relabelled: pairs of frequencies that together have half of the variance, the largest first, and
            the same after one relabelling of the digits; NaN for a feature that does not vary.
    """

    features: Features
    spectrum: Spectrum
    clusters: Clusters
    active: Active
    first: Tensor
    second: Tensor
    alone: Mapping[str, Tensor]
    jointly: Tensor
    pairs: Tensor
    pairs_relabelled: Tensor

    @property
    def variance(self) -> Tensor:
        return self.spectrum.variance


@checked
def neurons(
    refs: str | Sequence[str],
    neurons: Sequence[int] = NEURONS,
    site: str = "mlp_post",
    *,
    threshold: float = THRESHOLD,
    draws: int = 19,
    **options: Unpack[Options],
) -> NeuronsResult:
    """Look at neurons, or at attention weights, over the complete grid of inputs of a task with two coordinates.

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

    def looked(subject: Subject) -> Found:
        import pandas

        ref = str(subject.labels["ref"])
        axes = input_axes(subject)
        rows: list[dict[str, Any]] = []
        for features in features_at(subject, axes, kind, layer):
            found = measured(features, threshold, draws, subject.seed)
            wanted = wanted_of(features, chosen)
            rows += rows_of(found, wanted)
            for at in wanted:
                images.setdefault(ref, {})[f"{features.names[at]} of {features.label}"] = image(found, at)
            if kind != "pattern":
                history.add(subject, found, wanted)
        return Found(pandas.DataFrame(rows), {})

    config = {"neurons": list(chosen), "site": site, "threshold": threshold, "draws": draws}
    result = measure("neurons", refs, options, looked, config=config)
    import pandas

    from interp_tasks.experiments.columns import tidy

    later = history.rows()
    frame = pandas.concat([result.frame, tidy(pandas.DataFrame(later))]) if later else result.frame
    order = {ref: place for place, ref in enumerate(dict.fromkeys(result.frame["ref"]))}
    frame = frame.sort_values("ref", key=lambda each: each.map(order), kind="stable", ignore_index=True)
    frame["split"] = "grid"
    said = tuple(notes(kind, threshold, draws, bool(later)))
    return NeuronsResult(**{**vars(result), "frame": frame, "notes": said}, images=images)


def notes(kind: str, threshold: float, draws: int, over_time: bool) -> Iterator[str]:
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
    """A site and its layer.

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
    """Neurons such as ``0,1,2``.

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


def input_axes(subject: Subject) -> tuple[GridAxis, GridAxis]:
    """The two digits of a checkpoint's task.

    Raises:
        UserError: for no task, or one whose inputs make no grid of two coordinates.
    """
    task = subject.task
    if task is None:
        raise UserError(
            "neurons needs a task with a grid of inputs: leave --tokens out, or give --task NAME instead"
        )
    axes = task.grid_axes()
    if len(axes) != 2 or any(axis.position is None for axis in axes) or not hasattr(task, "input_grid"):
        raise UserError(
            f"task {task.name!r} has no grid of two input digits (grid_axes with positions, and input_grid()), which "
            "neurons are drawn over; interp-run fourier also takes grids of positions"
        )
    if min(len(axis.values) for axis in axes) < LEAST:
        raise UserError(
            f"task {task.name!r}: a digit takes fewer than {LEAST} values, which have no frequency"
        )
    return axes[0], axes[1]


def features_at(
    subject: Subject, axes: tuple[GridAxis, GridAxis], kind: str, layer: int | None
) -> Iterator[Features]:
    """The features of each layer and read position over the complete grid, a few examples at a time.

    Raises:
        UserError: for a layer there is not.
    """
    import torch

    from circuits import cache
    from circuits.fourier import Grid

    task: Any = subject.task
    layers = range(subject.model.cfg.n_layers) if layer is None else [layer]
    if layers[-1] >= subject.model.cfg.n_layers:
        raise UserError(f"--site {kind}.{layer}: the model has layers 0 to {subject.model.cfg.n_layers - 1}")
    tokens = task.input_grid().tokens.to(subject.tokens.device)
    grid = Grid.of_inputs(
        tokens, {axis.name: int(axis.position or 0) for axis in axes}, [axis.values for axis in axes]
    )
    step = max(1, TOKENS_PER_PASS // tokens.shape[1])
    for each in layers:
        site = f"{kind}.{each}"
        for position in task.read_positions:
            parts = []
            for start in range(0, len(tokens), step):
                seen = cache(subject.model, tokens[start : start + step], [site])[site]
                if kind == "pattern":
                    seen = seen[:, :, position, [int(axis.position or 0) for axis in axes]].flatten(1)
                else:
                    seen = seen[:, position]
                parts.append(seen.cpu())
            values = torch.cat(parts)
            heads: list[int | None] = [None] * values.shape[1]
            names = [f"neuron {at}" for at in range(values.shape[1])]
            if kind == "pattern":
                heads = [head for head in range(values.shape[1] // 2) for _ in axes]
                names = [f"{each}.{head} to {axis.name}" for head in heads[::2] for axis in axes]
            many = f", position {position}" if len(task.read_positions) > 1 else ""
            yield Features(site + many, kind, each, position, tuple(names), tuple(heads), values, grid)


def wanted_of(features: Features, chosen: Sequence[int]) -> list[int]:
    """The features that have images and rows of their own.

    Raises:
        UserError: for a neuron there is not.
    """
    there = len(features.names)
    if features.site == "pattern":
        return list(range(there))
    if max(chosen) >= there:
        raise UserError(f"--neurons {max(chosen)}: {features.label} has neurons 0 to {there - 1}")
    return list(chosen)


def measured(features: Features, threshold: float, draws: int, seed: int) -> Measured:
    """Everything that is said of the features of one site."""
    import torch

    from circuits.fourier import active, clusters, spectrum
    from circuits.relabelling import relabelling

    grid = features.grid
    found = spectrum(features.values, grid)
    first_names = relabelling(grid, seed)
    arranged = grid.arrange(features.values)
    renamed = arranged[first_names[0]][:, first_names[1]].flatten(0, 1)
    other = spectrum(renamed, grid.axes)
    share = found.share
    grouped = clusters(found, threshold)
    longest = max(share.shape[:2]) - 1
    linear = share.new_zeros(longest + 1, share.shape[2])
    linear[1 : share.shape[0]] += share[1:, 0]
    linear[1 : share.shape[1]] += share[0, 1:]
    # `best` counts the frequencies that are in the spectrum, which are 1, 2, ...
    first = linear.gather(0, (grouped.best + 1).clamp(min=0)[None])[0]
    alone = dict(zip(grid.axes, (share[1:, 0].sum(0), share[0, 1:].sum(0)), strict=True))
    return Measured(
        features,
        found,
        grouped,
        active(features.values, grid, draws=draws, seed=seed),
        torch.where(grouped.best < 0, 0.0, first),
        grouped.share,
        alone,
        share[1:, 1:].sum((0, 1)),
        pairs_for_half(share),
        pairs_for_half(other.share),
    )


def pairs_for_half(share: Tensor) -> Tensor:
    """How many pairs of frequencies it takes, largest first, of shares [k_a k_b feature]; NaN where there are none."""
    import torch

    sums = share.flatten(0, 1).sort(0, descending=True).values.cumsum(0)
    counts = (sums < 0.5).sum(0) + 1.0
    return torch.where(sums[-1] > 0.5, counts, math.nan)


def image(found: Measured, at: int) -> Image:
    first, second = found.features.grid.axes
    values = found.features.grid.arrange(found.features.values[:, at]).numpy()
    return Image((first, second), values, found.spectrum.share[..., at].numpy())


def rows_of(found: Measured, wanted: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the chosen features, of clusters and of all."""
    features, common = found.features, common_of(found.features)
    rows: list[dict[str, Any]] = []
    for at in wanted:
        about = {**common, "variant": features.names[at], "head": features.heads[at]}
        rows += [{**about, **row} for row in one_feature(found, at)]
    if features.site == "pattern":
        return rows + [{**common, **row} for row in preferences(features)]
    for variant, metrics in together(found).items():
        rows += [{**common, "variant": variant, **row} for row in metrics]
    return rows


def common_of(features: Features) -> dict[str, Any]:
    """The columns that all rows of one tensor share."""
    return {
        "intervention": features.label,
        "site": features.site,
        "layer": features.layer,
        "position": features.position,
        "n": features.grid.cells,
    }


def preferences(features: Features) -> Iterator[dict[str, Any]]:
    """Of each head, how much of its mean attention to both digits goes to the one that gets more: 0.5 to 1."""
    means = features.values.double().mean(0).unflatten(0, (-1, 2))
    for head, pair in enumerate(means):
        about = {"variant": f"{features.layer}.{head}", "head": head}
        yield {**about, **row(TO_ONE, float(pair.max() / pair.sum()))}


def one_feature(found: Measured, at: int) -> Iterator[dict[str, Any]]:
    """Of a feature that does not vary only its mean."""
    yield row(MEAN, found.features.values[:, at].double().mean())
    if float(found.variance[at]) <= 0 or int(found.clusters.best[at]) < 0:
        return
    yield row(FREQUENCY, found.clusters.labels[int(found.clusters.best[at])])
    yield row(FIRST, found.first[at])
    yield row(SECOND, found.second[at])
    for axis, share in found.alone.items():
        yield row(ALONE.format(axis), share[at])
    yield row(JOINTLY, found.jointly[at])
    yield row(ONE, max(float(share[at]) for share in found.alone.values()))
    yield row(PAIRS, found.pairs[at], found.pairs_relabelled[at])
    yield row(ACTIVE, found.active.counts[at])


def together(found: Measured) -> dict[str, list[dict[str, Any]]]:
    """Rows of the neurons of each cluster, of all clusters, of all neurons, by variant."""
    import torch

    clusters, varying = found.clusters, found.clusters.best >= 0
    inside = clusters.assigned >= 0
    rows: dict[str, list[dict[str, Any]]] = {}
    groups = {f"{CLUSTER}{label}": clusters.neurons(label) for label in clusters.sizes}
    groups |= {IN_CLUSTERS: inside.nonzero().flatten(), ALL: varying.nonzero().flatten()}
    for variant, members in groups.items():
        weights = found.variance[members]
        whole = float(weights.sum())
        rows[variant] = [row(COUNT, len(members))]
        if whole > 0:
            rows[variant] += [
                row(name, float((share[members] * weights).sum()) / whole)
                for name, share in ((FIRST, found.first), (SECOND, found.second))
            ]
    rows[IN_CLUSTERS] += [
        row(CLUSTERS, len(clusters.sizes)),
        row(CLUSTERED, float(inside.double().mean())),
    ]
    constant = row(DEAD, int((~varying).sum()))
    if not bool(varying.any()):
        rows[ALL] += [constant]
        return rows
    weights = found.variance / found.variance.sum()
    rows[ALL] += [
        *(row(ALONE.format(axis), (share * weights).sum()) for axis, share in found.alone.items()),
        row(JOINTLY, (found.jointly * weights).sum()),
        row(PAIRS, *(torch.nanmedian(each) for each in (found.pairs, found.pairs_relabelled))),
        row(ACTIVE, len(found.active.keys)),
        row(ACTIVE_EACH, found.active.counts[varying].double().mean()),
        constant,
    ]
    return rows


def row(metric: str, value: Any, baseline: Any = None) -> dict[str, Any]:
    found = {"metric": metric, "value": float(value)}
    if baseline is not None:
        found |= {"baseline": float(baseline), "effect": float(value) - float(baseline)}
    return found


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a run: the labels of its rows, what its neurons are counted by, which have rows of their own."""

    labels: Mapping[str, Any]
    amplitudes: np.ndarray
    active_each: float
    wanted: Sequence[int]


@dataclass
class History:
    """What needs all checkpoints of a run, by run and tensor: the published count of active frequencies, and peaks."""

    seen: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)

    def add(self, subject: Subject, found: Measured, wanted: Sequence[int]) -> None:
        if subject.checkpoint.run is None:
            return
        features, varying = found.features, found.clusters.best >= 0
        labels = {**subject.labels, **common_of(features), "experiment": "neurons", "n_runs": 1}
        each = float(found.active.counts[varying].double().mean()) if bool(varying.any()) else 0.0
        entry = Entry(labels, amplitudes(features.grid.arrange(features.values)), each, wanted)
        # A checkpoint's folder lies in the run's folder of checkpoints.
        run = str(subject.checkpoint.path.parent.parent)
        self.seen.setdefault((run, features.label), []).append(entry)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for (run, _), entries in self.seen.items():
            if len(entries) >= LEAST:
                found += of_run(run, sorted(entries, key=lambda entry: entry.labels["step"]))
        return found


def of_run(run: str, entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """The published counts at every checkpoint; where they and the counts against relabelled digits peak."""
    import numpy as np

    over_time = np.stack([entry.amplitudes for entry in entries])
    varying = (over_time[:, 1:] > 0).any((0, 1))
    end = end_of(run)
    series = {(ALL, ACTIVE_EACH): np.array([entry.active_each for entry in entries])}
    kinds = {f"{ACTIVE}, mean + {deviations} sd": (over_time, deviations) for deviations in DEVIATIONS}
    kinds[f"{ACTIVE}, mean + {DEVIATIONS[0]} sd{SIZE}"] = of_equal_size(over_time), DEVIATIONS[0]
    for name, (of, deviations) in kinds.items():
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
    """The end of the drop that a run logged; ``None`` where there is none."""
    from pathlib import Path

    from interp_tasks.checkpoints.marks import find_drop
    from interp_tasks.checkpoints.run_files import RUN_FILE, read_run

    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        return None
    try:
        return find_drop(folder, read_run(folder), folder.name).end
    except UserError:
        return None
