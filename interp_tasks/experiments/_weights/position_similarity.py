"""Measures how alike the rows of W_pos are, over all dimensions and over those of the published number."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.embeddings.tables import Tables, interval, resamples
from interp_tasks.measurement.untrained import rows_with_untrained

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings.geometry import Array
    from tasks import Task

#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
PEARSON, COSINE = "Pearson correlation", "cosine similarity"


def pairs_of(task: Task, positions: int) -> list[tuple[int, int]]:
    """Returns the positions compared: those of the grid's coordinates, else the first two."""
    places = sorted({axis.position for axis in task.grid_axes() if axis.position is not None}) or [0, 1]
    return [pair for pair in itertools.combinations(places, 2) if pair[1] < positions]


def of_positions(
    task: Task, tables: Tables, others: Sequence[Tables], seed: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[Array, Array]]]:
    """Returns rows of the similarity of positions, and the compared rows of W_pos; empty without that table."""
    import numpy as np

    if tables.positions is None:
        return [], {}
    rows: list[dict[str, Any]] = []
    compared = {}
    for one, other in pairs_of(task, len(tables.positions)):
        name = f"positions {one} and {other}"
        compared[name] = (tables.positions[one], tables.positions[other])
        for dimensions in dict.fromkeys([tables.positions.shape[1], PUBLISHED_DIMENSIONS]):
            if dimensions > tables.positions.shape[1]:
                continue
            is_full = dimensions == tables.positions.shape[1]
            about = "all dimensions" if is_full else f"first {dimensions} dimensions"
            resampled = similarities(tables.positions, (one, other), dimensions, resamples(dimensions, seed))
            plain = np.ones((1, dimensions))
            control_values = [
                similarities(each.positions, (one, other), dimensions, plain)
                for each in others
                if each.positions is not None
            ]
            for metric, values in resampled.items():
                low, high = interval(values[1:])
                row = {"site": "pos_embed", "n": dimensions, "value_ci_low": low, "value_ci_high": high}
                key = (name, about, metric)
                rows += rows_with_untrained(
                    key, float(values[0]), [float(each[metric][0]) for each in control_values], row
                )
    return rows, compared


def similarities(table: Array, pair: tuple[int, int], dimensions: int, weights: Array) -> dict[str, Array]:
    """Returns Pearson and cosine of two rows over their first dimensions, weighted ``[draws dimension]``."""
    import numpy as np

    from interp_tasks.measurement.embeddings.geometry import correlation

    one, other = (table[position, :dimensions] for position in pair)
    products = weights @ (one * other)
    scale = np.sqrt((weights @ one**2) * (weights @ other**2))
    cosine = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return {PEARSON: correlation(one, other, weights), COSINE: cosine}
