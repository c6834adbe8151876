"""Figures of data: numbers in polar coordinates, inputs and answers over the grid, the DFT matrix, matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, heat, scatter

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray

#: Numbers beyond which none is a point of the polar plot; maps side by side; cells have their number up to this side.
MAX_NUMBERS, COLUMNS, WRITTEN = 20_000, 4, 13
POLAR, INPUTS, ANSWERS, DFT, EXAMPLES = "Polar plot", "Inputs (X)", "Answers (Y)", "DFT matrix", "Examples"
CAPTIONS: Mapping[str, str] = {
    POLAR: "Every number n at radius n and angle n (in radians, so n mod 2π).",
    INPUTS: "The token of each coordinate over the grid: first coordinate downwards, second to the right.",
    ANSWERS: "Each answer over the grid: first coordinate downwards, second to the right.",
    DFT: "The orthonormal basis that spectra are taken in: constant, cos 1, sin 1, cos 2, ... as rows.",
    EXAMPLES: "Targets of the first examples; a cross is hidden from the model.",
}


def of_inputs(
    axes: Mapping[str, int],
    tokens: Mapping[str, NDArray[np.int64]],
    answers: Mapping[str, NDArray[np.int64]],
    multiples: Sequence[int],
) -> dict[str, plotly.graph_objects.Figure]:
    """Draws by title the polar plot, X, Y, and the DFT matrix of each length of a coordinate.

    Args:
        axes: the names of the coordinates, and how many values each has.
        tokens: coordinate -> its token ids over the grid ``[first second]``.
        answers: answer -> its classes over the grid.
        multiples: which multiples the polar plot shows.
    """
    figures = {
        POLAR: polar(math.prod(axes.values()), multiples),
        INPUTS: over_grid(tokens, list(axes)),
        ANSWERS: over_grid(answers, list(axes)),
    }
    sizes = dict.fromkeys(axes.values())
    for size in sizes:
        figures[DFT if len(sizes) == 1 else f"{DFT}, {size}"] = dft(size)
    return figures


def polar(cells: int, multiples: Sequence[int]) -> plotly.graph_objects.Figure:
    """Draws the numbers from 0 that the cells of a grid stand for; on the left multiples, on the right primes."""
    from tasks.modular_arithmetic import primes_below

    count = min(cells, MAX_NUMBERS)
    small = {"marker": {"size": 2 if count > 1000 else 4, "opacity": 0.35}}

    def placed(numbers: Sequence[int], **more: Any) -> Series:
        x, y = ([number * turn(number) for number in numbers] for turn in (math.cos, math.sin))
        return Series(x, y, hover=[str(number) for number in numbers], **more)

    series = {"n": placed(range(count), style=small, look=6)}
    for index, number in enumerate(multiples):
        style = {"marker": {"size": 4}}
        series[f"multiples of {number}"] = placed(range(number, count, number), style=style, look=index)
    primes = {"primes": placed(primes_below(count), style={"marker": {"size": 4}}, look=0)}
    size: dict[str, Any] = {"x": "n · cos n", "y": "n · sin n", "height": 380, "width": 380}
    panels = [
        scatter(series, f"n < {count} and multiples", **size),
        scatter(primes, f"primes below {count}", **size),
    ]
    hide: dict[str, Any] = {"showticklabels": False, "showgrid": False, "range": [-count, count]}
    return draw(panels, columns=2).update_xaxes(**hide).update_yaxes(**hide)


def over_grid(maps: Mapping[str, NDArray[np.int64]], axes: list[str]) -> plotly.graph_objects.Figure:
    """Returns a p × p image of each, in whole numbers from 0."""
    panels = []
    for title, values in maps.items():
        numbers = values.astype(str) if max(values.shape) <= WRITTEN else None
        options: dict[str, Any] = {"across": axes[1], "down": axes[0], "numbers": False, "bar": False}
        panels.append(
            heat(values, title, text=numbers, row=230 // min(60, len(values)), width=200, **options)
        )
    return draw(panels, columns=min(COLUMNS, len(panels)))


def dft(size: int) -> plotly.graph_objects.Figure:
    """Draws the rows of the discrete Fourier basis of so many values."""
    from circuits.fourier import basis

    rows = basis(size).numpy()
    return draw([heat(rows, signed=True, across="x", down="row of the basis", numbers=False, row=8)])


def of_matrices(
    values: NDArray[np.float64], hidden: NDArray[np.bool_] | None
) -> dict[str, plotly.graph_objects.Figure]:
    """Draws a map of each example ``[example row column]``, hidden entries crossed, by title."""
    import numpy as np

    largest = float(np.abs(values).max())
    panels = []
    for number, matrix in enumerate(values):
        crossed = np.zeros(matrix.shape, bool) if hidden is None else hidden[number]
        options: dict[str, Any] = {"unit": "entry", "signed": True, "end": largest, "bar": number % 3 == 2}
        text = np.where(crossed, "×", "")
        panels.append(
            heat(matrix, f"example {number}", text=text, across="column", down="row", width=160, **options)
        )
    return {EXAMPLES: draw(panels, columns=min(3, len(panels)))}
