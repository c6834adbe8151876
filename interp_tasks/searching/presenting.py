"""The page of a search, and its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.reporting import Column, Figure, Page, Section, Table, Text, number
from interp_tasks.reporting.palette import COLOURS, SYMBOLS, template

if TYPE_CHECKING:
    import plotly.graph_objects

    from interp_tasks.searching.finding import Found

PANEL, GAP, PER_ROW = 220, 90, 3
#: More trials than this, and lines of parallel coordinates are one area.
FAINT = 60


def page(found: Found) -> Page:
    """Importances, the course of the search, the objective against every setting, and all trials."""
    objective = found.identity["objective"]
    sections: list[Section] = [Text(said(found))]
    if found.importances:
        sections.append(
            drawn(
                importance_figure(found.importances),
                "Importance",
                "Share of the objective's variance over the space that fANOVA lays to each setting, from the trials "
                "there are; few trials tell little.",
            )
        )
    if found.ranked:
        sections += [
            drawn(
                history_figure(found),
                "Course of the search",
                f"Each trial's {objective['metric']}, and the best until then.",
            ),
            drawn(
                slice_figure(found),
                f"{objective['metric']} against every setting",
                "A point per trial, the best one as a star.",
            ),
            drawn(
                parallel_figure(found),
                "Trials as lines",
                "A line per complete trial; the darker, the better. Drag along an axis to choose some.",
            ),
        ]
    frame = found.frame()
    columns = [
        Column("trial", "trial"),
        Column(objective["metric"], "value"),
        *(Column(key, key, lambda row, key=key: shown(row[key])) for key in found.identity["space"]),  # type: ignore[misc]
        Column("state", "state"),
        Column("reason", "reason", lambda row: str(row["reason"] or ""), sentences=True),
    ]
    sections.append(Table(frame, "Trials", "The best first.", columns, name="trials"))
    title = f"Search: {found.identity['task']}, {found.identity['preset']}"
    return Page(title, sections, found.identity, found.versions)


def said(found: Found) -> str:
    objective, best = found.identity["objective"], found.best
    aim = "lowest" if objective["direction"] == "minimize" else "highest"
    text = (
        f"{found.summary()}. Wanted is the {aim} {objective['metric']} on validation examples, as the mean of the last "
        f"{objective['last']} evaluations."
    )
    if best is not None:
        settings = ", ".join(f"{key} {shown(value)}" for key, value in best["params"].items())
        text += f"\n\nBest: trial {best['trial']} with {number(best['value'])}: {settings}."
    return text


def drawn(figure: plotly.graph_objects.Figure, title: str, caption: str) -> Figure:
    return Figure(figure, title, caption, height=int(figure.layout.height))


def shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def importance_figure(shares: Mapping[str, float]) -> plotly.graph_objects.Figure:
    """A bar per setting, the largest on top."""
    import plotly.graph_objects as go

    keys = list(shares)[::-1]
    figure = go.Figure(
        {
            "type": "bar",
            "orientation": "h",
            "y": keys,
            "x": [shares[key] for key in keys],
            "text": [f"{shares[key]:.0%}" for key in keys],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": COLOURS["light"][0]},
            "hovertemplate": "%{y}: %{x:.3f}<extra></extra>",
        }
    )
    # Room for the number beside the longest bar.
    figure.update_xaxes(
        title_text="share of the variance", tickformat=".0%", range=[0, 1.12 * max(shares.values())]
    )
    figure.update_layout(template=template("light"), height=130 + 34 * len(keys), margin={"t": 20})
    return figure


def history_figure(found: Found) -> plotly.graph_objects.Figure:
    """The value of every trial by number, and the best so far."""
    import plotly.graph_objects as go

    complete = sorted(found.ranked, key=lambda trial: trial["trial"])
    pick = min if found.identity["objective"]["direction"] == "minimize" else max
    values = [trial["value"] for trial in complete]
    best = [pick(values[: end + 1]) for end in range(len(values))]
    numbers = [trial["trial"] for trial in complete]
    figure = go.Figure(
        [
            {
                "type": "scatter",
                "mode": "markers",
                "name": "trial",
                "x": numbers,
                "y": values,
                "marker": {"color": COLOURS["light"][0], "symbol": SYMBOLS[0], "size": 8},
                "text": [described(trial) for trial in complete],
                "hovertemplate": "trial %{x}: %{y:.4g}<br>%{text}<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best so far",
                "x": numbers,
                "y": best,
                "line": {"color": COLOURS["light"][1], "shape": "hv", "width": 2},
                "hovertemplate": "best until trial %{x}: %{y:.4g}<extra></extra>",
            },
        ]
    )
    figure.update_xaxes(
        title_text="trial", tickformat="d", dtick=max(1, math.ceil(max(numbers, default=0) / 12))
    )
    figure.update_yaxes(title_text=found.identity["objective"]["metric"], **value_axis(values))
    figure.update_layout(template=template("light"), height=360)
    return figure


def slice_figure(found: Found) -> plotly.graph_objects.Figure:
    """A panel per setting: its values across, the objective upwards."""
    from plotly.subplots import make_subplots

    keys = list(found.identity["space"])
    rows = math.ceil(len(keys) / PER_ROW)
    whole = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=min(PER_ROW, len(keys)),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=GAP / whole if rows > 1 else 0,
    )
    values = [trial["value"] for trial in found.ranked]
    for place, key in enumerate(keys):
        row, column = place // PER_ROW + 1, place % PER_ROW + 1
        said_of = found.identity["space"][key]
        for trials, marker in (
            (
                found.ranked[1:],
                {"color": COLOURS["light"][0], "symbol": SYMBOLS[0], "size": 7, "opacity": 0.7},
            ),
            (found.ranked[:1], {"color": COLOURS["light"][1], "symbol": "star", "size": 13}),
        ):
            at = [trial["params"][key] for trial in trials]
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "showlegend": False,
                    "x": [shown(value) for value in at] if isinstance(said_of, list) else at,
                    "y": [trial["value"] for trial in trials],
                    "marker": marker,
                    "text": [f"trial {trial['trial']}: {described(trial)}" for trial in trials],
                    "hovertemplate": "%{y:.4g}<br>%{text}<extra></extra>",
                },
                row=row,
                col=column,
            )
        figure.update_xaxes(title_text=key, row=row, col=column, **setting_axis(said_of))
        metric = found.identity["objective"]["metric"]
        figure.update_yaxes(
            title_text=metric if column == 1 else None, row=row, col=column, **value_axis(values)
        )
    figure.update_layout(template=template("light"), height=whole + 90, margin={"t": 20, "b": 70})
    return figure


def parallel_figure(found: Found) -> plotly.graph_objects.Figure:
    """A line per trial across an axis per setting, the objective the first."""
    import plotly.graph_objects as go

    complete = found.ranked[::-1]
    objective = found.identity["objective"]
    values = [trial["value"] for trial in complete]
    logarithmic = value_axis(values).get("type") == "log"
    heights = [math.log10(value) if logarithmic else value for value in values]
    axes: list[dict[str, Any]] = [axis_of(objective["metric"], heights, logarithmic)]
    for key, said_of in found.identity["space"].items():
        at = [trial["params"][key] for trial in complete]
        if isinstance(said_of, list):
            texts = [shown(value) for value in said_of]
            axes.append(
                {
                    "label": key,
                    "values": [texts.index(shown(value)) for value in at],
                    "tickvals": list(range(len(texts))),
                    "ticktext": texts,
                    "range": [-0.2, len(texts) - 0.8],
                }
            )
        else:
            by_log = bool(said_of.get("log"))
            ends = [said_of["low"], said_of["high"]]
            axes.append(
                axis_of(
                    key,
                    [math.log10(value) if by_log else value for value in at],
                    by_log,
                    [math.log10(end) if by_log else end for end in ends],
                )
            )
    # Rank, not value: a single bad trial would make all others one colour.
    shades = [place / max(1, len(complete) - 1) for place in range(len(complete))]
    figure = go.Figure(
        {
            "type": "parcoords",
            "dimensions": axes,
            "labelside": "bottom",
            "line": {
                "color": shades,
                "cmin": 0,
                "cmax": 1,
                "colorscale": [[0, "#b9c6d2"], [1, COLOURS["light"][0]]],
                "showscale": False,
            },
        }
    )
    figure.update_layout(template=template("light"), height=380, margin={"l": 70, "r": 50, "t": 30, "b": 60})
    return figure


def axis_of(
    label: str, heights: Sequence[float], logarithmic: bool, ends: Sequence[float] | None = None
) -> dict[str, Any]:
    """An axis of parallel coordinates with five ticks, told as values where heights are logarithms."""
    low, high = ends or (min(heights), max(heights))
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = [low + (high - low) * part / 4 for part in range(5)]
    return {
        "label": label,
        "values": list(heights),
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [f"{10**tick if logarithmic else tick:.2g}" for tick in ticks],
    }


def described(trial: Mapping[str, Any]) -> str:
    return "<br>".join(f"{key} {shown(value)}" for key, value in trial["params"].items())


def value_axis(values: Sequence[float]) -> dict[str, Any]:
    """Logarithmic where values are positive and span two powers of ten."""
    if values and min(values) > 0 and max(values) > 100 * min(values):
        return {"type": "log", "exponentformat": "power", "dtick": 1}
    return {}


def setting_axis(said_of: Any) -> dict[str, Any]:
    if isinstance(said_of, list):
        order = [shown(value) for value in said_of]
        return {"type": "category", "categoryorder": "array", "categoryarray": order}
    return {"type": "log", "exponentformat": "power"} if said_of.get("log") else {}
