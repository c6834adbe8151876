"""Figures of data: numbers in polar coordinates, inputs and answers over the grid, the DFT matrix, matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SEQUENTIAL, SYMBOLS, template

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray

#: Sides of panels in pixels, and how many stand beside one another.
PANEL, GAP, TOP, COLUMNS = 230, 80, 70, 4
#: Numbers beyond which none is a point of the polar plot.
MAX_NUMBERS = 20_000
#: Cells have their number written in them up to this side.
WRITTEN = 13
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
        INPUTS: panels(tokens, list(axes)),
        ANSWERS: panels(answers, list(axes)),
    }
    sizes = dict.fromkeys(axes.values())
    for size in sizes:
        figures[DFT if len(sizes) == 1 else f"{DFT}, {size}"] = dft(size)
    return figures


def of_matrices(
    values: NDArray[np.float64], hidden: NDArray[np.bool_] | None
) -> dict[str, plotly.graph_objects.Figure]:
    """Draws examples ``[example row column]``, hidden entries crossed, by title."""
    return {EXAMPLES: examples(values, hidden)}


def polar(cells: int, multiples: Sequence[int]) -> plotly.graph_objects.Figure:
    """Draws the numbers from 0 that the cells of a grid stand for; on the left multiples, on the right primes."""
    from plotly.subplots import make_subplots

    from tasks.modular_arithmetic import primes_below

    count = min(cells, MAX_NUMBERS)
    figure = make_subplots(
        rows=1,
        cols=2,
        specs=[[{"type": "polar"}, {"type": "polar"}]],
        subplot_titles=[f"n < {count} and multiples", f"primes below {count}"],
    )
    series: list[tuple[str, Sequence[int], int, int]] = [("n", range(count), 6, 1)]
    series += [
        (f"multiples of {number}", range(number, count, number), index, 1)
        for index, number in enumerate(multiples)
    ]
    series.append(("primes", primes_below(count), 0, 2))
    for name, numbers, colour, column in series:
        colour %= len(COLOURS["light"])
        figure.add_trace(
            {
                "type": "scatterpolar",
                "mode": "markers",
                "r": list(numbers),
                "theta": list(numbers),
                "thetaunit": "radians",
                "name": name,
                "opacity": 0.35 if name == "n" else 1,
                "marker": {
                    "size": 2 if name == "n" and count > 1000 else 4,
                    "color": COLOURS["light"][colour],
                    "symbol": "circle" if name == "n" else SYMBOLS[colour],
                },
                "hovertemplate": "%{r}<extra></extra>",
            },
            row=1,
            col=column,
        )
    # One theme for both: the template says nothing of polar axes.
    quiet = {"showticklabels": False, "ticks": "", "gridcolor": "rgba(128,128,128,0.25)", "showline": False}
    figure.update_polars(radialaxis=quiet, angularaxis=quiet, bgcolor="rgba(0,0,0,0)")
    figure.update_layout(
        height=560, margin={"t": 110, "b": 30}, legend={"y": 1.1}, template=template("light")
    )
    figure.update_annotations(font_size=13)
    return figure


def panels(maps: Mapping[str, NDArray[np.int64]], axes: list[str]) -> plotly.graph_objects.Figure:
    """Returns a p × p image of each, in whole numbers from 0."""
    import numpy as np
    from plotly.subplots import make_subplots

    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    total_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=list(maps),
        vertical_spacing=GAP / total_height if rows > 1 else 0,
        horizontal_spacing=0.05,
    )
    for index, values in enumerate(maps.values()):
        written = max(values.shape) <= WRITTEN
        small = np.uint8 if values.max() < 256 and values.min() >= 0 else np.int32
        trace: dict[str, Any] = {
            "type": "heatmap",
            "z": values.astype(small),
            "colorscale": SEQUENTIAL,
            "showscale": False,
            "hovertemplate": f"{axes[0]} %{{y}}, {axes[1]} %{{x}}: %{{z}}<extra></extra>",
        }
        if written:
            trace |= {"texttemplate": "%{z}", "textfont": {"size": 9}}
        at = {"row": index // columns + 1, "col": index % columns + 1}
        figure.add_trace(trace, **at)
        quiet = {"showgrid": False, "zeroline": False, "nticks": 4, **at}
        figure.update_yaxes(autorange="reversed", title_text=axes[0] if at["col"] == 1 else None, **quiet)
        figure.update_xaxes(title={"text": axes[1], "standoff": 4}, **quiet)
    figure.update_layout(
        height=TOP + total_height + 40, margin={"t": TOP, "b": 40}, template=template("light")
    )
    figure.update_annotations(font_size=13)
    return figure


def dft(size: int) -> plotly.graph_objects.Figure:
    """Draws the Fourier basis of so many values as a map, a row for each function."""
    import numpy as np
    from plotly import graph_objects

    from circuits.fourier import basis

    rows = basis(size).numpy().astype(np.float32)
    figure = graph_objects.Figure(
        {
            "type": "heatmap",
            "z": rows,
            "coloraxis": "coloraxis",
            "hovertemplate": "row %{y}, x %{x}: %{z:.3g}<extra></extra>",
        }
    )
    largest = float(np.abs(rows).max())
    figure.update_layout(
        height=520,
        margin={"t": 40, "b": 50},
        coloraxis=colours(largest, "value"),
        xaxis={"title": "x", "showgrid": False, "zeroline": False},
        yaxis={
            "title": "row of the basis",
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
        },
        template=template("light"),
    )
    return figure


def colours(largest: float, title: str) -> dict[str, Any]:
    """Returns the diverging colours of the template, about 0."""
    bar = {"title": {"text": title}, "thickness": 12}
    return {"autocolorscale": True, "cmin": -largest, "cmax": largest, "colorbar": bar}


def examples(matrices: NDArray[np.float64], hidden: NDArray[np.bool_] | None) -> plotly.graph_objects.Figure:
    """Draws a map of each matrix ``[example row column]``, hidden entries crossed."""
    import numpy as np
    from plotly.subplots import make_subplots

    count = len(matrices)
    columns = min(3, count)
    rows = -(-count // columns)
    total_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[f"example {index}" for index in range(count)],
        vertical_spacing=GAP / total_height if rows > 1 else 0,
        horizontal_spacing=0.06,
    )
    largest = float(np.abs(matrices).max())
    for number, values in enumerate(matrices):
        crossed = np.zeros(values.shape, bool) if hidden is None else hidden[number]
        trace = {
            "type": "heatmap",
            "z": values.tolist(),
            "coloraxis": "coloraxis",
            "text": np.where(crossed, "×", "").tolist(),
            "texttemplate": "%{text}",
            "textfont": {"size": 16},
            "hovertemplate": "row %{y}, column %{x}: %{z:.3g}<extra></extra>",
        }
        at = {"row": number // columns + 1, "col": number % columns + 1}
        figure.add_trace(trace, **at)
        quiet = {"showgrid": False, "zeroline": False, "dtick": 1, **at}
        figure.update_yaxes(autorange="reversed", title_text="row" if at["col"] == 1 else None, **quiet)
        figure.update_xaxes(title={"text": "column", "standoff": 4}, **quiet)
    figure.update_layout(
        height=TOP + total_height + 40,
        margin={"t": TOP, "b": 40},
        coloraxis=colours(largest, "entry"),
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure
