"""The figure of a probe's table: values over layers, with their controls."""

from __future__ import annotations

from typing import Any

import pandas as pd

from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished, interval

# Heights in pixels: of a panel, and between panels with their titles.
PANEL, GAP, TOP, BOTTOM = 200, 90, 110, 70
_DASHES = {"shuffled": "dot", "untrained": "dash"}
# Where a line would have one point only.
_OPEN = {"shuffled": "x-thin-open", "untrained": "circle-open"}


def figure(frame: pd.DataFrame, by: str | None = None) -> Any:
    """A row of panels per target, one panel per metric of it.

    A line per site, head, position and split, as far as they differ, and per value of the column `by`.
    """
    from plotly.subplots import make_subplots

    panels = {
        str(target): list(dict.fromkeys(part["metric"]))
        for target, part in frame.groupby("target", sort=False)
    }
    wide = max(map(len, panels.values()))
    height = PANEL * len(panels) + GAP * (len(panels) - 1)
    found = make_subplots(
        rows=len(panels),
        cols=wide,
        subplot_titles=[
            f"{target}: {metrics[place]}" if place < len(metrics) else ""
            for target, metrics in panels.items()
            for place in range(wide)
        ],
        vertical_spacing=GAP / height if len(panels) > 1 else 0,
        horizontal_spacing=0.06,
    )
    shown: set[str] = set()
    colours, single = COLOURS["light"], frame["layer"].nunique(dropna=False) == 1
    for index, (name, line) in enumerate(frame.groupby(_names(frame, by), sort=False)):
        look = colours[index % len(colours)], SYMBOLS[index % len(SYMBOLS)]
        for row, (target, metrics) in enumerate(panels.items(), start=1):
            for column, metric in enumerate(metrics, start=1):
                part = line[(line["target"] == target) & (line["metric"] == metric)]
                for trace in _traces(part, str(name), *look, single) if len(part) else ():
                    # In the legend once, wherever it is first drawn.
                    trace["showlegend"] = trace["showlegend"] and trace["name"] not in shown
                    shown.update([trace["name"]] if trace["showlegend"] else [])
                    found.add_trace(trace, row=row, col=column)
    for control, dash in _DASHES.items():
        if frame[control].notna().any():
            style = {"color": "#808080", "dash": dash, "width": 1.5}
            drawn = {"mode": "lines", "line": style}
            if single:
                drawn = {"mode": "markers", "marker": _open(control, "#808080")}
            key = {"type": "scatter", "x": [None], "y": [None], "name": control, "showlegend": True}
            found.add_trace({**key, **drawn}, row=1, col=1)
    for row, metrics in enumerate(panels.values(), start=1):
        for column in range(len(metrics) + 1, wide + 1):
            found.update_xaxes(visible=False, row=row, col=column)
            found.update_yaxes(visible=False, row=row, col=column)
    found.update_xaxes(type="category", title={"text": "layer", "standoff": 4})
    found.update_annotations(font_size=13)
    found.update_layout(
        height=TOP + height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        # Of one layer, lines stand beside each other.
        scattermode="group" if single else "overlay",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 40 / height, "x": 0},
    )
    said = "On held-out examples, with 95% intervals. Shuffled: targets exchanged between examples."
    return finished(found, "Linear probes", said)


def _names(frame: pd.DataFrame, by: str | None) -> list[str]:
    """What each row's line is called: what differs in this table, and the split."""
    columns = {"site": "", "head": "head ", "position": "position "}
    columns = columns if by is None else {by: "", **columns}
    said = {name: text for name, text in columns.items() if frame[name].nunique(dropna=False) > 1}
    rows = frame.to_dict("records")
    parts = [[f"{text}{row[name]}" for name, text in said.items() if not pd.isna(row[name])] for row in rows]
    return [", ".join([*part, f"{row['split']} entries"]) for part, row in zip(parts, rows, strict=True)]


def _open(control: str, colour: str) -> dict[str, Any]:
    return {"symbol": _OPEN[control], "size": 10, "color": colour, "line": {"color": colour, "width": 2}}


def _points(part: pd.DataFrame, name: str, colour: str, symbol: str) -> list[dict[str, Any]]:
    """Of one layer: each value with its interval, and the controls as open marks beside it."""
    shown: dict[str, Any] = {"type": "scatter", "mode": "markers", "legendgroup": name, "offsetgroup": name}
    shown["x"] = _layers(part)
    marker = {"symbol": symbol, "size": 9, "color": colour}
    bars = interval(part["value"], part["ci_low"], part["ci_high"])
    value = {"y": part["value"].tolist(), "error_y": bars, "name": name, "marker": marker, "showlegend": True}
    return [{**shown, **value}] + [
        {
            **shown,
            "y": part[control].tolist(),
            "name": f"{name}, {control}",
            "marker": _open(control, colour),
            "showlegend": False,
        }
        for control in _DASHES
        if part[control].notna().any()
    ]


def _layers(part: pd.DataFrame) -> list[str]:
    return ["–" if pd.isna(layer) else str(layer) for layer in part["layer"]]


def _traces(part: pd.DataFrame, name: str, colour: str, symbol: str, single: bool) -> list[dict[str, Any]]:
    """A band, the values on it, and the controls there are; of one layer points."""
    if single:
        return _points(part, name, colour, symbol)
    common = {"type": "scatter", "x": _layers(part), "legendgroup": name}
    edge = {
        **common,
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "name": "band",
    }
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    band = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
    line = {**common, "mode": "lines+markers", "showlegend": True}
    value = {
        "name": name,
        "marker": {"symbol": symbol, "size": 7, "color": colour},
        "line": {"color": colour},
    }
    traces: list[dict[str, Any]] = [
        {**edge, "y": part["ci_high"].tolist()},
        {**edge, **band, "y": part["ci_low"].tolist()},
        {**line, **value, "y": part["value"].tolist()},
    ]
    for control, dash in _DASHES.items():
        if part[control].notna().any():
            drawn = {"color": colour, "dash": dash, "width": 1.5}
            own = {"name": f"{name}, {control}", "marker": {"size": 3, "color": colour}, "line": drawn}
            # They come and go with the line; what their dashes mean is said once.
            traces.append({**line, **own, "y": part[control].tolist(), "showlegend": False})
    return traces
