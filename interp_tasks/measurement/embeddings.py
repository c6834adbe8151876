"""Embeddings as tables of numpy, what their rows stand for, and correlations of them with resamples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import LEVEL
from interp_tasks.measurement.confidence_intervals import draw_counts as bootstrap_weights
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: What stands in the column ``split`` where no example plays a part.
WEIGHTS = "weights"


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of tokens ``[id d]`` and positions ``[position d]``, float64."""

    tokens: Array
    positions: Array | None

    @classmethod
    def of(cls, model: Any) -> Embeddings:
        parameters = dict(model.named_parameters())
        positions = parameters.get("pos_embed.W_pos")
        tokens = model.W_E.detach().double().cpu().numpy()
        return cls(tokens, None if positions is None else positions.detach().double().cpu().numpy())

    def rows_of_tokens(self, values: Mapping[int, float]) -> Array:
        return self.tokens[list(values)]


def untrained_embeddings(subject: LoadedCheckpoint, draw: int = 0) -> Embeddings | None:
    """Returns the embeddings of an untrained model; ``None`` for an architecture that the task cannot build."""
    from interp_tasks.measurement.untrained_models import build_untrained

    try:
        return Embeddings.of(build_untrained(subject, draw))
    except UserError:
        return None


def bootstrap_point_weights(points: int, seed: int) -> Array:
    """Returns weights ``[1 + draws, point]``: ones, then those of a bootstrap."""
    import numpy as np

    return np.concatenate([np.ones((1, points)), bootstrap_weights(seed, points, stream=4)])


def weighted_correlation(one: Array, other: Array, weights: Array) -> Array:
    """Returns Pearson's weighted correlation, of points ``[point k]`` over all k together; 0 where nothing varies."""
    import numpy as np

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


def percentile_interval(resampled: Array) -> tuple[float, float]:
    """Returns the percentile interval of resamples; NaN where there are none, or all are equal."""
    import numpy as np

    if not len(resampled) or np.ptp(resampled) == 0:
        return float("nan"), float("nan")
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
