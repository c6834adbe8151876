"""Lays panels out in a grid, with titles, a legend below and colour bars beside them, for narrow pages too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import takewhile
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    Figure = Any

#: Characters of a name that counts as short.
LONGEST_SHORT = 12


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Shortens names to their differences, in whole parts: ``@pre``, ``@post`` of one run; long ones to letters."""
    same = _common_prefix(names)
    before = same[: max(map(same.rfind, "@/:")) + 1].removesuffix("@")
    rests = [name.removeprefix(before) for name in names]
    end = re.search("[@/:].*", _common_prefix([rest[::-1] for rest in rests])[::-1])
    short = [rest.removesuffix(end[0]) if end and len(names) > 1 else rest for rest in rests]
    if not all(short) or max(map(len, short)) > LONGEST_SHORT:
        short = [chr(ord("A") + at) if len(names) <= 26 else str(at + 1) for at in range(len(names))]
    return dict(zip(names, short, strict=True))


def _common_prefix(texts: Sequence[str]) -> str:
    return "".join(same[0] for same in takewhile(lambda same: len({*same}) == 1, zip(*texts, strict=False)))


def _name_legend(short: Mapping[str, str]) -> str:
    """Returns what short names stand for, in a sentence; what all names have in common is said once."""
    name, first = next(iter(short.items()))
    begin, _, end = name.partition(first)
    if all(other == f"{begin}{each}{end}" for other, each in short.items()):
        return f"All names: {begin}…{end}."
    return "; ".join(f"{text}: {name}" for name, text in short.items()) + "."


GROUND, INK, GRID = "#ffffff", "#1b1f24", "#dfe3e8"
#: A line to compare with.
GREY: dict[str, Any] = {"dash": "dash", "color": "#808080", "width": 1.5}
COLOURS = ["#0072b2", "#d55e00", "#00805d", "#b3528a", "#8a6d00", "#2b87bd", "#5c5c5c"]
#: One symbol per series beside its colour, so that no reading rests on colour alone.
SYMBOLS = ["circle", "diamond", "square", "triangle-up", "x", "star", "cross"]
#: Scales that are even to the eye: for one-sided values, and for signed ones.
SEQUENTIAL = "Cividis"
DIVERGING = [[0.0, COLOURS[0]], [0.5, "#f2f2f2"], [1.0, COLOURS[1]]]


def colour_and_symbol(index: int) -> tuple[str, str]:
    """Returns the colour and the symbol of a series; where colours begin again, symbols are moved on by one."""
    return COLOURS[index % len(COLOURS)], SYMBOLS[(index + index // len(COLOURS)) % len(SYMBOLS)]


#: A logarithmic axis: few ticks, as powers of ten.
LOG: dict[str, Any] = {"type": "log", "exponentformat": "power", "nticks": 6}
_AXIS: dict[str, Any] = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": GRID,
    "automargin": True,
    # Labels keep a distance from the panel, and titles one from the labels, however long these are.
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "rgba(0,0,0,0)",
    "title": {"standoff": 8},
    # Ticks read 20,000 and 0.00015, not 20k and 150µ, because steps and errors have no unit.
    "exponentformat": "none",
    "separatethousands": True,
}
#: A plotly template; the background is set, as the text could not be read on a dark one, such as a notebook's.
TEMPLATE: dict[str, Any] = {
    "layout": {
        "colorway": COLOURS,
        "colorscale": {"sequential": SEQUENTIAL, "diverging": DIVERGING},
        "font": {"color": INK, "family": "system-ui, sans-serif", "size": 13},
        "paper_bgcolor": GROUND,
        "plot_bgcolor": GROUND,
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "hoverlabel": {"bgcolor": GROUND, "font": {"color": INK}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": COLOURS[0]},
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
    },
    "data": {"bar": [{"error_y": {"color": INK}}]},
}

#: Pixels: plotly's width and height; the width for which texts are broken; a character, a line, a mark in a legend.
WIDTH, HEIGHT, NARROW, CHARACTER, LINE, SYMBOL = 900, 450, 560, 7.2, 17, 48
#: Pixels: a figure's title with plotly's toolbar above it; axis labels and their title below and left of a panel; a
#: colour bar; between panels that share an axis; the narrowest figure.
TITLE, BELOW, BESIDE, BAR, NEAR, NARROWEST = 54, 62, 70, 90, 26, 320
#: Characters of a label above which labels of its axis are shortened.
LONGEST_LABEL = 28
#: Keys in a figure's meta: the height that `titled` added, the subtitle as it was given, the narrowest width at which
#: the figure can be read.
TITLE_HEIGHT_KEY, SUBTITLE_KEY, LEAST_KEY = "room for the title", "subtitle", "least width"


@dataclass(frozen=True)
class Panel:
    """What one pair of axes shows.

    Attributes:
        traces: plotly traces, without axes.
        x, y: plotly's settings of the axes.
        height, width: pixels, of the highest and the widest panel of a row and a column; widths grow with the page.
        bar: whether a colour bar stands beside it.
        lines: across the panel: `{"y": 1.0}` or `{"x": 20}`; with a plotly `line`.
    """

    traces: Sequence[dict[str, Any]]
    title: str = ""
    x: Mapping[str, Any] = field(default_factory=dict)
    y: Mapping[str, Any] = field(default_factory=dict)
    height: int = 240
    width: int = 220
    bar: bool = False
    lines: Sequence[Mapping[str, Any]] = ()


def draw_panels(
    panels: Sequence[Panel],
    title: str = "",
    subtitle: str = "",
    *,
    columns: int = 1,
    share_y: bool = False,
    **layout: Any,
) -> Any:
    """Returns a plotly figure of panels, row by row.

    Args:
        columns: panels side by side.
        share_y: whether panels of a row have the labels of the first one.
        layout: more of plotly's settings.
    """
    from plotly.subplots import make_subplots

    columns = min(columns, len(panels))
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    by_column = [panels[at::columns] for at in range(columns)]
    bars = [any(panel.bar for panel in column) for column in by_column]
    gap, left, right = (NEAR if share_y else BESIDE) + BAR * any(bars[:-1]), BESIDE, 20 + BAR * bars[-1]
    widths = [float(max(panel.width for panel in column)) for column in by_column]
    least = left + sum(widths) + gap * (columns - 1) + right
    widths = [width + max(0, NARROW - least) / columns for width in widths]
    titles = [wrap_text(panel.title, widths[at % columns] + gap / 2) for at, panel in enumerate(panels)]
    lines = [1 + title.count("<br>") if title else 0 for title in titles]
    above, first = (LINE * max(some) + 6 * bool(max(some)) for some in (lines, lines[:columns]))
    heights = [max(panel.height for panel in row) for row in rows]
    *between, below = (max(map(_compute_bottom_margin, row, widths)) for row in rows)
    distance = max(between) + above if between else 0.0
    across, down = sum(widths) + gap * (columns - 1), sum(heights) + distance * (len(rows) - 1)
    cells: list[Any] = [{}] * len(panels) + [None] * (len(rows) * columns - len(panels))
    figure = make_subplots(
        len(rows),
        columns,
        specs=[cells[at : at + columns] for at in range(0, len(cells), columns)],
        column_widths=widths,
        row_heights=heights,
        horizontal_spacing=gap / across,
        vertical_spacing=distance / down,
        subplot_titles=titles,
    )
    figure.update_annotations(font_size=13, yshift=3)
    for number, panel in enumerate(panels):
        _add_panel(figure, panel, *divmod(number, columns), share_y, down)
    said, legend = _shorten_labels_and_explain(figure), _hide_or_measure_legend(figure)
    figure.update_layout(
        template=TEMPLATE,
        height=int(first + down + below + legend + 10),
        margin={"l": left, "r": right, "t": first + 10, "b": below + legend},
        legend={"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom", "x": 0},
        meta={LEAST_KEY: max(NARROWEST, int(least))},
        **layout,
    )
    return titled(figure, title, " ".join(filter(None, [subtitle, said])))


def _add_panel(figure: Any, panel: Panel, row: int, column: int, share_y: bool, height: float) -> None:
    """Adds a panel's traces, axes and lines, and puts its colour bar beside it.

    Args:
        height: of all panels together, in pixels.
    """
    at = {"row": row + 1, "col": column + 1}
    hidden: dict[str, Any] = {"showticklabels": False, "title": {"text": ""}} if share_y and column else {}
    figure.update_xaxes(**at, **panel.x)
    figure.update_yaxes(**at, **{**panel.y, **hidden})
    place = figure.get_subplot(**at)
    x, y = place.xaxis.domain, place.yaxis.domain
    seen = {trace.name for trace in figure.data}
    for trace in panel.traces:
        name = trace.get("name")
        shown = bool(trace.get("showlegend", True) and name and name not in seen)
        more = {"legendgroup": trace.get("legendgroup", name), "showlegend": shown}
        if trace["type"] == "heatmap":
            more = {"showscale": panel.bar and trace.get("showscale", True)}
        if more.get("showscale"):
            bar = {"x": x[1], "xanchor": "left", "y": sum(y) / 2, "thickness": 12, "outlinewidth": 0}
            bar |= {"len": max(y[1] - y[0], 100 / height), "tickfont": {"size": 11}}
            more["colorbar"] = bar | trace.get("colorbar", {})
        seen.add(name)
        figure.add_trace({**trace, **more}, **at)
    for line in panel.lines:
        add = figure.add_hline if "y" in line else figure.add_vline
        add(**{"line": GREY, **line}, **at)


def _axis_labels_and_length(traces: Sequence[Any], letter: str) -> tuple[list[str], int]:
    """Returns the names along an axis, none along one of numbers, and the length of the longest line of them."""
    axes = [trace[letter] for trace in traces if letter in trace and trace[letter] is not None]
    labels = [label for axis in axes if len(axis) and isinstance(axis[0], str) for label in axis]
    labels = list(dict.fromkeys(labels))
    return labels, max((len(part) for label in labels for part in label.split("<br>")), default=0)


def _compute_bottom_margin(panel: Panel, width: float) -> float:
    """Returns the pixels below a panel: more where plotly turns its labels for want of room."""
    labels, longest = _axis_labels_and_length(panel.traces, "x")
    # Longer ones are shortened.
    turned = LONGEST_LABEL >= longest > width / CHARACTER / max(1, len(labels))
    return BELOW + (0.7 * CHARACTER * longest if turned else 0.0)


def _shorten_labels_and_explain(figure: Any) -> str:
    """Gives long labels of an axis, and long entries of the legend, short names, and returns what these mean."""
    said: dict[str, None] = {}
    for letter in "xy":
        for axis in figure.select_xaxes() if letter == "x" else figure.select_yaxes():
            name = axis.plotly_name.replace("axis", "")
            traces = [trace for trace in figure.data if trace[f"{letter}axis"] == name]
            labels, longest = _axis_labels_and_length(traces, letter)
            if longest > LONGEST_LABEL and len(labels) <= 40:
                short = short_names(labels)
                axis.update(tickmode="array", tickvals=labels, ticktext=list(short.values()))
                in_a_line = {label.replace("<br>", ", "): text for label, text in short.items()}
                said[_name_legend(in_a_line)] = None
    entries = [trace for trace in figure.data if trace.showlegend]
    if len(entries) > 1 and max(len(trace.name) for trace in entries) > LONGEST_LABEL:
        short = short_names([trace.name for trace in entries])
        said[_name_legend(short)] = None
        for trace in entries:
            trace.name = short[trace.name]
    return " ".join(said)


def _hide_or_measure_legend(figure: Any) -> int:
    """Returns the legend's height in pixels; one of a single entry is not shown."""
    names = [trace.name for trace in figure.data if trace.showlegend]
    if len(names) < 2:
        figure.update_layout(showlegend=False)
        return 0
    # Plotly gives all entries of a legend in columns the width of the longest.
    each = max(map(len, names)) * CHARACTER + SYMBOL
    return LINE * math.ceil(len(names) / max(1, int((NARROW - BESIDE) / each))) + 16


def wrap_text(text: str, width: float) -> str:
    """Returns a text broken into lines of so many pixels."""
    room = max(9, int(width / CHARACTER))
    return "<br>".join(part for line in text.split("<br>") for part in wrap(line, room) or [""])


def titled(figure: Figure, title: str, subtitle: str = "") -> Figure:
    """Returns the figure with a title above its panels: the figure becomes higher, and its panels keep their size.

    A title that the figure has is replaced.
    """
    figure = untitled(figure)
    layout = figure.layout
    lines = wrap(subtitle, int(((layout.width or WIDTH) - 40) / 6.9))
    height = TITLE + LINE * len(lines)
    # A figure without a margin of its own has the template's.
    margin = layout.margin.t if layout.margin.t is not None else layout.template.layout.margin.t
    small = {"text": "<br>".join(escape(line, quote=False) for line in lines), "font": {"size": 12}}
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"l": 16, "t": 28}}
    return figure.update_layout(
        title={"text": escape(title, quote=False), "subtitle": small, "font": {"size": 16}, **place},
        height=(layout.height or HEIGHT) + height,
        margin={"t": (100 if margin is None else margin) + height},
        meta=dict(layout.meta or {}) | {TITLE_HEIGHT_KEY: height, SUBTITLE_KEY: subtitle},
    )


def untitled(figure: Figure) -> Figure:
    """Returns a copy of the figure without the title and the height that `titled` added."""
    copy, meta = type(figure)(figure), dict(figure.layout.meta or {})
    if TITLE_HEIGHT_KEY not in meta:
        return copy
    height = meta.pop(TITLE_HEIGHT_KEY)
    del meta[SUBTITLE_KEY]
    copy.layout.title, copy.layout.meta = None, meta
    return copy.update_layout(height=copy.layout.height - height, margin={"t": copy.layout.margin.t - height})


def least_readable_width(figure: Any) -> int:
    """Returns the pixels below which a figure cannot be read: a narrower page scrolls it sideways."""
    return int((figure.layout.meta or {}).get(LEAST_KEY, NARROWEST))
