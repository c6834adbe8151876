"""How the embeddings of values and positions are arranged: components, clusters, alignment with the last ones.

Where ``weights [draws point]`` are taken, the result is ``[draws]``: multinomial weights make it a bootstrap, ones
the value itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import Tables, correlation, resamples

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from interp_tasks.measurement.embeddings import Array
    from tasks import Task

ALIGNMENT = "alignment with the final embeddings"
#: Of labels, behind the p-value of a silhouette.
PERMUTATIONS = 999


def principal_components(points: Array) -> tuple[Array, Array]:
    """Returns the directions ``[component d]`` of two principal components of points ``[point d]``, largest first, and
    the centred points on them, ``[point component]``; their signs are arbitrary.
    """
    import numpy as np

    left, sizes, right = np.linalg.svd(points - points.mean(0), full_matrices=False)
    return right[:2], (left * sizes)[:, :2]


def separability(scores: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
    """Measures how well scores tell two classes apart, by the area under the ROC curve.

    Whichever end of the scores fits better is taken for the positive class's.
    """
    import numpy as np

    wins = np.sign(scores[positive][:, None] - scores[~positive]) / 2 + 0.5
    ups, downs = weights[:, positive], weights[:, ~positive]
    pairs = ups.sum(1) * downs.sum(1)
    area = np.einsum("di,ij,dj->d", ups, wins, downs, optimize=True)
    area = np.divide(area, pairs, out=np.full_like(area, np.nan), where=pairs > 0)
    # The end is chosen once, by the points themselves.
    return 1 - area if wins.mean() < 0.5 else area


def distances(points: Array) -> Array:
    """Returns the Euclidean distances between all points."""
    import numpy as np

    return np.asarray(np.sqrt(((points[:, None] - points) ** 2).sum(-1)))


def silhouette(apart: Array, labels: NDArray[np.int64]) -> float:
    """Returns mean silhouette (Rousseeuw 1987) of clusters ``labels`` 0, 1, ... of points with these distances.

    (b − a) / max(a, b) of each point: a its mean distance to the others of its cluster, b to the nearest other
    cluster's points. A point alone in its cluster has 0.
    """
    import numpy as np

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


def clustered(points: Array, labels: NDArray[np.int64], seed: int) -> tuple[float, float, float]:
    """Returns the silhouette of points in clusters, its mean under permuted labels, and p of one as large."""
    import numpy as np

    apart = distances(points)
    value = silhouette(apart, labels)
    rng = np.random.default_rng([seed, 3])
    null = np.array([silhouette(apart, rng.permutation(labels)) for _ in range(PERMUTATIONS)])
    # Rounding must not tell an arrangement from its mirror image.
    hits = int((null >= value - 1e-12).sum())
    return value, float(null.mean()), (1 + hits) / (1 + PERMUTATIONS)


def tsne(points: Array, seed: int) -> Array:
    """Returns scikit-learn's t-SNE in two dimensions; its perplexity is 30, at most a third of the other points."""
    import numpy as np
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(points) - 1) / 3)
    projected = TSNE(2, perplexity=perplexity, random_state=seed % 2**32, init="pca").fit_transform(points)
    return np.asarray(projected, dtype=float)


@dataclass(frozen=True)
class EmbeddingTargets:
    """The values of token ids and the grid of positions that embeddings are compared with."""

    values: Mapping[int, float]
    axes: Mapping[str, int]

    @classmethod
    def of(cls, task: Task | None, largest: float | None) -> EmbeddingTargets:
        """Returns the values and axes that a task declares.

        Raises:
            UserError: if it says nothing, or no value is left.
        """
        assert task is not None
        values = {
            token: value
            for token, value in task.token_values().items()
            if largest is None or abs(value) <= largest * (1 + 1e-6)
        }
        axes = {axis.name: len(axis.values) for axis in task.grid_axes() if axis.position is None}
        if not values and not axes:
            raise UserError(
                f"task {task.name!r} does not say what its tokens (token_values) or positions (grid_axes) stand for"
            )
        if values and len(values) < 4:
            raise UserError(f"--largest {largest:g}: {len(values)} values are left; at least 4 are needed")
        return cls(values, axes)

    @property
    def clustered_axes(self) -> list[str]:
        """Returns the axes of which positions can make clusters: those of neither one line nor all positions."""
        cells = math.prod(self.axes.values())
        return [axis for axis, size in self.axes.items() if 1 < size < cells]

    def labels(self, axis: str) -> np.ndarray:
        """Returns where each position of the grid lies along an axis."""
        import numpy as np

        sizes = tuple(self.axes.values())
        return np.unravel_index(np.arange(int(np.prod(sizes))), sizes)[list(self.axes).index(axis)]


def of_tokens(
    targets: EmbeddingTargets, tables: Tables, end: Tables | None, seed: int
) -> dict[str, tuple[str, Array]]:
    """Returns for each metric its subject and ``[1 + draws]``: the value, then its resamples."""
    import numpy as np
    from scipy.stats import rankdata

    values, points = np.array(list(targets.values.values())), tables.rows(targets.values)
    weights, (_, scores) = resamples(len(values), seed), principal_components(points)
    share = (scores**2).sum() / (((points - points.mean(0)) ** 2).sum() or 1.0)
    quantities = {"variance of two components": ("share", np.full(len(weights), share))}
    at = {value: index for index, value in enumerate(values.tolist())}
    pairs = [(index, at[-value]) for value, index in at.items() if value > 0 and -value in at]
    if pairs:
        up, down = np.linalg.norm(points, axis=1)[np.array(pairs).T]
        resampled_pairs = resamples(len(pairs), seed)
        gap = (resampled_pairs @ np.abs(up - down)) / (resampled_pairs @ ((up + down) / 2))
        quantities["norm asymmetry"] = ("v against -v", gap)
        quantities["norm symmetry"] = ("v against -v", correlation(up, down, resampled_pairs))
        signed = values != 0
        sides = [separability(scores[signed, k], values[signed] > 0, weights[:, signed]) for k in (0, 1)]
        best = int(sides[1][0] > sides[0][0])
        quantities["sign separability"] = (f"component {best + 1}", sides[best])
        along = correlation(rankdata(np.abs(values)), rankdata(scores[:, 1 - best]), weights)
        # A component has no sign; the value's decides for its resamples.
        turned = -along if along[0] < 0 else along
        quantities["magnitude correlation"] = (f"component {2 - best}", turned)
    if end is not None:
        last = end.rows(targets.values)
        directions, _ = principal_components(last)
        aligned = correlation(points @ directions.T, last @ directions.T, weights)
        quantities[ALIGNMENT] = ("two components", aligned)
    return quantities
