"""The figure of ``algorithm``: maps of methods by read-outs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits.figures.palette import template
from interp_tasks.experiments._algorithm.table import DISTANCE, ERRORS, PREDICTIONS
from interp_tasks.pages import number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a row of a map, between maps, above and below them.
ROW, GAP, TOP, BOTTOM = 24, 90, 90, 70


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Returns a row of maps for each checkpoint and kind of entries, a column for each metric."""
    from plotly.subplots import make_subplots

    metrics = [DISTANCE, PREDICTIONS, ERRORS]
    pairs = list(dict.fromkeys(zip(frame["ref"], frame["intervention"], strict=True)))
    height = ROW * frame["variant"].nunique()
    total_height = height * len(pairs) + GAP * (len(pairs) - 1)
    figure = make_subplots(
        rows=len(pairs),
        cols=len(metrics),
        shared_yaxes=True,
        vertical_spacing=GAP / total_height if pairs[1:] else 0,
        horizontal_spacing=0.02,
        subplot_titles=[f"{metric}, {kind}<br>{ref}" for ref, kind in pairs for metric in metrics],
    )
    for row, (ref, kind) in enumerate(pairs, start=1):
        kind_rows = frame[(frame["ref"] == ref) & (frame["intervention"] == kind)]
        for column, metric in enumerate(metrics, start=1):
            of = kind_rows[kind_rows["metric"] == metric]
            after = [
                "embed" if site == "resid_pre" else str(layer)
                for site, layer in zip(of["site"], of["layer"], strict=True)
            ]
            table = of.assign(after=after).pivot(index="variant", columns="after", values="value")
            table = table.reindex(
                index=list(dict.fromkeys(kind_rows["variant"])), columns=list(dict.fromkeys(after))
            )
            figure.add_trace(
                {
                    "type": "heatmap",
                    "x": list(table.columns),
                    "y": list(table.index),
                    "z": table.to_numpy(dtype=float).tolist(),
                    "text": [[number(value) for value in line] for line in table.to_numpy(dtype=float)],
                    "texttemplate": "%{text}",
                    "showscale": False,
                    "hovertemplate": f"%{{y}}<br>after %{{x}}<br>{metric} %{{z:.4g}}<extra></extra>",
                    # Correlations: the diverging colours, 0 in the middle. Distances: the sequential ones.
                    **({} if metric == DISTANCE else {"autocolorscale": True, "zmin": -1, "zmax": 1}),
                    **({"colorscale": "Cividis"} if metric == DISTANCE else {}),
                },
                row=row,
                col=column,
            )
            figure.update_xaxes(type="category", title_text="read-out after layer", row=row, col=column)
            figure.update_yaxes(type="category", autorange="reversed", row=row, col=column)
    figure.update_layout(
        height=TOP + total_height + BOTTOM, margin={"t": TOP, "b": BOTTOM}, template=template("light")
    )
    figure.update_annotations(font_size=12)
    return figure
