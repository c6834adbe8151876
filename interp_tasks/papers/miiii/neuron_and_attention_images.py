"""Neurons and attention weights as functions on the grid of inputs: images, spectra, variance explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import heatmap
from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, path_of_run
from interp_tasks.measurement.logged_runs import find_drop_or_none
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import THRESHOLD, check_choice, check_draws
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns
from interp_tasks.pages import Figure
from interp_tasks.papers.input_grid_and_answers import GridInputs

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from interp_tasks.papers.miiii.active_frequencies import LayerFeatures

SITES = ("mlp_post", "pattern")
NEURONS = (0, 1, 2)
#: Metrics of a neuron, of a cluster, and of all of them.
FIRST, SECOND, ONE = "variance explained, degree 1", "variance explained, degree 2", "variance by one digit"
PAIRS = "pairs of frequencies for half of the variance"
ACTIVE, ACTIVE_EACH = "active frequencies", "active frequencies per neuron"
#: Variants that are about no single neuron.
ALL, IN_CLUSTERS = "all neurons", "in clusters"
#: Fewer time points have no spread to speak of.
MIN_CHECKPOINTS = 3


def parse_neurons(given: str | Sequence[int]) -> tuple[int, ...]:
    """Parses neurons such as ``0,1,2``."""
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(map(str, given))
    if not parts or not all(part.isdecimal() and part.isascii() and len(part) < 9 for part in parts):
        raise UserError(f"--neurons {given}: write neurons counted from 0, such as 0,1,2")
    return tuple(dict.fromkeys(map(int, parts)))


NEURONS_OPTION = typer.Option(
    "--neurons", metavar="N,N", help="Draw these, counted from 0; heads are all drawn."
)
SITE = typer.Option("--site", metavar="SITE", help="mlp_post, or pattern: attention to each digit.")
DRAWS = typer.Option("--draws", help="Relabellings of the digits that active frequencies are held against.")


NOTES = (
    "The grid of inputs is complete and all neurons count: nothing is sampled, there are no intervals.",
    "degree 1: cos and sin of the first frequency in either digit. degree 2: also their products; above "
    f"{THRESHOLD:g} a neuron is in a cluster. one digit: any function of the digit that explains more. Of several "
    "neurons: of their variance in sum.",
    "active frequencies: a larger share of the variance than any has under any of --draws relabellings of the digits. "
    "baseline of pairs: after one relabelling.",
    "+1 sd, +2 sd, of three checkpoints or more: the published counts above the mean, of each frequency's share of its "
    "own sum over the checkpoints, which depend on these and on the size of a neuron. without size: after division by "
    "the sum over frequencies. baseline of the peak's step: the end of the run's drop.",
)


class FeatureImage(NamedTuple):
    """One neuron or attention weight over the grid: ``values [a b]``, ``share [k_a k_b]`` of its variance."""

    axes: tuple[str, ...]
    values: np.ndarray
    share: np.ndarray


def make_images(features: LayerFeatures, wanted: Sequence[int]) -> Iterator[tuple[str, FeatureImage]]:
    """Yields names and images of some features."""
    values, share = features.grid.arrange(features.values), features.spectrum.share
    for at in wanted:
        image = FeatureImage(tuple(features.grid.axes), values[..., at].numpy(), share[..., at].numpy())
        yield f"{features.names[at]} of {features.site}.{features.layer}", image


class CheckpointAmplitudes(NamedTuple):
    """What the published counts of a run are made of, of one of its checkpoints."""

    ref: str
    step: int
    shared: Row
    amplitudes: np.ndarray
    mean_active: float


@experiment(says={"site": None}, without=("tokens", "prompts", "samples", "split"))
def neurons(
    refs: str | Sequence[str],
    neurons: Annotated[str | Sequence[int], NEURONS_OPTION, str] = NEURONS,
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
        draws: relabellings of the digits behind ``active frequencies``; see :func:`count_active_against_chance`.
        options: seed, task, task_config, device, progress: see :class:`Options`.
    """
    from interp_tasks.papers.miiii.active_frequencies import features_by_layer, published_amplitudes

    check_choice("--site", site, SITES)
    check_draws(draws)
    chosen = parse_neurons(neurons)
    images: dict[str, dict[str, FeatureImage]] = {}
    history: dict[tuple[str, int], list[CheckpointAmplitudes]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        rows, ref = [], str(subject.labels["ref"])
        for features in features_by_layer(subject, site, draws):
            wanted = range(len(features.names)) if site == "pattern" else chosen
            shared = {"site": site, "layer": features.layer, "position": features.position, "split": "grid"}
            shared |= {"intervention": f"{site}.{features.layer}", "n": features.grid.cells}
            rows += [{**shared, **row} for row in feature_and_cluster_rows(features, wanted)]
            images.setdefault(ref, {}).update(make_images(features, wanted))
            if site != "pattern" and subject.stored.run_name is not None:
                strengths = published_amplitudes(features.grid.arrange(features.values))
                moment = CheckpointAmplitudes(
                    ref, subject.stored.step, shared, strengths, features.mean_active
                )
                history.setdefault((path_of_run(subject), features.layer), []).append(moment)
        return rows

    def check_sizes(sizes: Any, name: str) -> None:
        if site != "pattern" and max(chosen) >= sizes.d_mlp:
            raise UserError(f"--neurons {max(chosen)}: {site} of {name} has neurons 0-{sizes.d_mlp - 1}")

    config = {"neurons": list(chosen), "site": site, "draws": draws}
    checks: dict[str, Any] = {
        "check_sizes": check_sizes,
        "later": lambda: count_and_peak_by_ref(history, chosen),
        "check": lambda subject: GridInputs.of(subject.task, "neurons", coordinates=2),
    }
    result = measure("neurons", refs, options, measure_checkpoint, config=config, **checks)
    return replace(result, notes=NOTES, data={"images": images})


def feature_and_cluster_rows(features: LayerFeatures, wanted: Sequence[int]) -> Iterator[Row]:
    """Yields rows of the chosen features; of heads their preferences, of neurons those of clusters and of all."""
    import torch

    for at in wanted:
        about = {"variant": features.names[at], "head": features.heads[at]}
        yield {**about, **row("mean", features.values[:, at].double().mean())}
        if not features.varying[at]:
            continue
        clusters = features.clusters
        yield {**about, **row("frequency", clusters.labels[int(clusters.best[at])])}
        yield {**about, **row(FIRST, features.first[at])}
        yield {**about, **row(SECOND, clusters.share[at])}
        yield {**about, **row(ONE, features.one[at])}
        yield {**about, **row(PAIRS, features.pairs[at], features.pairs_relabelled[at])}
        yield {**about, **row(ACTIVE, features.active[at])}
    if features.site == "pattern":
        # The share of a head's mean attention to both digits that the one with more gets: 0.5 to 1.
        for head, pair in enumerate(features.values.double().mean(0).unflatten(0, (-1, 2))):
            about = {"variant": f"{features.layer}.{head}", "head": head}
            yield {**about, **row("share of attention to one digit", float(pair.max() / pair.sum()))}
        return
    inside = features.clusters.assigned >= 0
    for variant, members in ((IN_CLUSTERS, inside), (ALL, features.varying)):
        weights = features.spectrum.variance[members]
        total = float(weights.sum())
        yield {"variant": variant, **row("neurons", int(members.sum()))}
        for name, share in ((FIRST, features.first), (SECOND, features.clusters.share)) if total > 0 else ():
            yield {"variant": variant, **row(name, float((share[members] * weights).sum()) / total)}
    yield {"variant": IN_CLUSTERS, **row("clusters", len(features.clusters.sizes))}
    yield {"variant": IN_CLUSTERS, **row("share of neurons in clusters", float(inside.double().mean()))}
    if bool(features.varying.any()):
        medians = (torch.nanmedian(each) for each in (features.pairs, features.pairs_relabelled))
        yield {"variant": ALL, **row(PAIRS, *medians)}
        yield {"variant": ALL, **row(ACTIVE, features.active_together)}
        yield {"variant": ALL, **row(ACTIVE_EACH, features.mean_active)}


def count_and_peak_by_ref(
    history: Mapping[tuple[str, int], Sequence[CheckpointAmplitudes]], wanted: Sequence[int]
) -> dict[str, list[Row]]:
    """Returns by REF what needs all checkpoints of a run, three at least."""
    rows: dict[str, list[Row]] = {}
    for (run, _), moments in history.items():
        for ref, row in count_and_peak_rows(run, moments, wanted) if len(moments) >= MIN_CHECKPOINTS else ():
            rows.setdefault(ref, []).append(row)
    return rows


def count_and_peak_rows(
    run: str, checkpoints: Sequence[CheckpointAmplitudes], wanted: Sequence[int]
) -> Iterator[tuple[str, Row]]:
    """Yields REFs and rows: the published counts at every checkpoint; where they and the other counts peak."""
    import numpy as np

    from interp_tasks.papers.miiii.active_frequencies import amplitude_shares, count_active_by_published_rule

    checkpoints = sorted(checkpoints, key=lambda moment: moment.step)
    over_time = np.stack([moment.amplitudes for moment in checkpoints])
    varying = (over_time[:, 1:] > 0).any((0, 1))
    drop = find_drop_or_none(Path(run))
    series = {(ALL, ACTIVE_EACH): np.array([moment.mean_active for moment in checkpoints])}
    for kind, counts in (
        ("1 sd", count_active_by_published_rule(over_time, 1)),
        ("2 sd", count_active_by_published_rule(over_time, 2)),
        ("1 sd, without size", count_active_by_published_rule(amplitude_shares(over_time), 1)),
    ):
        name = f"{ACTIVE}, mean + {kind}"
        series |= {(f"neuron {at}", name): counts[:, at].astype(float) for at in wanted}
        if varying.any():
            series[ALL, name] = counts[:, varying].mean(1)
    for (variant, name), values in series.items():
        for moment, value in zip(checkpoints, values, strict=True) if name != ACTIVE_EACH else ():
            yield moment.ref, {**moment.shared, "variant": variant, **row(name, value)}
        last, at = {**checkpoints[-1].shared, "variant": variant}, int(values.argmax())
        end = None if drop is None else drop.end
        yield checkpoints[-1].ref, {**last, **row(f"{name}, step of the peak", checkpoints[at].step, end)}
        if values[at] > 0:
            yield checkpoints[-1].ref, {**last, **row(f"{name}, end / peak", values[-1] / values[at])}


def row(metric: str, value: Any, baseline: Any = None) -> Row:
    return {"metric": metric, **number_columns(value, baseline=baseline)}


def figures(result: Result) -> list[Figure]:
    """Returns the images of every checkpoint; of many what changes over training, and images of two of them."""
    from interp_tasks.measurement.result_table_plots import values_figure

    drawn, images = [], result.data["images"]
    refs = list(images)
    if len(refs) >= MIN_CHECKPOINTS:
        shown = result.frame[result.frame["variant"].isin([ALL, IN_CLUSTERS])]
        drawn.append(Figure(values_figure(shown), "Over training", "By stored checkpoint."))
        refs = [refs[0], refs[-1]]
    caption = (
        "Left: the value for every input, first coordinate down, second across. Right: the share of its variance "
        "in each pair of frequencies, without the constant. Each image has its own colour scale."
    )
    for ref in refs:
        panels = []
        for name, ((first, second), values, shares) in images[ref].items():
            height = max(6, 280 // min(60, len(values)))
            options: dict[str, Any] = {"numbers": False, "width": 230, "row": height}
            ends: dict[str, Any] = {"start": float(values.min()), "end": float(values.max())}
            panels.append(heatmap(values, name, across=second, down=first, **ends, **options))
            options |= {"unit": "share of variance (%)", "row": max(6, 280 // min(60, len(shares)))}
            options |= {"across": f"frequency in {second}", "down": f"frequency in {first}"}
            # A neuron that is nowhere active has no share above 0.
            panels.append(
                heatmap(100 * shares, "its spectrum", end=float(100 * shares.max()) or 100, **options)
            )
        drawn.append(Figure(draw_panels(panels, columns=2), f"Over the inputs, {ref}", caption))
    return drawn
