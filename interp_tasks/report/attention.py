"""Mean attention of every head as one picture, layers down, heads across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import SEQUENTIAL
from interp_tasks.pages import Beside, Section, Text
from interp_tasks.pages.pack import pack
from interp_tasks.report.draw import stepped, width_of
from interp_tasks.report.snapshots import counted

if TYPE_CHECKING:
    import numpy as np

    from interp_tasks.measurement.embeddings.geometry import Array
    from interp_tasks.report.snapshots import View
    from tasks import Task

TITLE = "Attention"
#: Characters of a page that maps may take, of all views together; and numbers beyond which they are left out.
BUDGET, MAX_NUMBERS = 7_800_000, 12_000_000
#: Pixels of the side of a map at most, and around all of them.
MAP, MARGIN = 170, {"l": 70, "r": 90, "t": 40, "b": 50}


def attention_section(views: Sequence[View]) -> Section:
    """Maps of all heads at the slider's step, in colours that mean the same at every step."""
    import torch

    from circuits.figures.attention_maps import largest_choice

    numbers = sum(len(view.snapshots) * view.snapshots[0].maps.size for view in views)
    if numbers > MAX_NUMBERS:
        return Text(
            f"Left out: {numbers:,} numbers would make the page too large. Name fewer checkpoints, as in "
            "RUN@0:20000:4000; interp-run attention shows any one of them.",
            TITLE,
        )
    largest = max(
        largest_choice(torch.as_tensor(snapshot.maps)) for view in views for snapshot in view.snapshots
    )
    parts = []
    precision = 0.0
    for view in views:
        part, unit = mosaic(view, largest, width_of(views), BUDGET // len(views))
        parts.append(part)
        precision = max(precision, unit / 2)
    return Beside(
        parts,
        TITLE,
        f"The mean attention map of every head over the {counted(views)}: a row of a map is a query, a column a key. "
        "Colours mean the same at every step, go by the square root, so that small shares differ in colour too, and "
        "end at the largest share of a query that sees several keys. "
        f"Drag to zoom into a head, double-click to go back. Values are rounded by {precision:.1g} at most.",
    )


def mosaic(view: View, largest: float, width: int, budget: int) -> tuple[Section, float]:
    """Returns the maps side by side with gaps between them, and the spacing of the levels that they are stored at."""
    import plotly.graph_objects as go

    from circuits.figures.attention_maps import NUMBERED, ticks

    layers, heads, length, _ = view.snapshots[0].maps.shape
    gap = max(1, round(length / 12))
    names = position_labels(view.task, length)
    packed = pack(tiled(view, gap), budget)
    across, down = packed.shape[2], packed.shape[1]
    figure = go.Figure()
    figure.add_heatmap(
        x=places("head", heads, names, gap, "key"),
        y=places("layer", layers, names, gap, "query"),
        z=[],
        zmin=0,
        zmax=largest,
        colorscale=by_root(),
        colorbar={"title": {"text": "attention"}, "thickness": 12, "len": 1.0, "outlinewidth": 0}
        # Beside one row of maps more numbers than these lie upon each other.
        | ticks(
            largest, max(float(each.maps.max()) for each in view.snapshots), parts=1 if layers == 1 else 4
        ),
        hoverongaps=False,
        # Of few positions shares can be read, where their colours are alike as well.
        texttemplate="%{z:.2f}" if length <= NUMBERED else None,
        textfont={"size": 9},
        hovertemplate="%{y}<br>%{x}<br>attention %{z:.4f}<extra></extra>",
    )
    for update, kind, count in ((figure.update_xaxes, "head", heads), (figure.update_yaxes, "layer", layers)):
        update(
            type="category",
            tickmode="array",
            tickvals=[index * (length + gap) + (length - 1) / 2 for index in range(count)],
            # With the word before each, those of eight heads would run into each other on a narrow page.
            ticktext=[str(index) for index in range(count)],
            showgrid=False,
            zeroline=False,
            ticks="",
            constrain="domain",
            title_text="head · key" if kind == "head" else "layer · query",
        )
    cell = min((width - MARGIN["l"] - MARGIN["r"]) / across, MAP / length)
    top = MARGIN["t"] if view.beside else 15
    height = round(down * cell + top + MARGIN["b"])
    figure.update_yaxes(autorange="reversed", scaleanchor="x", constraintoward="top")
    figure.update_xaxes(constraintoward="left", side="bottom")
    figure.update_layout(margin={**MARGIN, "t": top})
    # The colour bar stands beside the maps, not at the far end of the page.
    wide = round(across * cell) + MARGIN["l"] + MARGIN["r"]
    alt = f"attention maps of {layers} layers of {heads} heads at the step of the slider"
    return stepped(view, figure, {"data.0.z": packed}, alt, height, width=wide), packed.unit


def by_root(stops: int = 32) -> list[tuple[float, str]]:
    """Returns the sequential colours at the squares of their places: most shares are far below the largest one."""
    from plotly.colors import sample_colorscale

    places = [index / stops for index in range(stops + 1)]
    return [
        (place**2, colour)
        for place, colour in zip(places, sample_colorscale(SEQUENTIAL, places), strict=True)
    ]


def tiled(view: View, gap: int) -> Array:
    """Returns ``[checkpoint row column]``: all maps with ``gap`` empty rows and columns between them."""
    import numpy as np

    maps = np.stack([snapshot.maps for snapshot in view.snapshots])
    padded = np.pad(maps, [(0, 0)] * 3 + [(0, gap)] * 2, constant_values=np.nan)
    checkpoints, layers, heads, side, _ = padded.shape
    tiles = padded.transpose(0, 1, 3, 2, 4).reshape(checkpoints, layers * side, heads * side)
    return np.asarray(tiles[:, :-gap, :-gap])


def places(kind: str, count: int, names: Sequence[str], gap: int, of: str) -> list[str]:
    """Returns names of the picture's rows or columns; the gaps between maps get different blank names."""
    labels: list[str] = []
    for index in range(count):
        labels += [f"{kind} {index}, {of} {name}" for name in names]
        labels += [" " * (1 + index * gap + position) for position in range(gap)]
    return labels[:-gap]


def position_labels(task: Task | None, length: int) -> list[str]:
    """Returns the names of positions: their place on the task's grid, the input that stands there, or a number."""
    import numpy as np

    axes: Sequence[Any] = () if task is None else task.grid_axes()
    grid = [len(axis.values) for axis in axes if axis.position is None]
    if grid and int(np.prod(grid)) == length:
        cells: np.ndarray = np.indices(grid).reshape(len(grid), -1).T
        return ["(" + ",".join(map(str, cell)) + ")" for cell in cells]
    names = {axis.position: axis.name for axis in axes if axis.position is not None}
    return [
        f"{position} ({names[position]})" if position in names else str(position)
        for position in range(length)
    ]
