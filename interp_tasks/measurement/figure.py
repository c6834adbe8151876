"""Figures of the tidy table, in the palette of the pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import Scheme, mark, mixed, readable_on, template
from interp_tasks.pages import signed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a panel of points, of a row of a map, between panels, between panels with titles.
POINTS, MAP_ROW, GAP, GAP_TITLED = 190, 36, 38, 90


@dataclass(frozen=True)
class Panel:
    """One row of a figure: its height, and what draws it, given the figure and the row."""

    height: int
    draw: Callable[[Any, int], None]
    title: str = ""


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each variant's value beside its baseline, per metric, and maps of heads edited one by one."""
    maps, points = frame[in_map(frame)], frame[~in_map(frame)]
    panels: list[Panel] = []
    for metric in dict.fromkeys(frame["metric"]):
        of_metric = maps[maps["metric"] == metric]
        effects = of_metric["effect"].abs().dropna()
        largest = float(effects.max()) if len(effects) else 0.0
        for ref in dict.fromkeys(of_metric["ref"]):
            panels.append(map_panel(of_metric[of_metric["ref"] == ref], str(ref), str(metric), largest))
        panels.append(
            points_panel(points[points["metric"] == metric], str(metric), list(dict.fromkeys(frame["ref"])))
        )
    return stacked_panels(panels, ragged=len(maps) > 0)


def in_map(frame: pandas.DataFrame) -> pandas.Series:
    """Returns rows of the experiment ``heads`` that are about one head alone, and no group that happens to be one."""
    return (frame["experiment"] == "heads") & (
        frame["variant"] == frame["layer"].astype("string") + "." + frame["head"].astype("string")
    ).fillna(False)


def stacked_panels(panels: list[Panel], *, ragged: bool) -> plotly.graph_objects.Figure:
    """Stacks panels, each with its height; with ``ragged`` each has a title and an x axis of its own."""
    from plotly.subplots import make_subplots

    gap = GAP_TITLED if ragged else GAP
    total_height = sum(panel.height for panel in panels) + gap * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=not ragged,
        row_heights=[panel.height for panel in panels],
        vertical_spacing=gap / total_height,
        subplot_titles=[panel.title for panel in panels] if ragged else None,
    )
    for row, panel in enumerate(panels, start=1):
        panel.draw(figure, row)
    top, bottom = 100 if ragged else 70, 70
    figure.update_layout(
        # Points of different checkpoints stand side by side, not on top of each other.
        scattermode="group",
        scattergap=0.6,
        height=top + total_height + bottom,
        margin={"t": top, "b": bottom},
        # At the same distance however tall the figure is.
        legend={"y": 1 + (45 if ragged else 12) / total_height},
        template=template("light"),
    )
    figure.update_annotations(font_size=13, x=0, xanchor="left", align="left")
    if not ragged:
        figure.update_xaxes(title_text="variant", row=len(panels), col=1)
    return figure


def points_panel(part: pandas.DataFrame, metric: str, refs: list[Any]) -> Panel:
    """Draws values with their intervals (filled), single draws (faint) and baselines (open) of one metric."""

    def draw(figure: Any, row: int) -> None:
        """Draws each checkpoint's edited and unedited values into a panel, single draws beside them."""
        for index, ref in enumerate(refs):
            ref_rows = part[part["ref"] == ref]
            pooled = ref_rows[ref_rows["draw"].isna()]
            if ref_rows.empty:
                continue
            for kind in ("edited", "draws", "unedited"):
                rows = ref_rows[ref_rows["draw"].notna()] if kind == "draws" else pooled
                if len(rows):
                    trace = series(rows, str(ref), index, kind)
                    in_legend = kind == "edited" and not any(
                        old.legendgroup == trace["legendgroup"] for old in figure.data
                    )
                    figure.add_trace({**trace, "showlegend": in_legend}, row=row, col=1)
        axis = scale(part)
        powers = {"dtick": powers_apart(part), "exponentformat": "power"} if axis == "log" else {}
        figure.update_yaxes(title_text=metric, type=axis, row=row, col=1, **powers)
        # Plotly would read head "0.1" as a number.
        figure.update_xaxes(type="category", row=row, col=1)

    return Panel(POINTS, draw, f"{metric}: heads together")


def series(part: pandas.DataFrame, ref: str, index: int, kind: str) -> dict[str, Any]:
    """Returns the points of one checkpoint as a plotly trace: edited with intervals, single draws, or unedited."""
    colour, symbol = mark(index)
    several = part.duplicated(["variant", "draw"]).any()
    styles: dict[str, dict[str, Any]] = {
        "edited": {"symbol": symbol, "size": 10},
        "draws": {"symbol": symbol, "size": 5, "opacity": 0.5},
        "unedited": {"symbol": f"{symbol}-open"},
    }
    marker = styles[kind]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": {"edited": ref, "draws": f"{ref}, single draws", "unedited": f"{ref}, unedited"}[kind],
        "legendgroup": ref,
        # Single draws stand beside the row that pools them.
        "offsetgroup": f"{ref}, single draws" if kind == "draws" else ref,
        "x": [
            f"{v}<br>{i}" if several else str(v)
            for v, i in zip(part["variant"], part["intervention"], strict=True)
        ],
        "y": part["baseline" if kind == "unedited" else "value"].tolist(),
        "marker": {**marker, "color": colour},
        "hovertemplate": f"{ref}<br>%{{x}}<br>%{{customdata}}<extra></extra>",
    }
    if kind == "edited":
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": (part["ci_high"] - part["value"]).tolist(),
            "arrayminus": (part["value"] - part["ci_low"]).tolist(),
        }
    trace["customdata"] = [
        ("" if kind != "draws" else f"draw {row['draw']}: ")
        + f"value {row['value']:.6g} [{row['ci_low']:.4g}, {row['ci_high']:.4g}]"
        f"<br>unedited {row['baseline']:.6g}<br>effect {row['effect']:+.4g} "
        f"[{row['effect_ci_low']:.4g}, {row['effect_ci_high']:.4g}]"
        for row in part.to_dict("records")
    ]
    return trace


def scale(part: pandas.DataFrame) -> str:
    """Returns "log" where values span two powers of ten and no value or interval reaches zero."""
    smallest, largest = extremes(part)
    return "log" if smallest > 0 and largest > 100 * smallest else "linear"


def powers_apart(part: pandas.DataFrame) -> int:
    """Returns the number of powers of ten between the ticks of a logarithmic axis, so that they do not crowd."""
    smallest, largest = extremes(part)
    return max(1, round(math.log10(largest / smallest) / 4))


def extremes(part: pandas.DataFrame) -> tuple[float, float]:
    numbers = part[["value", "baseline", "ci_low"]].to_numpy(dtype=float)
    return float(numbers.min()), float(numbers.max())


def map_panel(part: pandas.DataFrame, ref: str, metric: str, largest: float) -> Panel:
    """Returns a panel with a heatmap of each head's effect on one metric in one checkpoint; zero is blank."""
    effects = part.pivot(index="layer", columns="head", values="effect")

    def draw(figure: Any, row: int) -> None:
        """Draws effects as a map into a panel, layer by head."""
        figure.add_trace(
            {
                "type": "heatmap",
                "x": [str(head) for head in effects.columns],
                "y": [str(layer) for layer in effects.index],
                "z": effects.to_numpy(dtype=float).tolist(),
                # The template's diverging colours, which a page in the dark scheme replaces.
                "autocolorscale": True,
                "zmin": -(largest or 1.0),
                "zmax": largest or 1.0,
                "showscale": False,
                "hovertemplate": f"{ref}<br>head %{{y}}.%{{x}}<br>{metric} %{{z:+.4g}}<extra></extra>",
                "xgap": 2,
                "ygap": 2,
            },
            row=row,
            col=1,
        )
        figure.add_trace(numbers_of(effects, largest), row=row, col=1)
        for update, title in ((figure.update_xaxes, "head"), (figure.update_yaxes, "layer")):
            update(type="category", title={"text": title, "standoff": 4}, showgrid=False, row=row, col=1)
        figure.update_yaxes(autorange="reversed", row=row, col=1)

    return Panel(MAP_ROW * len(effects.index), draw, f"{metric}: effect of each head alone<br>{ref}")


def numbers_of(effects: pandas.DataFrame, largest: float) -> dict[str, Any]:
    """Returns a plotly trace of a map's numbers, each in a colour that can be read on its cell."""
    cells = [
        (str(layer), str(head), float(value))
        for layer, row in effects.iterrows()
        for head, value in row.items()
        if not math.isnan(value)
    ]

    def colours(scheme: Scheme) -> dict[str, list[str]]:
        return {"color": [readable_on(mixed(scheme, value / (largest or 1.0))) for _, _, value in cells]}

    return {
        "type": "scatter",
        "mode": "text",
        "x": [head for _, head, _ in cells],
        "y": [layer for layer, _, _ in cells],
        "text": [signed(value) for _, _, value in cells],
        "textfont": colours("light"),
        "meta": {"dark": {"textfont": colours("dark")}},
        "hoverinfo": "skip",
        "showlegend": False,
    }
