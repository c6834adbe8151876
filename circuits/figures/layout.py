"""Lays out every figure by the same rules, so that it can be read on a page of 600 pixels as well.

Labels on an axis that have no room are short, and what they stand for is told; entries of a legend lose what they all
begin with, which becomes its title; a long legend stands below the panels; titles of panels are broken into lines, and
the panels make room for these; an open mark is larger than the filled one that may lie on it; texts in cells are shown
where they have room; no panel becomes narrower than its title can be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from circuits.figures.names import LONGEST_SHORT, in_common, means, short_names

#: Pixels: what figures are laid out for, a page of 600 without its margins; a character and a line of their texts, and
#: what a legend has beside a name.
NARROW, CHARACTER, LINE, SYMBOL = 560, 7.2, 17, 48
#: Pixels: the narrowest figure, the narrowest cell of a map, what a map of many cells is content with; a colour bar
#: with its numbers, and the labels of an axis.
NARROWEST, CELL, MAP, BAR, LABELS = 320, 6, 760, 100, 42
#: Pixels: the narrowest panel; a character in a cell, where plotly chooses its size, that of a trace of its own, whose
#: size is the figure's, and else a share of the size.
PANEL, IN_CELL, WRITTEN, SHARE = 56, 7, 8.3, 0.58
#: Characters of a label left of a panel, and the fewest of a line over one.
LONGEST_BESIDE, FEWEST = 28, 9
#: Lines of a legend above which it stands below the panels; categories above which plotly leaves labels out itself.
LEGEND_LINES, MOST_LABELS = 2, 26
#: Pixels of an open mark; filled ones have at most 10.
OPEN_SIZE = 15
#: The key in a figure's meta under which the meaning of short labels is kept.
NAMES_KEY = "short labels"
#: The key in a trace's meta: the width in pixels from which the texts in its cells do not run into each other.
ROOM_KEY = "roomFrom"


def laid_out(figure: Any) -> str:
    """Changes the figure by the rules of this module, and returns what its short labels mean ("" without any).

    A second call changes nothing.
    """
    meta = dict(figure.layout.meta) if isinstance(figure.layout.meta, Mapping) else {}
    if NAMES_KEY in meta:
        return str(meta[NAMES_KEY])
    means = " ".join(dict.fromkeys([*_shorten_ticks(figure), *_shorten_legend(figure)]))
    _thin_ticks(figure)
    _enlarge_open_marks(figure)
    _note_room_in_cells(figure)
    _wrap_axis_titles(figure)
    _wrap_titles(figure)
    _place_legend(figure)
    figure.update_layout(meta=meta | {NAMES_KEY: means})
    return means


def least_width(figure: Any, widest: float | None = None) -> int:
    """Returns the pixels below which a figure cannot be read: a narrower page scrolls it sideways.

    Panels side by side, and maps of many columns, are as wide as what they are laid out for, or as the texts in their
    cells need; lines and points take what there is.

    Args:
        widest: the most that it takes of a page.
    """
    spans = {tuple(axis.domain) for axis in figure.select_xaxes() if axis.domain}
    if len(spans) > 1:
        least = min(NARROW, int(widest or NARROW))
        texts = [
            trace.meta[ROOM_KEY]
            for trace in figure.data
            if isinstance(trace.meta, Mapping) and ROOM_KEY in trace.meta
        ]
        between = (_room_for_panels(figure), _room_for_bars(figure), _room_for_labels(figure))
        return max(least, *between, *(room for room in texts if room <= MAP))
    columns = max((_columns(trace) for trace in figure.data), default=0)
    cells = math.ceil(_beside(figure) + CELL * columns) if columns else 0
    return max(NARROWEST, int(min(cells, MAP, widest or MAP)))


def _columns(trace: Any) -> int:
    """Returns the columns of a map, whose values a page may give it later."""
    if trace.type != "heatmap":
        return 0
    return len(trace.x) if trace.x is not None else np.shape(trace.z)[-1] if np.ndim(trace.z) == 2 else 0


def _designed_width(figure: Any) -> int:
    """Returns the pixels for which texts are broken: of many panels more, or they would be too narrow."""
    return max(NARROW, _room_for_panels(figure))


def _room_for_panels(figure: Any) -> int:
    spans = [axis.domain[1] - axis.domain[0] for axis in figure.select_xaxes() if axis.domain]
    return math.ceil(PANEL / min(spans, default=1.0) + _beside(figure))


def _room_for_bars(figure: Any) -> int:
    """Returns the pixels that colour bars between panels need, or they would lie on the next panel's labels."""
    starts = [axis.domain[0] for axis in figure.select_xaxes() if axis.domain]
    bars = [trace.colorbar.x for trace in figure.data if "colorbar" in trace and trace.showscale is not False]
    gaps = [start - x for x in bars if x is not None for start in starts if start > x]
    return math.ceil(BAR / min(gaps) + _beside(figure)) if gaps else 0


def _room_for_labels(figure: Any) -> int:
    """Returns the pixels, at most `MAP`, that labels between panels need, or they would lie on the panel before."""
    domains = [axis.domain for axis in figure.select_xaxes() if axis.domain]
    gaps = []
    for axis in figure.select_xaxes():
        beside = figure.layout[f"yaxis{(axis.anchor or 'y')[1:]}"] if axis.anchor != "free" else None
        before = [end for _, end in domains if axis.domain and end <= axis.domain[0]]
        if before and beside is not None and beside.showticklabels is not False:
            gaps.append(axis.domain[0] - max(before))
    return min(MAP, math.ceil(LABELS / min(gaps) + _beside(figure))) if gaps and min(gaps) > 0 else 0


def _beside(figure: Any) -> float:
    """Returns the pixels left and right of the panels: margins, of which long labels take more."""
    margin = figure.layout.margin
    left, right = (60 if side is None else side for side in (margin.l, margin.r))
    labels = [
        _length(label) for name, each in _categories(figure).items() if name[0] == "y" for label in each
    ]
    beside = [length for length in labels if length <= LONGEST_BESIDE and len(labels) <= 4 * MOST_LABELS]
    return float(max([left, *(30 + CHARACTER * length for length in beside)]) + right)


def _plot_width(figure: Any) -> float:
    return _designed_width(figure) - _beside(figure)


def _length(text: str) -> int:
    """Returns the characters of the longest line of a label."""
    return max(map(len, re.sub(r"<(?!br)[^>]*>", "", text).split("<br>")))


def _shorten_ticks(figure: Any) -> Iterator[str]:
    """Gives the labels of categories for which there is no room a short name, and yields what these mean."""
    for name, labels in _categories(figure).items():
        axis = figure.layout[name]
        across = name.startswith("x")
        span = (axis.domain[1] - axis.domain[0]) if axis.domain else 1.0
        room = _plot_width(figure) * span / len(labels) / CHARACTER if across else LONGEST_BESIDE
        longest = max(map(_length, labels))
        if axis.ticktext or longest <= max(room, LONGEST_SHORT) or len(labels) > MOST_LABELS:
            continue
        short = _short(labels, math.floor(max(room, LONGEST_SHORT)), _lines_turned(room) if across else 3)
        figure.layout[name].update(tickmode="array", tickvals=labels, ticktext=list(short.values()))
        yield _meaning(short)


def _categories(figure: Any) -> dict[str, list[str]]:
    """Returns the labels of each axis of categories."""
    by_axis: dict[str, dict[str, None]] = {}
    for trace in figure.data:
        for letter in "xy":
            values = getattr(trace, letter, None)
            if values is None or not len(values) or not isinstance(values[0], str):
                continue
            axis = f"{letter}axis{(getattr(trace, f'{letter}axis', None) or letter)[1:]}"
            by_axis.setdefault(axis, {}).update(dict.fromkeys(values))
    return {name: list(labels) for name, labels in by_axis.items()}


def _thin_ticks(figure: Any) -> None:
    """Takes ticks away where their numbers would run into each other."""
    for axis in figure.select_xaxes():
        if not isinstance(axis.dtick, (int, float)) or axis.type in ("category", "log"):
            continue
        name = axis.plotly_name.replace("axis", "")
        values = [
            float(x)
            for trace in figure.data
            if (getattr(trace, "xaxis", None) or "x") == name and getattr(trace, "x", None) is not None
            for x in (min(trace.x, default=0), max(trace.x, default=0))
            if not isinstance(x, str)
        ]
        span = axis.domain[1] - axis.domain[0] if axis.domain else 1.0
        room = _plot_width(figure) * span
        if values and (max(values) - min(values)) / axis.dtick * 4 * CHARACTER > room:
            axis.update(dtick=None, tick0=None, tickmode="auto", nticks=max(2, int(room / (5 * CHARACTER))))
    for trace in figure.select_traces({"type": "heatmap"}):
        if trace.x is not None and len(trace.x) > MOST_LABELS and isinstance(trace.x[0], str):
            axis = figure.layout[f"xaxis{(trace.xaxis or 'x')[1:]}"]
            room = _plot_width(figure) * (axis.domain[1] - axis.domain[0] if axis.domain else 1.0)
            axis.nticks = axis.nticks or max(2, int(room / (2 + max(map(len, trace.x))) / CHARACTER))


def _lines_turned(room: float) -> int:
    """Returns the lines that a label may have beside the next one, where plotly turns them for want of room."""
    return max(1, min(3, int(room * CHARACTER / LINE)))


def _short(labels: Sequence[str], room: int, lines: int) -> dict[str, str]:
    """Returns label -> short label: broken into lines where that is enough, else what tells it apart, or a letter."""
    broken = {label: "<br>".join(wrap(label.replace("<br>", " "), max(room, 1))) for label in labels}
    if all(_length(text) <= room and text.count("<br>") < lines for text in broken.values()):
        return broken
    whole = {label: label.replace("<br>", " ") for label in labels}
    if lines == 1 and max(map(len, whole.values())) <= LONGEST_BESIDE:
        return whole
    return short_names(labels)


def _without_breaks(short: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(label.replace("<br>", " "), text.replace("<br>", " ")) for label, text in short.items()]


def _meaning(short: Mapping[str, str]) -> str:
    if all(label.split() == text.split() for label, text in _without_breaks(short)):
        return ""
    return means({label.replace("<br>", ", "): text for label, text in short.items()})


def _shorten_legend(figure: Any) -> Iterator[str]:
    """Takes what all entries of a legend begin with out of them: it becomes the legend's title."""
    names = list(dict.fromkeys(trace.name for trace in _entries(figure)))
    if len(names) < 2 or max(map(len, names)) <= LONGEST_SHORT or figure.layout.legend.title.text:
        return
    common = in_common(names)
    if common is None or not common[0]:
        return
    begin, end = common
    for trace in figure.data:
        if trace.name in names:
            trace.name = trace.name[len(begin) : len(trace.name) - len(end)]
    figure.update_layout(legend_title_text=f"{begin}…{end} ")
    yield ""


def _entries(figure: Any) -> list[Any]:
    """Returns the entries of the figure's legend; a legend of one panel stands where its figure has put it."""
    if figure.layout.showlegend is False:
        return []
    drawn = [trace for trace in figure.data if getattr(trace, "legend", None) in (None, "legend")]
    named = [trace for trace in drawn if trace.name and trace.type not in ("heatmap",)]
    if len(named) < 2 and not any(trace.showlegend for trace in named):
        return []
    return [trace for trace in named if trace.showlegend is not False]


def _enlarge_open_marks(figure: Any) -> None:
    """Makes open marks larger than filled ones: where both have one value, the open one is seen around the other."""
    for trace in figure.select_traces({"type": "scatter"}):
        symbol = trace.marker.symbol
        if isinstance(symbol, str) and symbol.endswith("-open") and not symbol.startswith(("line", "x-thin")):
            trace.update(marker={"size": OPEN_SIZE, "line": {"width": 2}})


def _note_room_in_cells(figure: Any) -> None:
    """Notes in a trace's meta from which width of the figure its texts in cells have room: a page then hides them."""
    for trace in figure.data:
        meta = dict(trace.meta) if isinstance(trace.meta, Mapping) else {}
        texts = _in_cells(trace)
        if not texts or ROOM_KEY in meta:
            continue
        axis = figure.layout[f"xaxis{(trace.xaxis or 'x')[1:]}"]
        span = axis.domain[1] - axis.domain[0] if axis.domain else 1.0
        size = trace.textfont.size
        character = SHARE * size if size else WRITTEN if trace.type == "scatter" else IN_CELL
        each = max(map(_length, texts)) * character + 4
        columns = len(trace.z[0]) if trace.type == "heatmap" else len(set(trace.x))
        trace.meta = meta | {ROOM_KEY: math.ceil(_beside(figure) + columns * each / span)}


def _in_cells(trace: Any) -> list[str]:
    """Returns the texts of a heatmap's cells, or those that a trace of its own writes on them."""
    if trace.type == "scatter" and trace.mode == "text" and trace.x is not None and trace.text is not None:
        return [str(text) for text in trace.text] if isinstance(next(iter(trace.x), None), str) else []
    if trace.type != "heatmap" or not trace.texttemplate or trace.z is None or np.ndim(trace.z) != 2:
        return []
    style = re.fullmatch(r"%\{z:(\.\d[efg])\}", trace.texttemplate)
    values = trace.z if trace.text is None or style else trace.text
    cells = [cell for row in values for cell in row if cell is not None]
    return [format(cell, style[1]) if style else str(cell) for cell in cells]


def _place_legend(figure: Any) -> None:
    """Puts a legend of many lines below the panels: above them it would reach into titles and toolbars."""
    layout = figure.layout
    names = [trace.name for trace in _entries(figure)]
    title = layout.legend.title.text or ""
    lines = 0
    left = 0.0
    for width in [len(title) * CHARACTER, *(len(name) * CHARACTER + SYMBOL for name in names)]:
        if lines == 0 or left + width > _plot_width(figure):
            lines, left = lines + 1, 0.0
        left += width
    below = layout.legend.y is not None and layout.legend.y < 0.5
    if lines <= LEGEND_LINES or below or layout.legend.orientation == "v" or layout.height is None:
        return
    bottom = layout.margin.b if layout.margin.b is not None else 50
    lines += 1 if title else 0
    figure.update_layout(
        # Left of the entries a title takes their width, and plotly lets the last ones of a line run out of the page.
        legend={"yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "orientation": "h"}
        | ({"title": {"side": "top"}} if title else {}),
        height=layout.height + lines * LINE,
        margin={"b": bottom + lines * LINE},
    )


def _wrap_titles(figure: Any) -> None:
    """Breaks titles of panels into lines that are no wider than their panels, and moves the panels apart for these."""
    layout = figure.layout
    columns = sorted({tuple(axis.domain) for axis in figure.select_xaxes() if axis.domain})
    extra: dict[float, int] = {}
    for note in layout.annotations:
        if note.xref != "paper" or note.yref != "paper" or note.showarrow is not False or not note.text:
            continue
        if note.yanchor != "bottom":
            continue
        size = (note.font.size or 13) / 13
        room = max(int(_plot_width(figure) * _room_over(float(note.x), columns) / CHARACTER / size), FEWEST)
        lines = note.text.split("<br>")
        broken = [part for line in lines for part in ([line] if len(line) <= room else _wrapped(line, room))]
        note.text = "<br>".join(broken)
        more = LINE * (len(broken) - len(lines))
        extra[round(note.y, 6)] = max(extra.get(round(note.y, 6), 0), more)
    if any(extra.values()) and layout.height is not None:
        _make_room(figure, extra)


def _room_over(x: float, columns: Sequence[tuple[float, float]]) -> float:
    """Returns the width of the panel at x with the gap to the next one, or to the one before the last."""
    for start, end in columns:
        if start - 1e-9 <= x <= end + 1e-9:
            after = [other for other, _ in columns if other >= end]
            before = [other for _, other in columns if other <= start]
            gap = min(after) - end if after else start - max(before) if before else 0.0
            return end - start + gap
    return 1.0


def _wrap_axis_titles(figure: Any) -> None:
    """Breaks titles of axes below panels into lines that are no wider than these."""
    columns = sorted({tuple(axis.domain) for axis in figure.select_xaxes() if axis.domain})
    for axis in figure.select_xaxes():
        if axis.domain and axis.title.text and len(columns) > 1:
            room = int(_plot_width(figure) * _room_over(float(axis.domain[0]), columns) / CHARACTER)
            if _length(axis.title.text) > max(room, FEWEST):
                axis.title.text = "<br>".join(_wrapped(axis.title.text, max(room, FEWEST)))


def _wrapped(line: str, room: int) -> list[str]:
    """Breaks a line at its blanks; a name, which has none, only where it is longer than a line, and then alone."""
    lines: list[str] = []
    for word in line.split():
        first, *rest = _pieces(word, room)
        if lines and not rest and len(lines[-1]) + 1 + len(first) <= room:
            lines[-1] += f" {first}"
        else:
            lines += [first, *rest]
    return lines


def _pieces(name: str, room: int) -> list[str]:
    """Breaks a name before a step and behind its marks: into as few pieces as have room, the shortest a long one."""
    parts = [
        part[start : start + room]
        for part in re.split(r"(?=@)|(?<=[_/:-])(?=\w)|(?<=\.)(?=[^\W\d])", name)
        for start in range(0, len(part), room)
    ]
    best: list[tuple[int, int, list[str]]] = [(0, -room, [])]
    for end in range(1, len(parts) + 1):
        ways = []
        for (pieces, shortest, before), start in zip(best, range(end), strict=True):
            piece = "".join(parts[start:end])
            if len(piece) <= room:
                ways.append((pieces + 1, max(shortest, -len(piece)), [*before, piece]))
        best.append(min(ways, key=lambda way: way[:2]))
    return best[-1][2]


def _make_room(figure: Any, extra: Mapping[float, int]) -> None:
    """Moves what stands at or above each height of `extra`, as a share of the plot, up by so many pixels."""
    layout = figure.layout
    top = layout.margin.t if layout.margin.t is not None else 60
    bottom = layout.margin.b if layout.margin.b is not None else 50
    old = layout.height - top - bottom
    highest = max(max(axis.domain) for axis in figure.select_yaxes() if axis.domain)
    within = {y: more for y, more in extra.items() if y < highest - 1e-6}
    above = max((more for y, more in extra.items() if y >= highest - 1e-6), default=0)
    new = old + sum(within.values())

    def moved(y: float) -> float:
        return (y * old + sum(more for at, more in within.items() if at < y - 1e-6)) / new

    for axis in figure.select_yaxes():
        if axis.domain:
            axis.domain = [moved(end) for end in axis.domain]
    for item in (*layout.annotations, *layout.shapes):
        if item.yref == "paper":
            for key in ("y", "y0", "y1"):
                if key in item and item[key] is not None:
                    item[key] = moved(item[key])
    bars = [trace.colorbar for trace in figure.data if "colorbar" in trace]
    for bar in (*bars, *(axis.colorbar for axis in figure.select_coloraxes())):
        if bar.len is not None and bar.y is not None and bar.orientation != "h":
            low, high = moved(bar.y - bar.len / 2), moved(bar.y + bar.len / 2)
            bar.y, bar.len = (low + high) / 2, high - low
    if layout.legend.y is not None and layout.legend.y > 1:
        layout.legend.y = 1 + ((layout.legend.y - 1) * old + above) / new
    figure.update_layout(height=layout.height + new - old + above, margin={"t": top + above})
