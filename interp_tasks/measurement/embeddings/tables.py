"""Reads embeddings as tables, with the values and positions of their rows, and measures their arrangement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.paired import LEVEL
from interp_tasks.measurement.paired import resamples as bootstrap_weights
from interp_tasks.measurement.subjects import LoadedCheckpoint, PendingCheckpoint

if TYPE_CHECKING:
    import numpy as np

    from interp_tasks.measurement.embeddings.geometry import Array
    from tasks import Task

#: What stands in the column ``split`` where no example plays a part.
WEIGHTS = "weights"
ALIGNMENT = "alignment with the final embeddings"


@dataclass(frozen=True)
class EmbeddingTargets:
    """The values of token ids and the grid of positions that embeddings are compared with."""

    values: Mapping[int, float]
    axes: Mapping[str, int]

    @classmethod
    def of(cls, subject: LoadedCheckpoint | PendingCheckpoint, largest: float | None) -> EmbeddingTargets:
        """Returns the values and axes that a checkpoint's task declares; see :meth:`of_task`."""
        assert subject.task is not None
        return cls.of_task(subject.task, largest)

    @classmethod
    def of_task(cls, task: Task, largest: float | None) -> EmbeddingTargets:
        """Returns the values and axes that a task declares.

        Raises:
            UserError: if it says nothing, or no value is left.
        """
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


@dataclass(frozen=True)
class Tables:
    """Embeddings of tokens ``[id d]`` and positions ``[position d]``, float64."""

    tokens: Array
    positions: Array | None

    @classmethod
    def of(cls, model: Any) -> Tables:
        parameters = dict(model.named_parameters())
        positions = parameters.get("pos_embed.W_pos")
        tokens = model.W_E.detach().double().cpu().numpy()
        return cls(tokens, None if positions is None else positions.detach().double().cpu().numpy())

    def rows(self, values: Mapping[int, float]) -> Array:
        return self.tokens[list(values)]


def resamples(points: int, seed: int) -> Array:
    """Returns weights ``[1 + draws, point]``: ones, then those of a bootstrap."""
    import numpy as np

    return np.concatenate([np.ones((1, points)), bootstrap_weights(seed, points, stream=4)])


def of_tokens(
    targets: EmbeddingTargets, tables: Tables, end: Tables | None, seed: int
) -> dict[str, tuple[str, Array]]:
    """Returns for each metric its subject and ``[1 + draws]``: the value, then its resamples."""
    import numpy as np

    from interp_tasks.measurement.embeddings.geometry import correlation, principal, ranks, separability

    values, points = np.array(list(targets.values.values())), tables.rows(targets.values)
    components, weights = principal(points), resamples(len(values), seed)
    quantities: dict[str, tuple[str, Array]] = {
        "variance of two components": ("share", np.full(len(weights), components.shares.sum()))
    }
    pairs = [
        (list(values).index(v), list(values).index(-v)) for v in values if v > 0 and -v in values.tolist()
    ]
    if pairs:
        norms = np.linalg.norm(points, axis=1)
        up, down = (norms[[pair[side] for pair in pairs]] for side in (0, 1))
        resampled_pairs = resamples(len(pairs), seed)
        gap = (resampled_pairs @ np.abs(up - down)) / (resampled_pairs @ ((up + down) / 2))
        quantities["norm asymmetry"] = ("v against -v", gap)
        quantities["norm symmetry"] = ("v against -v", correlation(up, down, resampled_pairs))
        signed = values != 0
        sides = [
            separability(components.scores[signed, k], values[signed] > 0, weights[:, signed]) for k in (0, 1)
        ]
        best = int(sides[1][0] > sides[0][0])
        quantities["sign separability"] = (f"component {best + 1}", sides[best])
        scores, other = components.scores[:, 1 - best], f"component {2 - best}"
        quantities["magnitude correlation"] = (
            other,
            turned(correlation(ranks(np.abs(values)), ranks(scores), weights)),
        )
    else:
        for k in (0, 1):
            along = correlation(ranks(values), ranks(components.scores[:, k]), weights)
            quantities[f"value correlation, component {k + 1}"] = (f"component {k + 1}", turned(along))
    if end is not None:
        last = end.rows(targets.values)
        directions = principal(last).directions
        quantities[ALIGNMENT] = (
            "two components",
            correlation(points @ directions.T, last @ directions.T, weights),
        )
    return quantities


def turned(correlations: Array) -> Array:
    """Returns correlations without the sign, which a component does not have; the value's decides for its resamples."""
    return -correlations if correlations[0] < 0 else correlations


def interval(resampled: Array) -> tuple[float, float]:
    """Returns the percentile interval of resamples; NaN where there are none, or all are equal."""
    import numpy as np

    if not len(resampled) or np.ptp(resampled) == 0:
        return float("nan"), float("nan")
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Table:
    """A token table ``[row d]``; ``axis`` names the coordinate whose values its rows are in order, if they are."""

    label: str
    rows: Array
    axis: str | None


def tables_of(task: Task, tables: Tables) -> list[Table]:
    """Returns the rows of W_E by coordinate of the input grid, or, without one, by the values of tokens."""
    by_values = {axis.values: axis.name for axis in task.grid_axes() if axis.position is not None}
    if by_values:
        one = len(by_values) == 1
        return [
            Table("W_E" if one else f"W_E ({name})", tables.tokens[list(values)], "digit" if one else name)
            for values, name in by_values.items()
        ]
    values = task.token_values()
    used = sorted(values, key=lambda token: values[token]) or list(range(len(tables.tokens)))
    return [Table("W_E", tables.tokens[used], None)]
