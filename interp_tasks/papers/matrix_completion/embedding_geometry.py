"""How the embeddings of values and positions are arranged: components, clusters, alignment with the last ones.

Where ``weights [draws point]`` are taken, the result is ``[draws]``: multinomial weights make it a bootstrap, ones
the value itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import rankdata

from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import (
    ones_and_bootstrap_weights,
    percentile_interval,
    weighted_correlation,
)
from interp_tasks.measurement.result import Row, number_columns
from interp_tasks.measurement.token_and_position_embeddings import Embeddings

if TYPE_CHECKING:
    from tasks import Task

Array = NDArray[np.float64]
ALIGNMENT = "alignment with the final embeddings"
#: Of labels, behind the p-value of a silhouette.
PERMUTATIONS = 999


def two_principal_components(points: Array) -> tuple[Array, Array]:
    """Returns the directions ``[component d]`` of two principal components of points ``[point d]``, largest first, and
    the centred points on them, ``[point component]``; their signs are arbitrary.
    """
    left, sizes, right = np.linalg.svd(points - points.mean(0), full_matrices=False)
    return right[:2], (left * sizes)[:, :2]


def area_under_roc(scores: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
    """Measures how well scores tell two classes apart, by the area under the ROC curve.

    Whichever end of the scores fits better is taken for the positive class's.
    """
    wins = np.sign(scores[positive][:, None] - scores[~positive]) / 2 + 0.5
    ups, downs = weights[:, positive], weights[:, ~positive]
    pairs = ups.sum(1) * downs.sum(1)
    area = np.einsum("di,ij,dj->d", ups, wins, downs, optimize=True)
    area = np.divide(area, pairs, out=np.full_like(area, np.nan), where=pairs > 0)
    # The end is chosen once, by the points themselves.
    return 1 - area if wins.mean() < 0.5 else area


def pairwise_distances(points: Array) -> Array:
    """Returns the Euclidean distances between all points."""
    found: Array = cdist(points, points)
    return found


def silhouette(distances: Array, labels: NDArray[np.int64]) -> float:
    """Returns mean silhouette (Rousseeuw 1987) of clusters ``labels`` 0, 1, ... of points with these distances.

    (b − a) / max(a, b) of each point: a its mean distance to the others of its cluster, b to the nearest other
    cluster's points. A point alone in its cluster has 0.
    """
    members = np.eye(labels.max() + 1)[labels]
    sizes = members.sum(0)
    sums = distances @ members
    cluster_sizes = sizes[labels]
    inside = sums[np.arange(len(labels)), labels] / np.maximum(cluster_sizes - 1, 1)
    means = sums / sizes
    means[np.arange(len(labels)), labels] = np.inf
    nearest = means.min(1)
    widest = np.maximum(inside, nearest)
    each = np.divide(nearest - inside, widest, out=np.zeros_like(inside), where=widest > 0)
    return float(np.where(cluster_sizes > 1, each, 0.0).mean())


def silhouette_test(points: Array, labels: NDArray[np.int64], seed: int) -> tuple[float, float, float]:
    """Returns the silhouette of points in clusters, its mean under permuted labels, and p of one as large."""
    apart = pairwise_distances(points)
    value = silhouette(apart, labels)
    rng = np.random.default_rng([seed, 3])
    null = np.array([silhouette(apart, rng.permutation(labels)) for _ in range(PERMUTATIONS)])
    # Rounding must not tell an arrangement from its mirror image.
    hits = int((null >= value - 1e-12).sum())
    return value, float(null.mean()), (1 + hits) / (1 + PERMUTATIONS)


def tsne(points: Array, seed: int) -> Array:
    """Returns scikit-learn's t-SNE in two dimensions; its perplexity is 30, at most a third of the other points."""
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(points) - 1) / 3)
    projected = TSNE(2, perplexity=perplexity, random_state=seed % 2**32, init="pca").fit_transform(points)
    return np.asarray(projected, dtype=float)


def grid_sizes(task: Task) -> dict[str, int]:
    """Returns the sizes of the grid that a task's positions make, by name; none where they make none."""
    return {axis.name: len(axis.values) for axis in task.grid_axes() if axis.position is None}


def token_values_up_to(task: Task | None, largest: float | None) -> dict[int, float]:
    """Returns what token ids stand for."""
    assert task is not None
    values = task.token_values()
    if not values and not grid_sizes(task):
        raise UserError(
            f"task {task.name!r} does not say what its tokens (token_values) or positions (grid_axes) stand for"
        )
    kept = {id_: v for id_, v in values.items() if largest is None or abs(v) <= largest * (1 + 1e-6)}
    if values and len(kept) < 4:
        raise UserError(f"{len(kept)} values are left (--largest); at least 4 are needed")
    return kept


def axis_coordinates(axes: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """Returns where each position of the grid lies along each axis."""
    sizes = tuple(axes.values())
    return dict(zip(axes, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True))


def cluster_labels(axes: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """Returns the labels of the axes of which positions can make clusters: neither one line nor all positions."""
    cells = math.prod(axes.values())
    return {axis: labels for axis, labels in axis_coordinates(axes).items() if 1 < axes[axis] < cells}


def alignment_with_last(points: Array, last: Array, weights: Array) -> Array:
    """Returns how far embeddings ``[point d]`` lie as the last ones, on the last ones' two principal components."""
    directions, _ = two_principal_components(last)
    return weighted_correlation(points @ directions.T, last @ directions.T, weights)


def token_metrics(
    values: Array, points: Array, last: Array | None, seed: int
) -> dict[str, tuple[str, Array]]:
    """Returns for each metric its subject and ``[1 + draws]``: the value, then its resamples.

    Args:
        values: ``[point]``, which the embeddings ``points [point d]`` stand for.
        last: those of the run's last checkpoint.
    """
    weights, (_, scores) = (ones_and_bootstrap_weights(len(values), seed), two_principal_components(points))
    quantities = {}
    at = {value: index for index, value in enumerate(values.tolist())}
    pairs = [(index, at[-value]) for value, index in at.items() if value > 0 and -value in at]
    if pairs:
        up, down = np.linalg.norm(points, axis=1)[np.array(pairs).T]
        resampled_pairs = ones_and_bootstrap_weights(len(pairs), seed)
        gap = (resampled_pairs @ np.abs(up - down)) / (resampled_pairs @ ((up + down) / 2))
        quantities["norm asymmetry"] = ("v against -v", gap)
        quantities["norm symmetry"] = ("v against -v", weighted_correlation(up, down, resampled_pairs))
        signed = values != 0
        sides = [area_under_roc(scores[signed, k], values[signed] > 0, weights[:, signed]) for k in (0, 1)]
        best = int(sides[1][0] > sides[0][0])
        quantities["sign separability"] = (f"component {best + 1}", sides[best])
        along = weighted_correlation(rankdata(np.abs(values)), rankdata(scores[:, 1 - best]), weights)
        # A component has no sign; the value's decides for its resamples.
        turned = -along if along[0] < 0 else along
        quantities["magnitude correlation"] = (f"component {2 - best}", turned)
    if last is not None:
        quantities[ALIGNMENT] = ("two components", alignment_with_last(points, last, weights))
    return quantities


# ---- the rows of the table, the points of the figures


def token_rows(
    values: Mapping[int, float],
    embeddings: Embeddings,
    untrained: Embeddings | None,
    last_embeddings: Embeddings | None,
    seed: int,
) -> Iterator[Row]:
    """Yields rows of the token embeddings, beside those of an untrained model."""

    def measured(of: Embeddings) -> dict[str, tuple[str, Array]]:
        last = None if last_embeddings is None else last_embeddings.rows_of_tokens(values)
        return token_metrics(np.array(list(values.values())), of.rows_of_tokens(values), last, seed)

    baseline = {} if untrained is None else measured(untrained)
    for metric, (about, value) in measured(embeddings).items():
        row = {"variant": "tokens", "site": "embed", "n": len(values), "intervention": about}
        beside = float(baseline[metric][1][0]) if metric in baseline else None
        yield {**row, "metric": metric, **number_columns(value[0], percentile_interval(value[1:]), beside)}


def position_rows(
    axes: Mapping[str, int], positions: Array, other: Array | None, plane: Array, seed: int
) -> Iterator[Row]:
    """Yields rows of the position embeddings, and of their t-SNE ``plane``."""
    cells = len(plane)
    common: Row = {"variant": "positions", "site": "pos_embed", "n": cells}
    for prefix, points in (("", positions[:cells]), ("t-SNE ", plane)):
        for axis, labels in cluster_labels(axes).items():
            value, null, p = silhouette_test(points, labels, seed)
            name = f"{prefix}silhouette by {axis}"
            about = {**common, "intervention": "against permuted labels", "metric": name}
            yield {**about, **number_columns(value, baseline=null), "p_value": p}
            yield {**about, "metric": f"{name}: p", "value": p}
    axis, size = next(iter(axes.items()))
    if size > 2:
        # The one or two lines in the middle of the first axis.
        middle = np.abs(axis_coordinates(axes)[axis] - (size - 1) / 2) < 1
        norms = [np.linalg.norm(each[:cells], axis=1) for each in (positions, other) if each is not None]
        ratios = [float(each[middle].mean() / each[~middle].mean()) for each in norms]
        about = {**common, "intervention": "norms", "metric": f"norm of the middle {axis} / others"}
        yield {**about, **number_columns(ratios[0], baseline=ratios[1] if ratios[1:] else None)}


def token_components_and_norms(values: Mapping[int, float], tables: Embeddings) -> pandas.DataFrame:
    """Returns the table of the figures of tokens."""
    points = tables.rows_of_tokens(values)
    named = {"value": list(values.values()), "norm": np.linalg.norm(points, axis=1)}
    first, second = two_principal_components(points)[1].T
    return pandas.DataFrame(named | {"component 1": first, "component 2": second})


def position_tsne_and_norms(axes: Mapping[str, int], positions: Array, plane: Array) -> pandas.DataFrame:
    """Returns the table of the figures of positions; the last column has what they are coloured by."""
    norms = np.linalg.norm(positions[: len(plane)], axis=1)
    named = {"position": range(len(plane)), "norm": norms, "t-SNE 1": plane[:, 0], "t-SNE 2": plane[:, 1]}
    return pandas.DataFrame(named | axis_coordinates(axes))
