"""Figures of the tidy table, in the palette of the pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import Scheme, mark, mixed, readable_on, template
from circuits.figures.style import POWERS
from interp_tasks.pages import signed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of panels of points and of lines, of a row of a map and of one over steps, between panels, between
#: panels with titles.
POINTS, LINES, MAP_ROW, STEPS_ROW, GAP, GAP_TITLED = 190, 240, 36, 22, 38, 90
#: Pixels: the lowest colour bar with its title, and the room beside the panels for one.
LOWEST_BAR, BAR = 110, 80
#: The number of steps of a run from which values are lines over them.
FEWEST_STEPS = 4
#: The most lines of a panel beside the unedited model's, rows of a map over steps, and columns of it with numbers.
MOST_LINES, MOST_ROWS, NUMBERED = 6, 32, 12
#: The most lines that have bands: more of them hide each other.
MOST_BANDS = 3


@dataclass(frozen=True)
class Panel:
    """One row of a figure: its height, and what draws it, given the figure and the row."""

    height: int
    draw: Callable[[Any, int], None]
    title: str = ""


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each variant's value beside its baseline, per metric, and maps of heads edited one by one.

    Of runs with several steps both are over these.
    """
    if over_training(frame):
        return training_figure(frame)
    maps, points = frame[in_map(frame)], frame[~in_map(frame)]
    panels: list[Panel] = []
    for metric in dict.fromkeys(frame["metric"]):
        of_metric = maps[maps["metric"] == metric]
        largest = largest_effect(of_metric)
        for ref in dict.fromkeys(of_metric["ref"]):
            effects = of_metric[of_metric["ref"] == ref].pivot(index="layer", columns="head", values="effect")
            panels.append(map_panel(effects, str(ref), str(metric), largest))
        panels.append(
            points_panel(points[points["metric"] == metric], str(metric), list(dict.fromkeys(frame["ref"])))
        )
    return stacked_panels(panels, ragged=len(maps) > 0)


def over_training(frame: pandas.DataFrame) -> bool:
    """Returns whether a run has so many steps that values are drawn as lines over them."""
    checkpoints = frame.drop_duplicates("ref")
    if checkpoints[["run", "step"]].isna().any(axis=None) or checkpoints.duplicated(["run", "step"]).any():
        return False
    return bool((checkpoints["run"].value_counts() >= FEWEST_STEPS).any())


def training_figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws lines over steps, and maps of heads by step, a panel for each metric and run."""
    maps, lines = training_rows(frame)
    shown, rows = strongest(lines, MOST_LINES), strongest(maps, MOST_ROWS)
    runs = list(dict.fromkeys(frame["run"]))
    ragged = len(maps) > 0 or len(runs) > 1
    panels: list[Panel] = []
    for metric in dict.fromkeys(frame["metric"]):
        of_metric = maps[(maps["metric"] == metric) & maps["line"].isin(rows)]
        for run in runs:
            effects = of_metric[of_metric["run"] == run].pivot(index="line", columns="step", values="effect")
            if len(effects):
                effects = effects.loc[[row for row in rows if row in effects.index]]
                panels.append(map_panel(effects, str(run), str(metric), largest_effect(of_metric)))
            part = lines[(lines["metric"] == metric) & (lines["run"] == run)]
            if len(part):
                title = f"{metric}: heads together" if len(maps) else str(metric)
                panels.append(lines_panel(part, shown, str(metric), f"{title}<br>{run}", ragged))
    # Lines would be moved aside where points stand side by side.
    return stacked_panels(panels, ragged=ragged, across="step").update_layout(scattermode="overlay")


def training_rows(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Returns the rows of maps and those of lines over steps, without single draws; column ``line`` names the line."""
    pooled = frame[frame["draw"].isna()].reset_index(drop=True)
    several = pooled.duplicated(["ref", "metric", "variant"]).any()
    line = pooled["variant"].astype(str)
    pooled = pooled.assign(line=line + ", " + pooled["intervention"].astype(str) if several else line)
    return pooled[in_map(pooled)], pooled[~in_map(pooled)]


def strongest(rows: pandas.DataFrame, most: int) -> list[str]:
    """Returns the lines with the largest effects, as a share of the largest on that metric, in the table's order."""
    # Without an unedited model, such as a count, a value is compared with that of the first step.
    first = rows.sort_values("step").groupby(["run", "line", "metric"])["value"].transform("first")
    size = rows["effect"].fillna(rows["value"] - first).abs().astype(float)
    share = size / size.groupby(rows["metric"]).transform("max").replace(0, 1)
    chosen = share.groupby(rows["line"]).max().nlargest(most).index
    return [name for name in dict.fromkeys(rows["line"]) if name in chosen]


def reading(frame: pandas.DataFrame) -> list[str]:
    """Returns where the intervals of a figure over training are, and of how many variants it shows some only."""
    maps, lines = training_rows(frame)
    has_bands = lines["line"].nunique() <= MOST_BANDS
    found = [
        "Bands: 95% intervals of the edited models."
        if has_bands
        else "Files and the table have the 95% intervals."
    ]
    for rows, most, kind in ((maps, MOST_ROWS, "heads"), (lines, MOST_LINES, "variants")):
        if (count := rows["line"].nunique()) > most:
            found.append(
                f"Of {count} {kind} the {most} with the largest effects at any step; the table has all."
            )
    return found


def lines_panel(part: pandas.DataFrame, names: list[str], metric: str, title: str, ragged: bool) -> Panel:
    """Returns a panel with a line over steps for the unedited model and for each variant of ``names``, with bands."""

    def draw(figure: Any, row: int) -> None:
        """Draws the lines by ``circuits.figures.curves``."""
        from circuits.figures.curves import curve

        chosen = part[part["line"].isin(names)].sort_values("step", kind="stable")
        series, texts = baselines(chosen), {}
        for name in names:
            rows = chosen[chosen["line"] == name]
            bounds = [rows[bound].to_numpy(dtype=float) for bound in ("value_ci_low", "value_ci_high")]
            known = len(names) <= MOST_BANDS and rows[["value_ci_low", "value_ci_high"]].notna().all(
                axis=None
            )
            series[name] = (
                rows["step"].to_numpy(),
                rows["value"].to_numpy(dtype=float),
                *(bounds if known else ()),
            )
            texts[name] = hover_texts(rows)
        drawn = curve(series, log_y=scale(chosen) == "log")
        seen = {trace.name for trace in figure.data}
        for trace in drawn.data:
            if trace.name in texts:
                trace.update(
                    customdata=texts[trace.name],
                    hovertemplate=f"step %{{x}}<br>%{{customdata}}<extra>{trace.name}</extra>",
                )
            if trace.showlegend is not False:
                trace.showlegend = trace.name not in seen
            figure.add_trace(trace, row=row, col=1)
        axis = drawn.layout.yaxis.to_plotly_json() | {"title": {"text": metric}}
        figure.update_yaxes(axis, row=row, col=1)
        if ragged:
            figure.update_xaxes(title_text="step", row=row, col=1)

    return Panel(LINES, draw, title)


def baselines(part: pandas.DataFrame) -> dict[str, Any]:
    """Returns the steps and values of the unedited model; by variant, where its value is another one for each."""
    known = part[part["baseline"].notna()]
    if known.empty:
        return {}
    if (known.groupby("step")["baseline"].nunique() == 1).all():
        lines = {"unedited": known.drop_duplicates("step")}
    else:
        lines = {f"{name}, unedited": rows for name, rows in known.groupby("line", sort=False)}
    return {
        name: (rows["step"].to_numpy(), rows["baseline"].to_numpy(dtype=float))
        for name, rows in lines.items()
    }


def in_map(frame: pandas.DataFrame) -> pandas.Series:
    """Returns rows of the experiment ``heads`` that are about one head alone, and no group that happens to be one."""
    return (frame["experiment"] == "heads") & (
        frame["variant"] == frame["layer"].astype("string") + "." + frame["head"].astype("string")
    ).fillna(False)


def stacked_panels(
    panels: list[Panel], *, ragged: bool, across: str = "variant"
) -> plotly.graph_objects.Figure:
    """Stacks panels, each with its height; with ``ragged`` each has a title and an x axis of its own.

    Args:
        across: the title of the x axis that they share otherwise.
    """
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
    has_maps = any(trace.type == "heatmap" for trace in figure.data)
    figure.update_layout(
        # Points of different checkpoints stand side by side, not on top of each other.
        scattermode="group",
        scattergap=0.6,
        height=top + total_height + bottom,
        margin={"t": top, "b": bottom} | ({"r": BAR} if has_maps else {}),
        # At the same distance however tall the figure is.
        legend={"y": 1 + (45 if ragged else 12) / total_height},
        template=template("light"),
    )
    figure.update_annotations(font_size=13, x=0, xanchor="left", align="left")
    if not ragged:
        figure.update_xaxes(title_text=across, row=len(panels), col=1)
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
        powers = POWERS | {"dtick": powers_apart(part)} if axis == "log" else {}
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
        # Errors near 0 lie on the edge of the panel.
        "cliponaxis": False,
        "hovertemplate": f"{ref}<br>%{{x}}<br>%{{customdata}}<extra></extra>",
    }
    if kind == "edited":
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": (part["value_ci_high"] - part["value"]).tolist(),
            "arrayminus": (part["value"] - part["value_ci_low"]).tolist(),
        }
    trace["customdata"] = hover_texts(part, "draw " if kind == "draws" else "")
    return trace


def hover_texts(part: pandas.DataFrame, draw: str = "") -> list[str]:
    """Returns each row's value and effect with their intervals, after the number of its draw where that has a name."""
    return [
        (f"{draw}{row['draw']}: " if draw else "")
        + f"value {row['value']:.6g} [{row['value_ci_low']:.4g}, {row['value_ci_high']:.4g}]"
        f"<br>unedited {row['baseline']:.6g}<br>effect {row['effect']:+.4g} "
        f"[{row['effect_ci_low']:.4g}, {row['effect_ci_high']:.4g}]"
        for row in part.to_dict("records")
    ]


def scale(part: pandas.DataFrame) -> str:
    """Returns "log" where values span two powers of ten and no value or interval reaches zero."""
    smallest, largest = extremes(part)
    return "log" if smallest > 0 and largest > 100 * smallest else "linear"


def powers_apart(part: pandas.DataFrame) -> int:
    """Returns the number of powers of ten between the ticks of a logarithmic axis, so that they do not crowd."""
    smallest, largest = extremes(part)
    return max(1, round(math.log10(largest / smallest) / 4))


def extremes(part: pandas.DataFrame) -> tuple[float, float]:
    numbers = part[["value", "baseline", "value_ci_low"]].to_numpy(dtype=float)
    return float(numbers.min()), float(numbers.max())


def largest_effect(part: pandas.DataFrame) -> float:
    effects = part["effect"].abs().dropna()
    return float(effects.max()) if len(effects) else 0.0


def map_panel(effects: pandas.DataFrame, name: str, metric: str, largest: float) -> Panel:
    """Returns a panel with a heatmap of each head's effect on one metric; zero is blank.

    Args:
        effects: of one checkpoint by layer and head, or of one run by head (column ``line``) and step.
        name: of the checkpoint or the run.
    """
    over_steps = effects.columns.name == "step"
    place = "head %{y}, step %{x}" if over_steps else "head %{y}.%{x}"
    row_height = STEPS_ROW if over_steps else MAP_ROW

    def draw(figure: Any, row: int) -> None:
        """Draws effects as a map into a panel."""
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
                "colorbar": colour_bar(figure, row, row_height * len(effects.index), largest),
                "hovertemplate": f"{name}<br>{place}<br>{metric} %{{z:+.4g}}<extra></extra>",
                "xgap": 2,
                "ygap": 2,
            },
            row=row,
            col=1,
        )
        if not over_steps or len(effects.columns) <= NUMBERED:
            figure.add_trace(numbers_of(effects, largest), row=row, col=1)
        across, down = ("step", "head") if over_steps else ("head", "layer")
        for update, title in ((figure.update_xaxes, across), (figure.update_yaxes, down)):
            update(type="category", title={"text": title, "standoff": 4}, showgrid=False, row=row, col=1)
        figure.update_yaxes(autorange="reversed", row=row, col=1)

    return Panel(row_height * len(effects.index), draw, f"{metric}: effect of each head alone<br>{name}")


def colour_bar(figure: Any, row: int, height: int, largest: float) -> dict[str, Any]:
    """Returns the scale beside a map of a height in pixels: the ends of its colours, and what they are."""
    bottom, top = figure.get_subplot(row, 1).yaxis.domain
    ends = [-largest, 0.0, largest] if largest else [0.0]
    return {
        "title": {"text": "effect", "font": {"size": 11}},
        "tickvals": ends,
        "ticktext": [signed(end) for end in ends],
        "tickfont": {"size": 10},
        "y": (bottom + top) / 2,
        # A low one would have no room for its numbers; beside it there is nothing.
        "len": (top - bottom) * max(1.0, LOWEST_BAR / height),
        "thickness": 10,
        "outlinewidth": 0,
    }


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
