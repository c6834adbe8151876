"""Draws embeddings of values and positions, and how they form during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SEQUENTIAL, SYMBOLS, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Width of the bins that values are coloured by, as in figure 7 of the paper.
BIN = 0.5
PANEL, GAP = 320, 115


def arrangement(
    ref: str, tokens: pandas.DataFrame | None, positions: pandas.DataFrame | None
) -> plotly.graph_objects.Figure:
    """Draws the embeddings of one checkpoint: a row of panels for values, a row for positions."""
    from plotly.subplots import make_subplots

    titles: list[str] = []
    if tokens is not None:
        titles += [f"values: principal components<br>{ref}", "values: norms"]
    if positions is not None:
        titles += [f"positions: t-SNE<br>{ref}", "positions: norms"]
    rows = len(titles) // 2
    total_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows, cols=2, subplot_titles=titles, vertical_spacing=GAP / total_height if rows > 1 else 0
    )
    row = 0
    if tokens is not None:
        row += 1
        add_values(figure, row, tokens)
    if positions is not None:
        add_positions(figure, row + 1, positions)
    figure.update_layout(
        height=total_height + 150,
        margin={"t": 90, "b": 60},
        showlegend=False,
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure


def add_values(figure: Any, row: int, table: pandas.DataFrame) -> None:
    """Draws values on two principal components, and norms over values."""
    bins = (table["value"] / BIN).round() * BIN
    hover = [f"{value:g}" for value in table["value"]]
    # The ends of the scale are near black and near white: a rim is seen on both grounds.
    rim = {"width": 0.8, "color": "#808080"}
    marker = {"size": 7, "color": bins.tolist(), "colorscale": SEQUENTIAL, "line": rim}
    for column, x, y, labels in (
        (1, "component 1", "component 2", ("component 1", "component 2")),
        (2, "value", "norm", ("value", "norm")),
    ):
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "markers",
                "x": table[x].tolist(),
                "y": table[y].tolist(),
                "text": hover,
                "marker": marker,
                "hovertemplate": "value %{text}<br>(%{x:.3g}, %{y:.3g})<extra></extra>",
            },
            row=row,
            col=column,
        )
        figure.update_xaxes(title_text=labels[0], row=row, col=column)
        figure.update_yaxes(title_text=labels[1], row=row, col=column)


def add_positions(figure: Any, row: int, table: pandas.DataFrame) -> None:
    """Draws positions by t-SNE, and norms over positions; a colour and symbol for each value of the last axis."""
    axes = [name for name in table.columns if name not in ("position", "norm", "t-SNE 1", "t-SNE 2")]
    last = axes[-1]
    for line in sorted(set(table[last])):
        part = table[table[last] == line]
        marker = {
            "size": 9,
            "color": COLOURS["light"][line % len(COLOURS["light"])],
            "symbol": SYMBOLS[line % len(SYMBOLS)],
        }
        text = [", ".join(f"{axis} {record[axis]}" for axis in axes) for record in part.to_dict("records")]
        for column, x, y in ((1, "t-SNE 1", "t-SNE 2"), (2, "position", "norm")):
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": part[x].tolist(),
                    "y": part[y].tolist(),
                    "text": text,
                    "marker": marker,
                    "hovertemplate": "%{text}<br>(%{x:.3g}, %{y:.3g})<extra></extra>",
                },
                row=row,
                col=column,
            )
            figure.update_xaxes(title_text=x, row=row, col=column)
            figure.update_yaxes(title_text=y, row=row, col=column)


def over_training(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws a panel per metric over steps, a line per run, with open markers for the untrained baseline."""
    from plotly.subplots import make_subplots

    shown = frame[~frame["metric"].str.endswith(": p")]
    metrics = list(dict.fromkeys(shown["metric"]))
    rows = (len(metrics) + 1) // 2
    total_height = 220 * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows, cols=2, subplot_titles=metrics, vertical_spacing=GAP / total_height if rows > 1 else 0
    )
    for index, metric in enumerate(metrics):
        for line, run in enumerate(dict.fromkeys(shown["run"])):
            part = shown[(shown["metric"] == metric) & (shown["run"] == run)].sort_values("step")
            colour = COLOURS["light"][line % len(COLOURS["light"])]
            for key, mark in (("value", ""), ("baseline", "-open")):
                figure.add_trace(
                    {
                        "type": "scatter",
                        "mode": "lines+markers" if key == "value" else "markers",
                        "x": part["step"].tolist(),
                        "y": part[key].tolist(),
                        "name": f"{run}{', baseline' if mark else ''}",
                        "line": {"color": colour},
                        "marker": {
                            "color": colour,
                            "symbol": SYMBOLS[line % len(SYMBOLS)] + mark,
                            "size": 7,
                        },
                        "showlegend": index == 0,
                    },
                    row=index // 2 + 1,
                    col=index % 2 + 1,
                )
    for column in range(min(2, len(metrics))):
        figure.update_xaxes(title_text="step", row=(len(metrics) - 1 - column) // 2 + 1, col=column + 1)
    figure.update_layout(
        height=total_height + 160,
        margin={"t": 100, "b": 60},
        legend={"y": 1 + 34 / total_height},
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure
