"""Lays panels out in a grid, with titles, a legend below and colour bars beside them, for narrow pages too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import Any, Literal

#: Characters of a name that counts as short.
LONGEST_SHORT = 12


def short_names(refs: Sequence[str]) -> dict[str, str]:
    """Shortens REFs to their differences: ``@pre``, ``@post`` of one run; ``seed-0``, ``seed-1``; else letters."""
    common = in_common(refs)
    short = [] if common is None else [ref[len(common[0]) : len(ref) - len(common[1])] for ref in refs]
    if not short or max(map(len, short)) > LONGEST_SHORT:
        short = [chr(ord("A") + at) if len(refs) <= 26 else str(at + 1) for at in range(len(refs))]
    return dict(zip(refs, short, strict=True))


def spelled(text: str) -> str:
    """Returns a text as plotly shows it: a token such as <s> would be taken for a tag, and be gone."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def means(short: Mapping[str, str]) -> str:
    """Returns what short names stand for, in a sentence; what all names have in common is said once."""
    (name, first), *rest = short.items()
    begin, found, end = name.partition(first)
    if found and all(other == f"{begin}{each}{end}" for other, each in rest):
        return f"All names: {begin}…{end}."
    return "; ".join(f"{text}: {name}" for name, text in short.items()) + "."


def in_common(names: Sequence[str]) -> tuple[str, str] | None:
    """Returns what all names begin with and what they end with, in whole parts; ``None`` where too much is left.

    A part ends before ``@``, ``/`` or ``:``; where the rest of that is still long, at ``-`` too.
    """
    for marks in ("@/:", "@/:-"):
        parts = [re.findall(f"[{marks}]?[^{marks}]+|[{marks}]", name) for name in names]
        fewest = min(map(len, parts))
        begin = next((at for at in range(fewest) if len({each[at] for each in parts}) > 1), fewest - 1)
        end = next((at for at in range(fewest - begin) if len({each[-at - 1] for each in parts}) > 1), 0)
        before = "".join(parts[0][:begin])
        rests = ["".join(each[begin:]) for each in parts]
        if all(rest[:1] in "/:-" and len(rest) > 1 for rest in rests) and len({r[0] for r in rests}) == 1:
            before += rests[0][0]
        after = "".join(parts[0][len(parts[0]) - end :])
        left = [name[len(before) : len(name) - len(after)] for name in names]
        if len({*left}) == len({*names}) and all(left) and max(map(len, left)) <= LONGEST_SHORT:
            return before, after
    return None


Scheme = Literal["light", "dark"]

GROUND: dict[Scheme, str] = {"light": "#ffffff", "dark": "#15181c"}
INK: dict[Scheme, str] = {"light": "#1b1f24", "dark": "#e6e8eb"}
GRID: dict[Scheme, str] = {"light": "#dfe3e8", "dark": "#343a42"}
COLOURS: dict[Scheme, list[str]] = {
    "light": ["#0072b2", "#d55e00", "#00805d", "#b3528a", "#8a6d00", "#2b87bd", "#5c5c5c"],
    "dark": ["#56b4e9", "#ff8a3d", "#2fc79b", "#e39cc4", "#f0e442", "#8fb8ff", "#c2c7cd"],
}
#: One symbol per series beside its colour, so that no reading rests on colour alone.
SYMBOLS = ["circle", "diamond", "square", "triangle-up", "x", "star", "cross"]
#: A perceptually even scale for one-sided values; `diverging` is the one for signed values.
SEQUENTIAL = "Cividis"
#: A scale for angles: its ends meet.
CYCLIC = "Phase"


def mark(index: int) -> tuple[str, str]:
    """Returns the light colour and the symbol of a series; where colours begin again, symbols are moved on by one."""
    colours = COLOURS["light"]
    return colours[index % len(colours)], SYMBOLS[(index + index // len(colours)) % len(SYMBOLS)]


def diverging(scheme: Scheme) -> list[list[float | str]]:
    blue, orange = COLOURS[scheme][0], COLOURS[scheme][1]
    return [[0.0, blue], [0.5, "#f2f2f2" if scheme == "light" else "#23272d"], [1.0, orange]]


def template(scheme: Scheme) -> dict[str, Any]:
    """Returns a plotly layout template for one colour scheme."""
    axis = {
        "gridcolor": GRID[scheme],
        "linecolor": GRID[scheme],
        "zerolinecolor": GRID[scheme],
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
    return {
        "layout": {
            "colorway": COLOURS[scheme],
            "colorscale": {"sequential": SEQUENTIAL, "diverging": diverging(scheme)},
            "font": {"color": INK[scheme], "family": "system-ui, sans-serif", "size": 13},
            # The background is set, because the text could not be read on a dark one, such as a notebook's.
            "paper_bgcolor": GROUND[scheme],
            "plot_bgcolor": GROUND[scheme],
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": GROUND[scheme], "font": {"color": INK[scheme]}},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.04, "x": 0},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK[scheme], "activecolor": COLOURS[scheme][0]},
            "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
        },
        "data": {"bar": [{"error_y": {"color": INK[scheme]}}]},
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
#: Ticks of a logarithmic axis as powers of ten; the font is smaller, because plotly enlarges powers by a quarter.
POWERS: dict[str, Any] = {"exponentformat": "power", "tickfont": {"size": 10}}


@dataclass(frozen=True)
class Panel:
    """What one pair of axes shows.

    Attributes:
        traces: plotly traces, without axes.
        x, y: plotly's settings of the axes.
        height, width: pixels; the width is the least, a panel grows with its page.
        bar: whether a colour bar stands beside it.
        lines: across the panel: `{"y": 1.0}` or `{"x": 20}`, `{"x0": 10, "x1": 20}` is shaded; with a plotly `line`.
    """

    traces: Sequence[dict[str, Any]]
    title: str = ""
    x: Mapping[str, Any] = field(default_factory=dict)
    y: Mapping[str, Any] = field(default_factory=dict)
    height: int = 240
    width: int = 220
    bar: bool = False
    lines: Sequence[Mapping[str, Any]] = ()


def draw(
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
    from plotly import graph_objects

    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    spans, widths, sides = _across(panels, max(map(len, rows)), share_y)
    heights = [max(panel.height for panel in row) for row in rows]
    titles = [wrapped(panel.title, widths[at % columns]) for at, panel in enumerate(panels)]
    above = [_title_height(titles[at : at + columns]) for at in range(0, len(panels), columns)]
    below = [max(_below(panel, width) for panel, width in zip(row, widths, strict=False)) for row in rows]
    total = sum(heights) + sum(above[1:]) + sum(below[:-1])
    figure = graph_objects.Figure()
    top = 0.0
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        if number and column == 0:
            top += heights[row - 1] + below[row - 1] + above[row]
        domain = (1 - (top + panel.height) / total, 1 - top / total)
        _add_panel(figure, panel, number, spans[column], domain, titles[number])
        if share_y and column:
            figure.update_layout({f"yaxis{number + 1}": {"showticklabels": False, "title": {"text": ""}}})
    said = _shorten_labels(figure)
    legend = _tidy_legend(figure)
    figure.update_layout(
        template=template("light"),
        height=int(above[0] + total + below[-1] + legend + 10),
        margin={"l": sides[0], "r": sides[1], "t": above[0] + 10, "b": below[-1] + legend},
        legend={"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom", "x": 0},
        meta={
            LEAST_KEY: max(NARROWEST, int(sum(sides) + (sum(widths) if len(widths) > 1 else panels[0].width)))
        },
        **layout,
    )
    return titled(figure, title, " ".join(filter(None, [subtitle, said])))


def _title_height(titles: Sequence[str]) -> int:
    lines = max(text.count("<br>") + 1 if text else 0 for text in titles)
    return LINE * lines + 6 if lines else 0


def _across(
    panels: Sequence[Panel], columns: int, share_y: bool
) -> tuple[list[tuple[float, float]], list[float], tuple[int, int]]:
    """Returns each column's domain and its pixels on a narrow page, and the pixels left and right of all."""
    by_column = [panels[at::columns] for at in range(columns)]
    bars = [any(panel.bar for panel in column) for column in by_column]
    sides = (BESIDE, 20 + BAR * bars[-1])
    if columns == 1:
        return [(0.0, 1.0)], [float(NARROW - sum(sides))], sides
    widths = [float(max(panel.width for panel in column)) for column in by_column]
    gaps = [(NEAR if share_y else BESIDE) + BAR * bar for bar in bars[:-1]]
    total = sum(widths) + sum(gaps)
    if total < NARROW - sum(sides):
        widths = [width + (NARROW - sum(sides) - total) / columns for width in widths]
        total = sum(widths) + sum(gaps)
    spans, left = [], 0.0
    for width, gap in zip(widths, [*gaps, 0], strict=True):
        spans.append((left / total, min(1.0, (left + width) / total)))
        left += width + gap
    return spans, [width + gap for width, gap in zip(widths, [*gaps, 0], strict=True)], sides


def _add_panel(
    figure: Any, panel: Panel, number: int, across: tuple[float, float], down: tuple[float, float], title: str
) -> None:
    """Adds a panel's traces, axes, title and lines, and puts its colour bar beside it."""
    end = str(number + 1) if number else ""
    seen = {trace.name for trace in figure.data}
    for trace in panel.traces:
        group = trace.get("legendgroup", trace.get("name"))
        named = {"legendgroup": group, "showlegend": trace.get("showlegend", True)}
        named["showlegend"] = bool(named["showlegend"] and trace.get("name") and trace["name"] not in seen)
        if trace["type"] == "heatmap":
            named = {}
            if panel.bar and trace.get("showscale", True):
                height = panel.height / (down[1] - down[0])
                bar = {
                    "x": across[1],
                    "xanchor": "left",
                    "y": sum(down) / 2,
                    "thickness": 12,
                    "outlinewidth": 0,
                }
                bar |= {"len": max(down[1] - down[0], 100 / height), "tickfont": {"size": 11}}
                trace = {**trace, "showscale": True, "colorbar": bar | trace.get("colorbar", {})}
            else:
                trace = {**trace, "showscale": False}
        seen.add(trace.get("name"))
        figure.add_trace({**trace, **named, "xaxis": f"x{end}", "yaxis": f"y{end}"})
    figure.update_layout(
        {
            f"xaxis{end}": {"domain": across, "anchor": f"y{end}", **panel.x},
            f"yaxis{end}": {"domain": down, "anchor": f"x{end}", **panel.y},
        }
    )
    if title:
        place = {
            "xref": "paper",
            "x": across[0],
            "xanchor": "left",
            "yref": "paper",
            "y": down[1],
            "yanchor": "bottom",
        }
        figure.add_annotation(text=title, showarrow=False, align="left", font={"size": 13}, yshift=3, **place)
    for line in panel.lines:
        style = {"line": line.get("line", {"dash": "dash", "color": "#808080", "width": 1.5})}
        if "y" in line:
            where = {"type": "line", "xref": f"x{end} domain", "x0": 0, "x1": 1, "yref": f"y{end}"}
            where |= {"y0": line["y"], "y1": line["y"]}
        else:
            first, last = line.get("x0", line.get("x")), line.get("x1", line.get("x"))
            where = {"type": "line", "yref": f"y{end} domain", "y0": 0, "y1": 1, "xref": f"x{end}"}
            where |= {"x0": first, "x1": last}
            if "x0" in line:
                style = {"line": {"width": 0}, "fillcolor": "rgba(128,128,128,0.18)"}
                where |= {"type": "rect", "layer": "below"}
        figure.add_shape({**where, **style})


def _categories(values: Any) -> list[str]:
    """Returns the labels along an axis of names; none along one of numbers."""
    return (
        list(dict.fromkeys(values))
        if values is not None and len(values) and isinstance(values[0], str)
        else []
    )


def _below(panel: Panel, width: float) -> float:
    """Returns the pixels below a panel: more where plotly turns its labels for want of room."""
    labels = [label for trace in panel.traces for label in _categories(trace.get("x"))]
    labels = list(dict.fromkeys(labels))
    longest = max((len(part) for label in labels for part in label.split("<br>")), default=0)
    turned = longest * CHARACTER > width / max(1, len(labels))
    return BELOW + (0.7 * CHARACTER * min(longest, LONGEST_LABEL) if turned else 0.0)


def _shorten_labels(figure: Any) -> str:
    """Gives the labels of an axis that are too long short names, and returns what these mean."""
    said: dict[str, None] = {}
    for axes, letter in ((figure.select_xaxes(), "x"), (figure.select_yaxes(), "y")):
        for axis in axes:
            name = axis.plotly_name.replace("axis", "")
            traces = [trace for trace in figure.data if (getattr(trace, f"{letter}axis") or letter) == name]
            labels = list(dict.fromkeys(label for trace in traces for label in _categories(trace[letter])))
            longest = max((len(part) for label in labels for part in label.split("<br>")), default=0)
            if longest > LONGEST_LABEL and len(labels) <= 40:
                short = short_names(labels)
                axis.update(tickmode="array", tickvals=labels, ticktext=list(short.values()))
                said[means({label.replace("<br>", ", "): text for label, text in short.items()})] = None
    return " ".join(said)


def _tidy_legend(figure: Any) -> int:
    """Takes what all entries of the legend begin with out of them; returns the legend's height in pixels."""
    entries = [trace for trace in figure.data if trace.showlegend]
    names = [trace.name for trace in entries]
    if len(names) < 2:
        figure.update_layout(showlegend=False)
        return 0
    lines, common = 1, in_common(names) if max(map(len, names)) > LONGEST_LABEL else None
    if common is not None and common[0]:
        for trace in entries:
            trace.name = trace.name[len(common[0]) : len(trace.name) - len(common[1])]
        figure.update_layout(legend_title={"text": f"{common[0]}…{common[1]}", "side": "top"})
        lines, names = 2, [trace.name for trace in entries]
    # Plotly gives all entries of a legend in columns the width of the longest.
    each = max(map(len, names)) * CHARACTER + SYMBOL
    lines += math.ceil(len(names) / max(1, int((NARROW - BESIDE) / each))) - 1
    return LINE * lines + 16


def wrapped(text: str, width: float, size: float = 13) -> str:
    """Returns a text broken into lines of so many pixels."""
    room = max(9, int(width / CHARACTER * 13 / size))
    return "<br>".join(part for line in text.split("<br>") for part in wrap(line, room) or [""])


def titled(figure: Any, title: str, subtitle: str = "") -> Any:
    """Returns the figure with a title above its panels: the figure becomes higher, and its panels keep their size.

    A title that the figure has is replaced.
    """
    figure = untitled(figure)
    layout = figure.layout
    lines = wrap(subtitle, int(((layout.width or WIDTH) - 40) / 6.9))
    height = TITLE + LINE * len(lines)
    meta = dict(layout.meta) if isinstance(layout.meta, Mapping) else {}
    # A figure without a margin of its own has the template's.
    margin = layout.margin.t if layout.margin.t is not None else layout.template.layout.margin.t
    text = "<br>".join(escape(line, quote=False) for line in lines)
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"l": 16, "t": 28}}
    return figure.update_layout(
        title={
            "text": escape(title, quote=False),
            "subtitle": {"text": text, "font": {"size": 12}},
            "font": {"size": 16},
            **place,
        },
        height=(layout.height or HEIGHT) + height,
        margin={"t": (100 if margin is None else margin) + height},
        meta=meta | {TITLE_HEIGHT_KEY: height, SUBTITLE_KEY: subtitle},
    )


def untitled(figure: Any) -> Any:
    """Returns a copy of the figure without the title and the height that `titled` added."""
    copy = type(figure)(figure)
    meta = figure.layout.meta
    if not isinstance(meta, Mapping) or TITLE_HEIGHT_KEY not in meta:
        return copy
    height = meta[TITLE_HEIGHT_KEY]
    copy.layout.title = None
    copy.layout.meta = {
        key: each for key, each in meta.items() if key not in (TITLE_HEIGHT_KEY, SUBTITLE_KEY)
    } or None
    return copy.update_layout(height=copy.layout.height - height, margin={"t": copy.layout.margin.t - height})


def least_width(figure: Any) -> int:
    """Returns the pixels below which a figure cannot be read: a narrower page scrolls it sideways."""
    meta = figure.layout.meta
    return int(meta[LEAST_KEY]) if isinstance(meta, Mapping) and LEAST_KEY in meta else NARROWEST


def log_axis(smallest: float, largest: float) -> dict[str, Any]:
    """Returns a logarithmic axis with few ticks: powers of ten, or, below two decades, multiples of these."""
    powers = math.log10(largest / smallest)
    if not math.isfinite(powers):
        return {"type": "log"}
    if powers >= 2:
        return {"type": "log", **POWERS, "dtick": max(1, round(powers / 4))}
    digits = (1, 2, 5) if powers > 0.6 else range(1, 10)
    decades = range(math.floor(math.log10(smallest)), math.ceil(math.log10(largest)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    text = [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": text}
