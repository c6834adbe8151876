"""The figure of a probe's table: values over layers, with their controls."""

from __future__ import annotations

from typing import Any

import pandas as pd

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5c5c5c")
_CONTROLS = {"shuffled": "dot", "untrained": "dash"}


def figure(frame: pd.DataFrame) -> Any:
    from plotly.subplots import make_subplots

    metrics, targets = (list(dict.fromkeys(frame[name])) for name in ("metric", "target"))
    found = make_subplots(
        rows=len(metrics),
        cols=len(targets),
        shared_xaxes=True,
        column_titles=list(map(str, targets)),
        vertical_spacing=0.3 / (len(metrics) + 2),
        horizontal_spacing=0.4 / (len(targets) + 4),
    )
    lines = frame.assign(line=_names(frame)).groupby("line", sort=False)
    shown: set[str] = set()
    for index, (name, line) in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        for (metric, target), part in line.groupby(["metric", "target"], sort=False):
            row, column = metrics.index(metric) + 1, targets.index(target) + 1
            for trace in _traces(part, str(name), colour):
                # A line once in the legend, wherever it is first drawn.
                key = f"{trace['legendgroup']} {trace['name']}"
                found.add_trace(
                    {**trace, "showlegend": trace["showlegend"] and key not in shown}, row=row, col=column
                )
                shown.add(key)
    for row, metric in enumerate(metrics, start=1):
        found.update_yaxes(title_text=metric, row=row, col=1)
    found.update_xaxes(type="category")
    found.update_xaxes(title_text="layer", row=len(metrics))
    found.update_layout(height=150 + 220 * len(metrics), width=260 + 260 * len(targets))
    return found


def _names(frame: pd.DataFrame) -> list[str]:
    """What tells the lines of a panel apart, of what differs in this table."""
    varying = [
        name for name in ("site", "head", "position", "split") if frame[name].nunique(dropna=False) > 1
    ]
    return [
        ", ".join(
            str(value) if name in ("site", "split") else f"{name} {value}"
            for name, value in zip(varying, values, strict=True)
            if not pd.isna(value)
        )
        or str(site)
        for values, site in zip(
            frame[varying].itertuples(index=False) if varying else ((),) * len(frame),
            frame["site"],
            strict=True,
        )
    ]


def _traces(part: pd.DataFrame, name: str, colour: str) -> list[dict[str, Any]]:
    """A band, the value, and the controls there are."""
    layers = ["–" if pd.isna(layer) else str(layer) for layer in part["layer"]]
    common = {"type": "scatter", "x": layers, "legendgroup": name}
    edge = {
        **common,
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "name": "band",
    }
    traces = [
        {**edge, "y": part["ci_high"].tolist()},
        {**edge, "y": part["ci_low"].tolist(), "fill": "tonexty", "fillcolor": _faint(colour)},
        {
            **common,
            "y": part["value"].tolist(),
            "mode": "lines+markers",
            "line": {"color": colour},
            "name": name,
            "showlegend": True,
        },
    ]
    for control, dash in _CONTROLS.items():
        if part[control].notna().any():
            line = {"color": colour, "dash": dash, "width": 1.5}
            traces.append(
                {
                    **common,
                    "y": part[control].tolist(),
                    "mode": "lines+markers",
                    "marker": {"size": 4},
                    "line": line,
                    "name": f"{name}, {control}",
                    "showlegend": True,
                }
            )
    return traces


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"
