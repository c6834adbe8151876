"""The figure of ``circuit`` over training: the size of the smallest circuit, and the metric that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits.figures.palette import COLOURS, SYMBOLS, template
from interp_tasks.experiments._circuit.rows import CIRCUIT, FAITHFULNESS, SIZE

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Pixels: of a panel, between panels, above and below.
PANEL, GAP, TOP, BOTTOM = 200, 30, 60, 60


def over_steps(frame: pandas.DataFrame, metric: str) -> plotly.graph_objects.Figure:
    """Returns three panels over steps, a line per run: share of the members, faithfulness, and the clean metric."""
    from plotly.subplots import make_subplots

    own = frame[frame["variant"] == CIRCUIT].sort_values("step", kind="stable")
    sizes = own[own["metric"] == SIZE]
    panels = {
        "share of members": sizes.assign(value=sizes["value"] / sizes["baseline"]),
        FAITHFULNESS: own[own["metric"] == FAITHFULNESS],
        f"{metric}, clean": own[own["metric"] == metric].assign(
            value=lambda rows: rows["baseline"], value_ci_low=float("nan")
        ),
    }
    height = PANEL * len(panels) + GAP * (len(panels) - 1)
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=GAP / height)
    for row, (name, rows) in enumerate(panels.items(), start=1):
        for index, (run, part) in enumerate(rows.groupby("run", sort=False, dropna=False)):
            known = part["value_ci_low"].notna().any()
            bars = {
                "type": "data",
                "symmetric": False,
                "array": (part["value_ci_high"] - part["value"]).tolist(),
                "arrayminus": (part["value"] - part["value_ci_low"]).tolist(),
            }
            figure.add_scatter(
                x=part["step"].tolist(),
                y=part["value"].tolist(),
                mode="lines+markers",
                name=str(run),
                legendgroup=str(run),
                showlegend=row == 1 and rows["run"].nunique() > 1,
                marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
                line={"color": COLOURS["light"][index % len(COLOURS["light"])], "width": 1.6},
                **({"error_y": bars} if known else {}),
                hovertemplate=f"{run}, step %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=name, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    figure.update_layout(
        height=TOP + height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        legend={"y": 1.04},
        template=template("light"),
    )
    return figure
