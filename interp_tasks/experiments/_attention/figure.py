"""The figure of ``attention`` over training: a panel per template, a line per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits.figures.palette import COLOURS, SYMBOLS, template
from interp_tasks.experiments._attention.table import ALL_HEADS, FOLLOWS, MOVED

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Panels beside each other; heights in pixels of a panel, and between panels with their titles.
ACROSS, PANEL, GAP, TOP, BOTTOM = 3, 200, 80, 90, 70


def over_steps(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Scores corrected for chance, and shares that move or follow, by step; colours say the layer."""
    from plotly.subplots import make_subplots

    heads = frame[frame["variant"] != ALL_HEADS]
    metrics = list(dict.fromkeys(heads["metric"]))
    down = -(-len(metrics) // ACROSS)
    total_height = PANEL * down + GAP * (down - 1)
    figure = make_subplots(
        rows=down,
        cols=ACROSS,
        shared_xaxes="all",
        vertical_spacing=GAP / total_height if down > 1 else 0,
        subplot_titles=metrics,
    )
    runs = list(dict.fromkeys(heads["run"]))
    legend_names: set[str] = set()
    for index, metric in enumerate(metrics):
        of_metric = heads[heads["metric"] == metric]
        for (run, variant), part in of_metric.groupby(["run", "variant"], sort=False):
            line = part.sort_values("step")
            layer = int(line["layer"].iloc[0])
            legend = f"layer {layer}"
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": line["step"].tolist(),
                    "y": shown(line, metric).tolist(),
                    "name": legend,
                    "legendgroup": legend,
                    "showlegend": legend not in legend_names,
                    "marker": {"symbol": SYMBOLS[runs.index(run) % len(SYMBOLS)], "size": 6},
                    "line": {"color": COLOURS["light"][layer % len(COLOURS["light"])], "width": 1.5},
                    "hovertemplate": f"{run}<br>{variant}, step %{{x}}<br>{metric} %{{y:.3g}}<extra></extra>",
                },
                row=index // ACROSS + 1,
                col=index % ACROSS + 1,
            )
            legend_names.add(legend)
    for index in range(max(0, len(metrics) - ACROSS), len(metrics)):
        figure.update_xaxes(
            title_text="step", showticklabels=True, row=index // ACROSS + 1, col=index % ACROSS + 1
        )
    figure.update_layout(
        height=TOP + total_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        legend={"y": 1 + 40 / total_height},
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure


def shown(rows: pandas.DataFrame, metric: str) -> pandas.Series:
    """Returns the values to draw: scores corrected for chance (0 at chance, 1 all attention), shares unchanged."""
    if metric.startswith((MOVED, FOLLOWS)):
        return rows["value"]
    return rows["effect"] / (1 - rows["baseline"])
