"""The figure of ``primes``: shares by tensor and answer, and a map for each kind of removal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, template
from interp_tasks.experiments._primes.table import ANSWER, DIGIT, DIGITS, SHARE, TOGETHER

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


#: Heights in pixels: of a panel of bars, of a map, and between panels with their titles.
BARS, MAP, GAP = 230, 380, 110
TOP, BOTTOM = 110, 150
#: Up to this many answers the cells of a map say their numbers.
NUMBERED = 8


#: Title -> the share of the accuracy above chance that is lost, and the same under the control: a row per answer that
#: was removed, a column per answer that was judged.
Maps = Mapping[str, "tuple[pandas.DataFrame, pandas.DataFrame]"]


def figure(frame: pandas.DataFrame, maps: Mapping[str, Maps]) -> plotly.graph_objects.Figure:
    """Draws for every checkpoint its shares, then maps of accuracy lost, without each answer and under the control.

    Args:
        frame: the tidy table.
        maps: REF -> its maps.
    """
    from plotly.subplots import make_subplots

    shares = frame[(frame["metric"] == SHARE) & (frame["variant"] != TOGETHER)]
    shares = shares[shares["intervention"].str.partition(": ")[0].isin([DIGIT, DIGITS, ANSWER])]
    panels: list[tuple[int, str, Any]] = []
    for ref in dict.fromkeys(frame["ref"]):
        for tensor, part in shares[shares["ref"] == ref].groupby(
            shares["intervention"].str.partition(": ")[2], sort=False
        ):
            panels.append((BARS, f"functions of the answer and of the digits in {tensor}<br>{ref}", part))
        panels += [(MAP, f"{title}<br>{ref}", pair) for title, pair in maps.get(ref, {}).items()]
    total_height = sum(height for height, _, _ in panels) + GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=2,
        row_heights=[height for height, _, _ in panels],
        vertical_spacing=GAP / total_height if len(panels) > 1 else 0,
        horizontal_spacing=0.14,
        specs=[[{"colspan": 2}, None] if height == BARS else [{}, {}] for height, _, _ in panels],
        subplot_titles=[
            title
            for height, title, _ in panels
            for title in (
                [title] if height == BARS else [title, f"as much at random<br>{title.split('<br>')[1]}"]
            )
        ],
    )
    for row, (height, _, shown) in enumerate(panels, start=1):
        if height == BARS:
            bars(figure, row, shown)
        else:
            for column, lost in enumerate(shown, start=1):
                heatmap(figure, row, column, lost)
    figure.update_layout(
        height=TOP + total_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        barmode="group",
        legend={"y": 1 + 50 / total_height},
        coloraxis={
            "autocolorscale": True,
            "cmin": 0,
            "cmax": 1,
            # Below the maps: beside them it would take width from all panels.
            "colorbar": {
                "title": {"text": "share of accuracy above chance lost", "side": "top"},
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yanchor": "top",
                "ypad": 60,
                "len": 0.6,
                "thickness": 12,
            },
        },
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure


def bars(figure: Any, row: int, part: pandas.DataFrame) -> None:
    """Adds a bar per answer of one tensor, for functions of the digits and of the answer, with their controls."""
    legend_names = {trace.name for trace in figure.data}
    # Of embeddings there is one digit, of activations all of them: the same in one colour.
    names = {DIGIT: "digits mod q", DIGITS: "digits mod q", ANSWER: "the answer"}
    for kind, rows in part.groupby(part["intervention"].str.partition(": ")[0], sort=False):
        colour = COLOURS["light"][0 if kind == ANSWER else 1]
        name = names[str(kind)]
        x = [modulus(name) for name in rows["variant"]]
        figure.add_trace(
            {
                "type": "bar",
                "name": name,
                "legendgroup": name,
                "showlegend": name not in legend_names,
                "offsetgroup": name,
                "x": x,
                "y": rows["value"].tolist(),
                "marker": {"color": colour},
                "customdata": rows["baseline"].tolist(),
                "hovertemplate": "modulo %{x}: %{y:.4f}<br>shuffled: %{customdata:.4f}<extra>"
                + name
                + "</extra>",
            },
            row=row,
            col=1,
        )
        figure.add_trace(
            {
                "type": "bar",
                "name": f"{name}, digits shuffled",
                "legendgroup": f"{name} shuffled",
                "showlegend": f"{name}, digits shuffled" not in legend_names,
                "offsetgroup": f"{name} shuffled",
                "x": x,
                "y": rows["baseline"].tolist(),
                "marker": {"color": "rgba(0,0,0,0)", "line": {"color": colour, "width": 1.5}},
                "hovertemplate": "modulo %{x}: %{y:.4f}<extra>shuffled</extra>",
            },
            row=row,
            col=1,
        )
    figure.update_xaxes(type="category", title={"text": "answer modulo", "standoff": 4}, row=row, col=1)
    figure.update_yaxes(title_text="share of variance", rangemode="tozero", row=row, col=1)


def heatmap(figure: Any, row: int, column: int, lost: pandas.DataFrame) -> None:
    """Adds a map: answers that were removed down, answers that are judged across."""
    names = [modulus(name) for name in lost.columns]
    cells = [[None if value != value else float(value) for value in line] for line in lost.to_numpy()]
    figure.add_trace(
        {
            "type": "heatmap",
            "x": names,
            "y": names,
            "z": cells,
            "coloraxis": "coloraxis",
            **({"texttemplate": "%{z:.2f}"} if len(names) <= NUMBERED else {}),
            "hovertemplate": "without modulo %{y}: modulo %{x} loses %{z:.3f}<extra></extra>",
        },
        row=row,
        col=column,
    )
    figure.update_xaxes(
        type="category",
        title_text="answer judged, modulo",
        tickangle=-90 if len(names) > NUMBERED else 0,
        row=row,
        col=column,
    )
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        title_text="answer taken away, modulo" if column == 1 else None,
        row=row,
        col=column,
    )


def modulus(answer: str) -> str:
    """Returns what stands for an answer on an axis whose title says "modulo"."""
    return answer.removeprefix("mod_")
