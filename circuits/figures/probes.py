"""Draws a probe's table: scores over layers, with their controls."""

from __future__ import annotations

from typing import Any

import pandas as pd

from circuits.figures.palette import mark
from circuits.figures.style import finished, interval

# Heights in pixels: a panel, the gap between panels with their titles, and the space above and below all.
PANEL, GAP, TOP, BOTTOM = 200, 90, 110, 70
_DASHES = {"shuffled": "dot", "untrained": "dash"}
# Markers of the controls where there is one layer, so that a line would be a single point.
_OPEN = {"shuffled": "x-thin-open", "untrained": "circle-open"}


def figure(frame: pd.DataFrame, by: str | None = None) -> Any:
    """Draws a row of panels per target, with one panel per metric.

    A line per site, head, position and split, as far as they differ, and per value of the column `by`.
    """
    from plotly.subplots import make_subplots

    panels = {
        str(target): list(dict.fromkeys(part["metric"]))
        for target, part in frame.groupby("target", sort=False)
    }
    n_columns = max(map(len, panels.values()))
    height = PANEL * len(panels) + GAP * (len(panels) - 1)
    grid = make_subplots(
        rows=len(panels),
        cols=n_columns,
        subplot_titles=[
            f"{target}: {metrics[number]}" if number < len(metrics) else ""
            for target, metrics in panels.items()
            for number in range(n_columns)
        ],
        vertical_spacing=GAP / height if len(panels) > 1 else 0,
        horizontal_spacing=0.06,
    )
    in_legend: set[str] = set()
    lines = frame.groupby(_names(frame, by), sort=False)
    # A line of one layer, such as that of the embeddings, would be a point without a band.
    is_point = lines["layer"].nunique(dropna=False) == 1
    single = bool(is_point.all())
    for index, (name, line_rows) in enumerate(lines):
        look = *mark(index), bool(is_point.loc[str(name)])
        for row, (target, metrics) in enumerate(panels.items(), start=1):
            for column, metric in enumerate(metrics, start=1):
                part = line_rows[(line_rows["target"] == target) & (line_rows["metric"] == metric)]
                for trace in _traces(part, str(name), *look) if len(part) else ():
                    # A name is listed in the legend once, where it is first drawn.
                    trace["showlegend"] = trace["showlegend"] and trace["name"] not in in_legend
                    in_legend.update([trace["name"]] if trace["showlegend"] else [])
                    grid.add_trace(trace, row=row, col=column)
    for control, dash in _DASHES.items():
        if frame[control].notna().any():
            style = {"color": "#808080", "dash": dash, "width": 1.5}
            appearance = {"mode": "lines", "line": style}
            if single:
                appearance = {"mode": "markers", "marker": _open(control, "#808080")}
            legend_entry = {"type": "scatter", "x": [None], "y": [None], "name": control, "showlegend": True}
            grid.add_trace({**legend_entry, **appearance}, row=1, col=1)
    for row, metrics in enumerate(panels.values(), start=1):
        for column in range(len(metrics) + 1, n_columns + 1):
            grid.update_xaxes(visible=False, row=row, col=column)
            grid.update_yaxes(visible=False, row=row, col=column)
    grid.update_xaxes(type="category", title={"text": "layer", "standoff": 4})
    grid.update_annotations(font_size=13)
    grid.update_layout(
        height=TOP + height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        # Where all are points, they are drawn side by side.
        scattermode="group" if single else "overlay",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 40 / height, "x": 0},
    )
    subtitle = "On held-out examples, with 95% intervals. Shuffled: targets exchanged between examples."
    return finished(grid, "Linear probes", subtitle)


def _names(frame: pd.DataFrame, by: str | None) -> list[str]:
    """Returns names the line of each row by the columns whose values differ in this table, and by the split."""
    columns = {"site": "", "head": "head ", "position": "position "}
    columns = columns if by is None else {by: "", **columns}
    prefixes = {name: text for name, text in columns.items() if frame[name].nunique(dropna=False) > 1}
    rows = frame.to_dict("records")
    parts = [
        [f"{text}{row[name]}" for name, text in prefixes.items() if not pd.isna(row[name])] for row in rows
    ]
    return [", ".join([*part, f"{row['split']} entries"]) for part, row in zip(parts, rows, strict=True)]


def _open(control: str, colour: str) -> dict[str, Any]:
    return {"symbol": _OPEN[control], "size": 10, "color": colour, "line": {"color": colour, "width": 2}}


def _points(part: pd.DataFrame, name: str, colour: str, symbol: str) -> list[dict[str, Any]]:
    """Returns traces for one layer: values with their intervals, and the controls as open markers."""
    common: dict[str, Any] = {"type": "scatter", "mode": "markers", "legendgroup": name, "offsetgroup": name}
    common["x"] = _layers(part)
    marker = {"symbol": symbol, "size": 9, "color": colour}
    bars = interval(part["value"], part["value_ci_low"], part["value_ci_high"])
    value_trace = {
        "y": part["value"].tolist(),
        "error_y": bars,
        "name": name,
        "marker": marker,
        "showlegend": True,
    }
    return [{**common, **value_trace}] + [
        {
            **common,
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
    """Returns the traces of one line: its band, its values and its controls; points if there is a single layer."""
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
    value_style = {
        "name": name,
        "marker": {"symbol": symbol, "size": 7, "color": colour},
        "line": {"color": colour},
    }
    traces: list[dict[str, Any]] = [
        {**edge, "y": part["value_ci_high"].tolist()},
        {**edge, **band, "y": part["value_ci_low"].tolist()},
        {**line, **value_style, "y": part["value"].tolist()},
    ]
    for control, dash in _DASHES.items():
        if part[control].notna().any():
            line_style = {"color": colour, "dash": dash, "width": 1.5}
            control_style = {
                "name": f"{name}, {control}",
                "marker": {"size": 3, "color": colour},
                "line": line_style,
            }
            # Controls are toggled with their line; the legend explains the dashes once.
            traces.append({**line, **control_style, "y": part[control].tolist(), "showlegend": False})
    return traces
