"""Figures of probes: values over layers beside their controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.reporting.palette import COLOURS, SYMBOLS, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a panel, and between panels with their titles.
PANEL, GAP = 200, 90
TOP, BOTTOM = 110, 70
DASHES = {"shuffled": "dot", "untrained": "dash"}


def figure(tables: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """A row of panels per target, one panel per metric; a colour per checkpoint, split, site, head and position."""
    import pandas
    from plotly.subplots import make_subplots

    whole = pandas.concat([table.assign(ref=ref) for ref, table in tables.items()])
    panels = {
        target: list(dict.fromkeys(part["metric"])) for target, part in whole.groupby("target", sort=False)
    }
    wide = max(map(len, panels.values()))
    height = PANEL * len(panels) + GAP * (len(panels) - 1)
    titles = [
        f"{target}: {metrics[place]}" if place < len(metrics) else ""
        for target, metrics in panels.items()
        for place in range(wide)
    ]
    found = make_subplots(
        rows=len(panels),
        cols=wide,
        subplot_titles=titles,
        vertical_spacing=GAP / height if len(panels) > 1 else 0,
        horizontal_spacing=0.06,
    )
    names = line_names(whole)
    shown: set[str] = set()
    for index, name in enumerate(dict.fromkeys(names)):
        line = whole[[one == name for one in names]]
        for row, (target, metrics) in enumerate(panels.items(), start=1):
            for column, metric in enumerate(metrics, start=1):
                part = line[(line["target"] == target) & (line["metric"] == metric)]
                for trace in traces(part, name, index) if len(part) else ():
                    first = trace["name"] not in shown
                    trace["showlegend"] = trace["showlegend"] and first
                    shown.update([trace["name"]] if trace["showlegend"] else [])
                    found.add_trace(trace, row=row, col=column)
    for row, metrics in enumerate(panels.values(), start=1):
        for column in range(1, wide + 1):
            found.update_xaxes(visible=column <= len(metrics), row=row, col=column)
            found.update_yaxes(visible=column <= len(metrics), row=row, col=column)
    found.update_xaxes(type="category", title={"text": "layer", "standoff": 4})
    found.update_layout(
        height=TOP + height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        legend={"y": 1 + 40 / height},
        template=template("light"),
    )
    found.update_annotations(font_size=13)
    return found


def line_names(whole: pandas.DataFrame) -> list[str]:
    """What a line is of, as far as that differs: checkpoint, split of the entries, site, head, position."""
    import pandas

    names: list[list[str]] = [[] for _ in range(len(whole))]
    for column, said in (
        ("ref", ""),
        ("site", ""),
        ("head", "head "),
        ("position", "position "),
        ("split", ""),
    ):
        if column != "split" and whole[column].nunique(dropna=False) == 1:
            continue
        for parts, value in zip(names, whole[column], strict=True):
            if not pandas.isna(value):
                parts.append(f"{said}{value}" + (" entries" if column == "split" else ""))
    return [", ".join(parts) for parts in names]


def traces(part: pandas.DataFrame, name: str, index: int) -> list[dict[str, Any]]:
    """A band, the values on it, and the controls."""
    import pandas

    colour = COLOURS["light"][index % len(COLOURS["light"])]
    layers = ["–" if pandas.isna(layer) else str(layer) for layer in part["layer"]]
    common = {"type": "scatter", "x": layers, "legendgroup": name}
    edge = {
        **common,
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "name": "band",
    }
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    found: list[dict[str, Any]] = [
        {**edge, "y": part["ci_high"].tolist()},
        {
            **edge,
            "y": part["ci_low"].tolist(),
            "fill": "tonexty",
            "fillcolor": f"rgba({red},{green},{blue},0.2)",
        },
        {
            **common,
            "y": part["value"].tolist(),
            "mode": "lines+markers",
            "name": name,
            "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "color": colour},
            "line": {"color": colour},
            "showlegend": True,
        },
    ]
    for control, dash in DASHES.items():
        if part[control].notna().any():
            found.append(
                {
                    **common,
                    "y": part[control].tolist(),
                    "mode": "lines+markers",
                    "name": f"{name}, {control}",
                    "marker": {"size": 3, "color": colour},
                    "line": {"color": colour, "dash": dash, "width": 1.5},
                    "showlegend": True,
                }
            )
    return found
