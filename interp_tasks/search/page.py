"""The page of a search, and its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SYMBOLS, template
from interp_tasks.pages import Column, Figure, Page, Section, Table, Text, number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


PANEL, GAP, PER_ROW = 220, 90, 3


#: A trial as ``SearchResult.trials`` has it.
Trial = Mapping[str, Any]


def page(
    identity: Mapping[str, Any],
    ranked: Sequence[Trial],
    frame: pandas.DataFrame,
    importances: Mapping[str, float],
    summary: str,
    versions: Mapping[str, str],
) -> Page:
    """Returns importances, the course of the search, the objective against every setting, and all trials.

    Args:
        identity: what was searched, as ``search.json`` has it.
        ranked: complete trials, the best first.
        frame: a row per trial, with a column per setting.
        importances: setting -> share of the variance of the objective; may be empty.
        summary: how many trials there are of each kind.
    """
    objective, space = identity["objective"], identity["space"]
    sections: list[Section] = [Text(introduction(summary, objective, ranked))]
    if importances:
        sections.append(
            Figure(
                importance_figure(importances),
                "Importance",
                "Share of the objective's variance over the space that fANOVA lays to each setting, from the trials "
                "there are; few trials tell little.",
            )
        )
    if ranked:
        sections += [
            Figure(
                history_figure(objective, ranked),
                "Course of the search",
                f"Each trial's {objective['metric']}, and the best until then.",
            ),
            Figure(
                slice_figure(objective, space, ranked),
                f"{objective['metric']} against every setting",
                "A point per trial, the best one as a star.",
            ),
            Figure(
                parallel_figure(objective, space, ranked),
                "Trials as lines",
                "A line per complete trial.",
            ),
        ]
    columns = [
        Column("trial", "trial"),
        Column(objective["metric"], "value"),
        *(Column(key, key, lambda row, key=key: shown(row[key])) for key in space),  # type: ignore[misc]
        Column("state", "state"),
        Column("reason", "reason", lambda row: str(row["reason"] or ""), sentences=True),
    ]
    sections.append(Table(frame, "Trials", "The best first.", columns, name="trials"))
    title = f"Search: {identity['task']}, {identity['preset']}"
    return Page(title, sections, identity, versions)


def introduction(summary: str, objective: Mapping[str, Any], ranked: Sequence[Trial]) -> str:
    """Describes the objective, and the best trial with its settings."""
    aim = "lowest" if objective["direction"] == "minimize" else "highest"
    text = (
        f"{summary}. Wanted is the {aim} {objective['metric']} on validation examples, as the mean of the last "
        f"{objective['last']} evaluations."
    )
    if ranked:
        best = ranked[0]
        settings = ", ".join(f"{key} {shown(value)}" for key, value in best["params"].items())
        text += f"\n\nBest: trial {best['trial']} with {number(best['value'])}: {settings}."
    return text


def shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def importance_figure(shares: Mapping[str, float]) -> plotly.graph_objects.Figure:
    """Returns a bar per setting, the largest on top."""
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
    figure.update_layout(template=template("light"), height=130 + 34 * len(keys), margin={"t": 20, "b": 70})
    return figure


def history_figure(objective: Mapping[str, Any], ranked: Sequence[Trial]) -> plotly.graph_objects.Figure:
    """Draws the value of every trial by number, and the best so far."""
    import plotly.graph_objects as go

    complete = sorted(ranked, key=lambda trial: trial["trial"])
    pick = min if objective["direction"] == "minimize" else max
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
    figure.update_yaxes(title_text=objective["metric"], **value_axis(values))
    figure.update_layout(template=template("light"), height=360)
    return figure


def slice_figure(
    objective: Mapping[str, Any], space: Mapping[str, Any], ranked: Sequence[Trial]
) -> plotly.graph_objects.Figure:
    """Draws a panel per setting: its values across, the objective upwards."""
    from plotly.subplots import make_subplots

    keys = list(space)
    rows = math.ceil(len(keys) / PER_ROW)
    total_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=min(PER_ROW, len(keys)),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=GAP / total_height if rows > 1 else 0,
    )
    values = [trial["value"] for trial in ranked]
    for index, key in enumerate(keys):
        row, column = index // PER_ROW + 1, index % PER_ROW + 1
        values_of = space[key]
        for trials, marker in (
            (
                ranked[1:],
                {"color": COLOURS["light"][0], "symbol": SYMBOLS[0], "size": 7, "opacity": 0.7},
            ),
            (ranked[:1], {"color": COLOURS["light"][1], "symbol": "star", "size": 13}),
        ):
            at = [trial["params"][key] for trial in trials]
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "showlegend": False,
                    "x": [shown(value) for value in at] if isinstance(values_of, list) else at,
                    "y": [trial["value"] for trial in trials],
                    "marker": marker,
                    "text": [f"trial {trial['trial']}: {described(trial)}" for trial in trials],
                    "hovertemplate": "%{y:.4g}<br>%{text}<extra></extra>",
                },
                row=row,
                col=column,
            )
        figure.update_xaxes(title_text=key, row=row, col=column, **setting_axis(values_of))
        metric = objective["metric"]
        figure.update_yaxes(
            title_text=metric if column == 1 else None, row=row, col=column, **value_axis(values)
        )
    figure.update_layout(template=template("light"), height=total_height + 90, margin={"t": 20, "b": 70})
    return figure


def parallel_figure(
    objective: Mapping[str, Any], space: Mapping[str, Any], ranked: Sequence[Trial]
) -> plotly.graph_objects.Figure:
    """Draws a line per complete trial across an upright axis per setting, the objective the first.

    The best third stands out. Plain lines: plotly's own parallel coordinates need WebGL.
    """
    import plotly.graph_objects as go

    scales = [
        value_scale(objective["metric"], [trial["value"] for trial in ranked]),
        *(setting_scale(key, values_of) for key, values_of in space.items()),
    ]
    third = math.ceil(len(ranked) / 3)
    blue, orange, _, _, _, _, grey = COLOURS["light"]
    figure = go.Figure()
    for name, trials, line, opacity in (
        ("other trials", ranked[third:], {"color": grey, "width": 1}, 0.45),
        ("best third", ranked[1:third], {"color": blue, "width": 1.5}, 0.9),
        ("best", ranked[:1], {"color": orange, "width": 3}, 1.0),
    ):
        heights: list[float | None] = []
        texts: list[str] = []
        for trial in trials:
            values = [trial["value"], *(trial["params"][key] for key in space)]
            heights += [*(scale.height(value) for scale, value in zip(scales, values, strict=True)), None]
            label = f"trial {trial['trial']}: {number(trial['value'])}<br>{described(trial)}"
            texts += [label] * (len(scales) + 1)
        if trials:
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": [*range(len(scales)), None] * len(trials),
                    "y": heights,
                    "line": line,
                    "opacity": opacity,
                    "text": texts,
                    "hovertemplate": "%{text}<extra></extra>",
                }
            )
    ticks = [(column, height, text) for column, scale in enumerate(scales) for height, text in scale.ticks]
    figure.add_trace(
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [column for column, _, _ in ticks],
            "y": [height for _, height, _ in ticks],
            "text": [text for _, _, text in ticks],
            "textposition": "middle left",
            "marker": {"symbol": "line-ew-open", "size": 9, "color": grey},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    )
    figure.update_xaxes(
        tickvals=list(range(len(scales))),
        ticktext=[scale.label.replace(".", ".<br>") for scale in scales],
        range=[-0.5, len(scales) - 0.9],
    )
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    figure.update_layout(template=template("light"), height=420)
    return figure


@dataclass(frozen=True)
class Scale:
    """An upright axis from 0 to 1: the height of a value, and ticks as (height, text)."""

    label: str
    height: Callable[[Any], float]
    ticks: Sequence[tuple[float, str]]


def value_scale(label: str, values: Sequence[float]) -> Scale:
    return numbers_scale(label, min(values), max(values), value_axis(values).get("type") == "log")


def setting_scale(key: str, values_of: Any) -> Scale:
    if not isinstance(values_of, list):
        return numbers_scale(key, values_of["low"], values_of["high"], bool(values_of.get("log")))
    texts = [shown(value) for value in values_of]
    return Scale(
        key,
        lambda value: texts.index(shown(value)) / (len(texts) - 1),
        [(index / (len(texts) - 1), text) for index, text in enumerate(texts)],
    )


def numbers_scale(label: str, low: float, high: float, logarithmic: bool) -> Scale:
    """Returns five ticks between two numbers, at equal heights."""

    def position(value: float) -> float:
        return math.log10(value) if logarithmic else value

    start, length = position(low), position(high) - position(low)

    def height(value: Any) -> float:
        return (position(value) - start) / length if length else 0.5

    parts = [part / 4 for part in range(5)] if length else [0.5]
    at = [start + part * length for part in parts]
    return Scale(
        label,
        height,
        [(part, f"{10**tick if logarithmic else tick:.3g}") for part, tick in zip(parts, at, strict=True)],
    )


def described(trial: Mapping[str, Any]) -> str:
    return "<br>".join(f"{key} {shown(value)}" for key, value in trial["params"].items())


def value_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns an axis, logarithmic where values are positive and span two powers of ten."""
    if values and min(values) > 0 and max(values) > 100 * min(values):
        return {"type": "log", "exponentformat": "power", "dtick": 1}
    return {}


def setting_axis(values_of: Any) -> dict[str, Any]:
    """Returns the axis of a setting: its values in order, or a logarithmic one; empty for what plotly does anyway."""
    if isinstance(values_of, list):
        order = [shown(value) for value in values_of]
        # Values that were not tried have their place too.
        return {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": order,
            "range": [-0.5, len(order) - 0.5],
        }
    if not values_of.get("log"):
        return {}
    # Ticks at 1, 2 and 5, or at powers of ten where there are many.
    wide = values_of["high"] > 300 * values_of["low"]
    return {"type": "log", "exponentformat": "power", "dtick": 1 if wide else "D2"}
