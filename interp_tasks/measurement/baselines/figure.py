"""The figure of models beside methods: a panel per metric, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SYMBOLS, template
from circuits.figures.style import log_axis

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a panel, and between panels.
PANEL, GAP, TOP, BOTTOM = 280, 60, 110, 90


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each metric over the variations of the data, of checkpoints and of the methods beside them."""
    from plotly.subplots import make_subplots

    frame = frame[frame["value"].notna() & frame["value_ci_low"].notna()]
    metrics = list(dict.fromkeys(frame["metric"]))
    refs, methods = (list(dict.fromkeys(frame[column])) for column in ("ref", "intervention"))
    total_height = PANEL * len(metrics) + GAP * (len(metrics) - 1)
    figure = make_subplots(
        rows=len(metrics), cols=1, vertical_spacing=GAP / total_height if metrics[1:] else 0
    )
    for row, metric in enumerate(metrics, start=1):
        of = frame[frame["metric"] == metric]
        for index, ref in enumerate(refs):
            ref_rows = of[of["ref"] == ref].drop_duplicates("variant")
            trace = line(ref_rows, "value", str(ref), index, "solid")
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": (ref_rows["value_ci_high"] - ref_rows["value"]).tolist(),
                "arrayminus": (ref_rows["value"] - ref_rows["value_ci_low"]).tolist(),
            }
            figure.add_trace({**trace, "showlegend": row == 1}, row=row, col=1)
        for index, method in enumerate(methods, start=len(refs)):
            # The examples are the same for all checkpoints, and so is what a method makes of them.
            ref_rows = of[(of["intervention"] == method) & of["baseline"].notna()].drop_duplicates("variant")
            if len(ref_rows):
                dash = "dot" if method == "truth" else "dash"
                shown = not any(old.name == method for old in figure.data)
                trace = line(ref_rows, "baseline", str(method), index, dash)
                figure.add_trace({**trace, "showlegend": shown}, row=row, col=1)
        numbers = of[["value", "value_ci_low", "value_ci_high", "baseline"]]
        smallest, largest = float(numbers.min().min()), float(numbers.max().max())
        axis = log_axis(smallest, largest) if smallest > 0 else {"type": "linear"}
        figure.update_yaxes(title_text=metric, row=row, col=1, **axis)
        figure.update_xaxes(
            type="category",
            categoryorder="array",
            categoryarray=list(dict.fromkeys(frame["variant"])),
            row=row,
            col=1,
        )
    figure.update_xaxes(title_text="variation of the data", row=len(metrics), col=1)
    figure.update_layout(
        height=TOP + total_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        legend={"y": 1 + 40 / total_height},
        template=template("light"),
    )
    return figure


def line(part: pandas.DataFrame, column: str, name: str, index: int, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": part["variant"].tolist(),
        "y": part[column].tolist(),
        "line": {"dash": dash, "color": COLOURS["light"][index % len(COLOURS["light"])]},
        "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8},
        "hovertemplate": f"{name}<br>%{{x}}<br>%{{y:.4g}}<extra></extra>",
    }
