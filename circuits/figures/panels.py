"""The kinds of panels that all figures are made of: curves, points and bars with intervals, spectra, scatter, maps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from circuits.figures.layout import COLOURS, SEQUENTIAL, Panel, log_axis, mark

if TYPE_CHECKING:
    import pandas as pd

#: Curves of at most this many points have a symbol at each; maps of at most so many columns show their numbers.
MARKED, NUMBERED = 40, 12
#: Pixels of a row and of a column of a map.
ROW, CELL = 30, 40
#: Few numbers beside a colour bar, without prefixes such as µ.
BAR_TICKS = {"exponentformat": "e", "nticks": 5}
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


def of_rows(rows: pd.DataFrame, x: str, y: str = "value", **more: Any) -> Series:
    """Returns a series of columns of a table, with the bounds `Y_ci_low` and `Y_ci_high` where the table has them."""
    low, high = f"{y}_ci_low", f"{y}_ci_high"
    known = low in rows and high in rows and rows[[low, high]].notna().any(axis=None)
    bounds = (rows[low].tolist(), rows[high].tolist()) if known else (None, None)
    return Series(rows[x].tolist(), rows[y].astype(float).tolist(), *bounds, **more)


def interval(values: Any, low: Any, high: Any) -> dict[str, Any]:
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
    bars: bool = False,
    **panel: Any,
) -> Panel:
    """Returns a line per series, with a band of its bounds; with `bars`, or of one point, with an interval at each."""
    traces: list[dict[str, Any]] = []
    for index, (name, one) in enumerate(series.items()):
        colour, symbol, dash = _look(one, index)
        # A band of one point has no width.
        each = bars or len(one.x) == 1
        if one.low is not None and one.high is not None and not each:
            red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
            traces.append(
                {
                    "type": "scatter",
                    "x": [*one.x, *reversed([*one.x])],
                    "y": [*one.high, *reversed([*one.low])],
                    "fill": "toself",
                    "fillcolor": f"rgba({red},{green},{blue},0.2)",
                    "line": {"width": 0},
                    "mode": "lines",
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "name": f"{name}, band",
                    "legendgroup": name,
                }
            )
        line = {
            "mode": "lines+markers" if len(one.x) <= MARKED else "lines",
            "line": {"color": colour, "dash": dash, "width": 1.8},
            "marker": {"symbol": symbol, "size": 7, "color": colour},
        }
        traces.append(_trace(name, one, {"type": "scatter", **line}, x, each))
    axes = {"x": {"title": {"text": x}}, "y": {"title": {"text": y}}}
    for letter, log in (("x", log_x), ("y", log_y)):
        if log:
            axes[letter] |= log_axis(*_positive(series, letter))
    return Panel(
        traces,
        title,
        axes["x"] | dict(panel.pop("x_axis", {})),
        axes["y"] | dict(panel.pop("y_axis", {})),
        **panel,
    )


def _positive(series: Mapping[str, Series], letter: str) -> tuple[float, float]:
    """Returns the smallest and the largest number above 0 along an axis."""
    every = [
        each for one in series.values() for each in ([one.x] if letter == "x" else [one.y, one.low, one.high])
    ]
    import numpy as np

    values = np.concatenate([np.asarray(each, dtype=float) for each in every if each is not None])
    values = values[np.isfinite(values) & (values > 0)]
    return (float(values.min()), float(values.max())) if len(values) else (1.0, 1.0)


def points(
    series: Mapping[str, Series],
    title: str = "",
    *,
    x: str = "",
    y: str = "value",
    log_y: bool = False,
    **panel: Any,
) -> Panel:
    """Returns a mark per category and series, side by side, with intervals; `draw` needs `scattermode="group"`."""
    traces = []
    for index, (name, one) in enumerate(series.items()):
        colour, symbol, _ = _look(one, index)
        style = {
            "mode": "markers",
            "marker": {"symbol": symbol, "size": 9, "color": colour},
            "offsetgroup": name,
        }
        traces.append(_trace(name, one, {"type": "scatter", "cliponaxis": False, **style}, x, True))
    down = {"title": {"text": y}} | (log_axis(*_positive(series, "y")) if log_y else {})
    return Panel(traces, title, {"type": "category", "title": {"text": x}}, down, **panel)


def bars(
    series: Mapping[str, Series], title: str = "", *, x: str = "", y: str = "value", **panel: Any
) -> Panel:
    """Returns a bar per category and series, with intervals."""
    traces = []
    for index, (name, one) in enumerate(series.items()):
        style = {"marker": {"color": _look(one, index)[0]}, "offsetgroup": name}
        traces.append(_trace(name, one, {"type": "bar", **style}, x, True))
    across = {"title": {"text": x}, "showgrid": False} | dict(panel.pop("x_axis", {}))
    down = {"title": {"text": y}, "rangemode": "tozero"} | dict(panel.pop("y_axis", {}))
    return Panel(traces, title, across, down, **panel)


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
    axis = (
        {} if whole else {"type": "category", "categoryorder": "array", "categoryarray": named, "nticks": 10}
    )
    drawn = bars(series, title, x=x, y=y, x_axis=axis, **panel)
    traces = [{key: each for key, each in trace.items() if key != "offsetgroup"} for trace in drawn.traces]
    if noise is not None:
        dash = {"symbol": "line-ew-open", "size": 9, "line": {"width": 2}, "color": COLOURS["light"][2]}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": named,
                "y": list(noise),
                "name": "white noise",
                "marker": dash,
            }
        )
    return Panel(traces, title, drawn.x, drawn.y, drawn.height, drawn.width, lines=drawn.lines)


def scatter(
    series: Mapping[str, Series],
    title: str = "",
    *,
    x: str = "",
    y: str = "",
    square: bool = False,
    **panel: Any,
) -> Panel:
    """Returns a mark per point; with `square` both axes have one scale."""
    traces = []
    for index, (name, one) in enumerate(series.items()):
        colour, symbol, _ = _look(one, index)
        style = {"mode": "markers", "marker": {"symbol": symbol, "size": 8, "color": colour}}
        traces.append(_trace(name, one, {"type": "scatter", **style}, x, True))
    same = {"scaleanchor": "x", "constrain": "domain"} if square else {}
    return Panel(traces, title, {"title": {"text": x}}, {"title": {"text": y}, **same}, **panel)


def heat(
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
    sizes = np.abs(grid[np.isfinite(grid)])
    largest = end if end is not None else (float(sizes.max()) if sizes.size else 0.0)
    named, gap = len(table.columns) <= 60, int(len(table.columns) <= NUMBERED)
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": [str(label) for label in table.columns] if named else list(range(len(table.columns))),
        "y": [str(label) for label in table.index] if len(table) <= 60 else list(range(len(table))),
        "z": table.to_numpy() if table.to_numpy().dtype.kind in "biuf" else grid,
        "zmin": start if start is not None else -(largest or 1.0) if signed else 0,
        "zmax": largest or 1.0,
        "colorbar": {"title": {"text": wrapped_unit(unit), "font": {"size": 12}}, **BAR_TICKS},
        "xgap": gap,
        "ygap": gap,
        "hovertemplate": f"{down} %{{y}}, {across} %{{x}}<br>{unit} %{{z:.4g}}<extra>{title}</extra>",
    }
    trace |= {"autocolorscale": True} if signed else {"colorscale": SEQUENTIAL}  # of the template, or ours
    if text is None and (len(table.columns) <= NUMBERED if numbers is None else numbers):
        text = [["" if cell != cell else short_number(cell) for cell in line] for line in grid.tolist()]
    if text is not None:
        rows = [[str(cell) for cell in line] for line in np.asarray(text).tolist()]
        trace |= {"text": rows, "texttemplate": "%{text}"}
    plain, category = {"showgrid": False, "zeroline": False}, {"type": "category"}
    return Panel(
        [trace],
        title,
        {"title": {"text": across}, **plain} | (category if named else {}),
        {"title": {"text": down}, "autorange": "reversed", **plain} | (category if len(table) <= 60 else {}),
        max(row * min(60, len(table)), 70),
        width if width is not None else min(max(120, CELL * len(table.columns)), 480),
        bar,
    )


def wrapped_unit(unit: str) -> str:
    """Returns the title of a colour bar, a word a line where it is long."""
    return unit if len(unit) <= 10 else unit.replace(" ", "<br>")


def short_number(value: float) -> str:
    """Returns a number with two significant digits and no needless zero of an exponent."""
    return f"{value:.2g}".replace("e-0", "e-")


def _look(one: Series, index: int) -> tuple[str, str, str]:
    """Returns the colour, symbol and dash of a series; no two of 28 share all."""
    place = index if one.look is None else one.look
    return *mark(place), DASHES[place // len(COLOURS["light"]) % len(DASHES)]


def _trace(name: str, one: Series, style: dict[str, Any], across: str, error: bool) -> dict[str, Any]:
    """Returns a plotly trace of a series, with its intervals as error bars if asked for."""
    trace = {"name": name, "x": list(one.x), "y": list(one.y), **style}
    trace["hovertemplate"] = (
        f"{across or '%{x}'}{' %{x}' if across else ''}<br>%{{y:.4g}}<extra>{name}</extra>"
    )
    if error and one.low is not None and one.high is not None:
        trace["error_y"] = interval(one.y, one.low, one.high)
    if one.hover is not None:
        trace |= {"customdata": list(one.hover), "hovertemplate": f"%{{customdata}}<extra>{name}</extra>"}
    for key, value in one.style.items():
        trace[key] = {**trace[key], **value} if isinstance(value, Mapping) and key in trace else value
    return trace
