"""The kinds of panels that all figures are made of: curves, points and bars with intervals, spectra, scatter, maps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from circuits.figures.panel_grid import COLOURS, LOG, SEQUENTIAL, Panel, colour_and_symbol

if TYPE_CHECKING:
    import pandas as pd

#: Curves of at most this many points have a symbol at each; maps of at most so many columns show their numbers.
MARKED, NUMBERED = 40, 12
#: Pixels of a row and of a column of a map.
ROW, CELL = 30, 40
DASHES = ("solid", "dash", "dot", "dashdot")


class Series(NamedTuple):
    """Numbers to draw under one name: y at x, between bounds where there are some.

    `hover` is text for each point, `style` more of plotly's settings of the trace, `look` the number of its colour and
    symbol (default: its place among the series).
    """

    x: Sequence[Any]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hover: Sequence[str] | None = None
    style: Mapping[str, Any] = {}
    look: int | None = None


def rows_to_one_series(rows: pd.DataFrame, x: str, y: str = "value", **more: Any) -> Series:
    """Returns a series of columns of a table, with the bounds `Y_ci_low` and `Y_ci_high` where the table has them."""
    low, high = f"{y}_ci_low", f"{y}_ci_high"
    known = low in rows and high in rows and rows[[low, high]].notna().any(axis=None)
    bounds = (rows[low].tolist(), rows[high].tolist()) if known else (None, None)
    return Series(rows[x].tolist(), rows[y].astype(float).tolist(), *bounds, **more)


def error_bars(values: Any, low: Any, high: Any) -> dict[str, Any]:
    """Returns plotly's settings of error bars from `low` to `high`."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [float(top - value) for value, top in zip(values, high, strict=True)],
        "arrayminus": [float(value - bottom) for value, bottom in zip(values, low, strict=True)],
        "thickness": 1.5,
    }


def curve(
    series: Mapping[str, Series],
    title: str = "",
    *,
    x: str = "step",
    y: str = "value",
    log_x: bool = False,
    log_y: bool = False,
    **panel: Any,
) -> Panel:
    """Returns a line per series, with a band of its bounds; of one point, with an interval."""
    traces: list[dict[str, Any]] = []
    for index, (name, one) in enumerate(series.items()):
        colour, symbol, dash = _colour_symbol_and_dash(one, index)
        # A band of one point has no width.
        each = len(one.x) == 1
        if one.low is not None and one.high is not None and not each:
            band: dict[str, Any] = {
                "x": [*one.x, *reversed([*one.x])],
                "y": [*one.high, *reversed([*one.low])],
            }
            red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
            band |= {"fill": "toself", "fillcolor": f"rgba({red},{green},{blue},0.2)", "line": {"width": 0}}
            band |= {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
            traces.append(band | {"name": f"{name}, band", "legendgroup": name})
        mode = "lines+markers" if len(one.x) <= MARKED else "lines"
        style = {"mode": mode, "line": {"color": colour, "dash": dash, "width": 1.8}}
        style |= {"marker": {"symbol": symbol, "size": 7, "color": colour}}
        traces.append(_series_trace(name, one, {"type": "scatter", **style}, x, each))
    axes = {letter: {"title": {"text": text}} for letter, text in (("x", x), ("y", y))}
    for letter, log in (("x", log_x), ("y", log_y)):
        if log:
            axes[letter] |= LOG
        axes[letter] |= panel.pop(f"{letter}_axis", {})
    return Panel(traces, title, axes["x"], axes["y"], **panel)


def points(
    series: Mapping[str, Series],
    title: str = "",
    *,
    x: str = "",
    y: str = "value",
    log_y: bool = False,
    categories: bool = True,
    **panel: Any,
) -> Panel:
    """Returns a mark per point, with intervals; at a category those of all series side by side, for which
    `draw_panels` needs `scattermode="group"`.
    """
    traces: list[dict[str, Any]] = []
    for index, (name, one) in enumerate(series.items()):
        colour, symbol, _ = _colour_symbol_and_dash(one, index)
        style: dict[str, Any] = {"type": "scatter", "mode": "markers"}
        style |= {"marker": {"symbol": symbol, "size": 8, "color": colour}}
        style |= {"offsetgroup": name, "cliponaxis": False} if categories else {}
        traces.append(_series_trace(name, one, style, x, True))
    across = {"title": {"text": x}} | ({"type": "category"} if categories else {})
    return Panel(traces, title, across, {"title": {"text": y}} | (LOG if log_y else {}), **panel)


def bars(
    series: Mapping[str, Series], title: str = "", *, x: str = "", y: str = "value", **panel: Any
) -> Panel:
    """Returns a bar per category and series, with intervals."""
    traces = [
        _series_trace(
            name,
            one,
            {"type": "bar", "marker": {"color": _colour_symbol_and_dash(one, index)[0]}, "offsetgroup": name},
            x,
            True,
        )
        for index, (name, one) in enumerate(series.items())
    ]
    across = {"title": {"text": x}, "showgrid": False} | dict(panel.pop("x_axis", {}))
    return Panel(traces, title, across, {"title": {"text": y}, "rangemode": "tozero"}, **panel)


def spectrum(
    labels: Sequence[Any],
    shares: Sequence[float],
    keys: Collection[Any] = (),
    title: str = "",
    *,
    x: str = "frequency",
    y: str = "share of variance (%)",
    noise: Sequence[float] | None = None,
    **panel: Any,
) -> Panel:
    """Returns a bar per frequency, key ones in another colour, and a dash at what it would be of noise."""
    whole = all(isinstance(label, int) for label in labels)
    named = list(labels) if whole else list(map(str, labels))
    series: dict[str, Series] = {}
    for key in (False, True) if keys else (False,):
        chosen = [index for index, label in enumerate(labels) if (label in keys) == key]
        values = [named[index] for index in chosen], [float(shares[index]) for index in chosen]
        series["key frequency" if key else "other"] = Series(*values)
    category = {"type": "category", "categoryorder": "array", "categoryarray": named, "nticks": 10}
    drawn = bars(series, title, x=x, y=y, x_axis={} if whole else category, **panel)
    # Each frequency has one bar, key or not.
    traces = [trace | {"offsetgroup": "all"} for trace in drawn.traces]
    if noise is not None:
        dash = {"symbol": "line-ew-open", "size": 9, "line": {"width": 2}, "color": COLOURS[2]}
        expected = {"type": "scatter", "mode": "markers", "x": named, "y": list(noise), "marker": dash}
        traces.append(expected | {"name": "white noise"})
    return replace(drawn, traces=traces)


def heatmap(
    values: Any,
    title: str = "",
    *,
    unit: str = "value",
    signed: bool = False,
    across: str = "head",
    down: str = "layer",
    text: Any = None,
    start: float | None = None,
    end: float | None = None,
    bar: bool = True,
    numbers: bool | None = None,
    row: int = ROW,
    width: int | None = None,
) -> Panel:
    """Returns a heatmap of a table, its first row on top; an array is numbered from 0.

    Args:
        unit: what the colours mean.
        signed: colours have their middle at 0; else they begin there.
        text: in the cells (default: the values, of at most `NUMBERED` columns; `numbers` says otherwise).
        start, end: the values at the ends of the colours (default: the largest; 0 or minus the largest).
    """
    import numpy as np
    import pandas as pd

    table = values if isinstance(values, pd.DataFrame) else pd.DataFrame(np.asarray(values))
    grid = table.to_numpy(dtype=float)
    largest = end if end is not None else float(np.abs(grid[np.isfinite(grid)]).max(initial=0.0))
    few = len(table.columns) <= NUMBERED
    if text is None and (few if numbers is None else numbers):
        # Two significant digits and no needless zero of an exponent.
        shown = [[f"{x:.2g}".replace("e-0", "e-") for x in line] for line in grid.tolist()]
        text = [[x.replace("nan", "") for x in line] for line in shown]
    # A word on the bar's title a line, where it is long; few numbers beside it, without prefixes such as µ.
    bar_title = {"text": unit if len(unit) <= 10 else unit.replace(" ", "<br>"), "font": {"size": 12}}
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": table.to_numpy() if table.to_numpy().dtype.kind in "biuf" else grid,
        "zmin": start if start is not None else -(largest or 1.0) if signed else 0,
        "zmax": largest or 1.0,
        "colorbar": {"title": bar_title, "exponentformat": "e", "nticks": 5},
        "xgap": int(few),
        "ygap": int(few),
        "hovertemplate": f"{down} %{{y}}, {across} %{{x}}<br>{unit} %{{z:.4g}}<extra>{title}</extra>",
    }
    trace |= {"autocolorscale": True} if signed else {"colorscale": SEQUENTIAL}  # of the template, or ours
    if text is not None:
        rows = [[str(cell) for cell in line] for line in np.asarray(text).tolist()]
        trace |= {"text": rows, "texttemplate": "%{text}"}
    axes: dict[str, dict[str, Any]] = {}
    for letter, labels, name in (("x", table.columns, across), ("y", table.index, down)):
        named = len(labels) <= 60
        trace[letter] = [str(label) for label in labels] if named else list(range(len(labels)))
        axes[letter] = {"title": {"text": name}, "showgrid": False, "zeroline": False}
        axes[letter] |= {"type": "category"} if named else {}
    height = max(row * min(60, len(table)), 70)
    narrow = width if width is not None else min(max(120, CELL * len(table.columns)), 480)
    return Panel([trace], title, axes["x"], axes["y"] | {"autorange": "reversed"}, height, narrow, bar)


def _colour_symbol_and_dash(one: Series, index: int) -> tuple[str, str, str]:
    """Returns the colour, symbol and dash of a series; no two of 28 share all."""
    place = index if one.look is None else one.look
    return *colour_and_symbol(place), DASHES[place // len(COLOURS) % len(DASHES)]


def _series_trace(name: str, one: Series, style: dict[str, Any], x_name: str, error: bool) -> dict[str, Any]:
    """Returns a plotly trace of a series, with its intervals as error bars if asked for."""
    hover = (
        "%{customdata}" if one.hover is not None else f"{f'{x_name} ' if x_name else ''}%{{x}}<br>%{{y:.4g}}"
    )
    trace = {"name": name, "x": list(one.x), "y": list(one.y), **style}
    trace |= {"hovertemplate": f"{hover}<extra>{name}</extra>"}
    trace |= {} if one.hover is None else {"customdata": list(one.hover)}
    if error and one.low is not None and one.high is not None:
        trace["error_y"] = error_bars(one.y, one.low, one.high)
    for key, value in one.style.items():
        trace[key] = {**trace[key], **value} if isinstance(value, Mapping) and key in trace else value
    return trace
