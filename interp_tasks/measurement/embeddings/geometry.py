"""Numbers for how points lie: principal components, ranks, clusters. Arrays of numpy; no model, no task.

Where ``weights [draws point]`` are taken, the result is ``[draws]``: multinomial weights make it a bootstrap, ones
the value itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Components:
    """Principal components of points.

    Attributes:
        directions: ``[component d]``, of length 1, largest variance first.
        scores: ``[point component]``: the centred points on the directions.
        shares: of the variance.
    """

    directions: Array
    scores: Array
    shares: Array


def principal(points: Array, n: int = 2) -> Components:
    """Returns the first ``n`` principal components of points ``[point d]``, centred; their signs are arbitrary."""
    centred = points - points.mean(0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    power = sizes**2
    shares = power / power.sum() if power.any() else power
    return Components(right[:n], (left * sizes)[:, :n], shares[:n])


def ranks(values: Array) -> Array:
    """Ranks from 1, the mean rank where values are equal."""
    _, rank, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[rank], dtype=float)


def correlation(one: Array, other: Array, weights: Array) -> Array:
    """Returns Pearson's weighted correlation, of points ``[point k]`` over all k together; 0 where nothing varies."""
    # Without the overall mean, as an offset would cost the products below their digits.
    one, other = (x.reshape(len(x), -1) - x.reshape(len(x), -1).mean(0) for x in (one, other))
    total = weights.sum(1)
    means = [(weights @ x) / total[:, None] for x in (one, other)]
    products = {
        (i, j): (weights @ (x * y) / total[:, None] - means[i] * means[j]).sum(1)
        for i, x in enumerate((one, other))
        for j, y in enumerate((one, other))
        if i <= j
    }
    scale = np.sqrt(np.clip(products[0, 0] * products[1, 1], 0, None))
    return np.divide(products[0, 1], scale, out=np.zeros_like(scale), where=scale > 1e-300)


def separability(scores: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
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


def distances(points: Array) -> Array:
    """Returns the Euclidean distances between all points."""
    return np.asarray(np.sqrt(((points[:, None] - points) ** 2).sum(-1)))


def silhouette(apart: Array, labels: NDArray[np.int64]) -> float:
    """Returns mean silhouette (Rousseeuw 1987) of clusters ``labels`` 0, 1, ... of points with these distances.

    (b − a) / max(a, b) of each point: a its mean distance to the others of its cluster, b to the nearest other
    cluster's points. A point alone in its cluster has 0.
    """
    members = np.eye(labels.max() + 1)[labels]
    sizes = members.sum(0)
    sums = apart @ members
    cluster_sizes = sizes[labels]
    inside = sums[np.arange(len(labels)), labels] / np.maximum(cluster_sizes - 1, 1)
    means = sums / sizes
    means[np.arange(len(labels)), labels] = np.inf
    nearest = means.min(1)
    widest = np.maximum(inside, nearest)
    each = np.divide(nearest - inside, widest, out=np.zeros_like(inside), where=widest > 0)
    return float(np.where(cluster_sizes > 1, each, 0.0).mean())


@dataclass(frozen=True)
class Clustered:
    """A silhouette beside those of permuted labels: its mean under them, and p of one as large."""

    value: float
    null: float
    p_value: float


def clustered(points: Array, labels: NDArray[np.int64], seed: int, permutations: int = 999) -> Clustered:
    """Measures how far points lie in clusters, by their silhouette, with a permutation test."""
    apart = distances(points)
    value = silhouette(apart, labels)
    rng = np.random.default_rng([seed, 3])
    null = np.array([silhouette(apart, rng.permutation(labels)) for _ in range(permutations)])
    # Rounding must not tell an arrangement from its mirror image.
    hits = int((null >= value - 1e-12).sum())
    return Clustered(value, float(null.mean()), (1 + hits) / (1 + permutations))


def tsne(points: Array, seed: int, perplexity: float = 30.0) -> tuple[Array, float]:
    """Returns scikit-learn's t-SNE in two dimensions, and the perplexity used: at most a third of the other points."""
    from sklearn.manifold import TSNE

    used = min(perplexity, (len(points) - 1) / 3)
    projected = TSNE(2, perplexity=used, random_state=seed % 2**32, init="pca").fit_transform(points)
    return np.asarray(projected, dtype=float), used
