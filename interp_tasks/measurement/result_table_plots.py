"""The figure of the tidy table: values beside their baselines, maps of heads, over the steps of a run; and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.panel_grid import Panel, colour_and_symbol, draw_panels
from circuits.figures.panel_kinds import Series, curve, heatmap, points, rows_to_one_series
from interp_tasks.pages import Figure, number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: The number of steps of a run from which values are lines over them, and the most lines that have bands.
FEWEST_STEPS, MOST_BANDS = 4, 3


def table_figures(frame: pandas.DataFrame, examples: str) -> list[Figure]:
    """Returns the figure of a table, with its heading and how to read it.

    Args:
        examples: on how many it was measured, a sentence.
    """
    has_map, training = single_head_mask(frame).any(), is_drawn_over_steps(frame)
    compared = frame["baseline"].notna().any()
    title = "Every metric, edited and unedited" if compared else "Every metric"
    title = "Effect of each head alone, and of heads together" if has_map else title
    caption = "Filled: edited, with the 95% interval. Open: the unedited model, the baseline."
    caption = caption if compared else "With the 95% interval, where there is one."
    caption += " Small: single draws." if frame["draw"].notna().any() else ""
    if training:
        title, caption = f"{title} over training", "By step. Bands, of a few lines: 95% intervals."
    if has_map:
        caption += (
            " Maps: the effect of one head alone, in colours that mean the same in every map of a metric."
        )
    return [Figure(values_figure(frame), title, f"{caption} {examples}".strip())]


def values_figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each variant's value beside its baseline, per metric, and maps of heads edited one by one.

    Of a run with several steps both are over these: a line for each variant, and a map of heads by step.
    """
    training, names = is_drawn_over_steps(frame), frame["variant"].astype(str)
    if frame.duplicated(["ref", "metric", "variant", "draw"]).any():
        names += "<br>" + frame["intervention"].astype(str)
    frame = frame.assign(line=names)
    frame = frame[frame["draw"].isna()] if training else frame
    is_map, by, panels = single_head_mask(frame), "run" if training else "ref", list[Panel]()
    for metric in map(str, dict.fromkeys(frame["metric"])):
        rows = frame[frame["metric"] == metric]
        maps, rest = rows[is_map[rows.index]], rows[~is_map[rows.index]]
        largest = float(maps["effect"].abs().max())
        for name, part in maps.groupby(by, sort=False):
            title = f"{metric}: effect of each head alone<br>{name!s}"
            panels.append(head_effects_map(part, title, 0.0 if largest != largest else largest, training))
        title = f"{metric}: heads together" if is_map.any() else ""
        if training:
            groups = rest.groupby(by, sort=False)
            panels += [lines_panel(part, metric, f"{title or metric}<br>{name!s}") for name, part in groups]
        else:
            panels.append(values_and_baselines_panel(rest, metric, list(dict.fromkeys(frame["ref"])), title))
    return draw_panels(panels) if training else draw_panels(panels, scattermode="group", scattergap=0.6)


def head_effects_map(rows: pandas.DataFrame, title: str, color_limit: float, training: bool) -> Panel:
    """Returns a map of effects, layer by head, or head by step."""
    down, across = ("line", "step") if training else ("layer", "head")
    cells = rows.pivot(index=down, columns=across, values="effect")
    cells = cells.loc[list(dict.fromkeys(rows[down]))]
    axes: dict[str, Any] = {"across": "step", "down": "head", "row": 22} if training else {}
    text = cells.map(lambda value: "" if value != value else number(value, 3, sign=True))
    return heatmap(cells, title, unit="effect", signed=True, text=text, end=color_limit, **axes)


def values_and_baselines_panel(
    rows: pandas.DataFrame, metric: str, refs: list[Any], title: str = ""
) -> Panel:
    """Returns values with their intervals (filled), single draws (small) and baselines (open) of one metric."""
    series: dict[str, Series] = {}
    for index, ref in enumerate(refs):
        of_ref = rows[rows["ref"] == ref]
        pooled, draws = of_ref[of_ref["draw"].isna()], of_ref[of_ref["draw"].notna()]
        if of_ref.empty:
            continue
        series[str(ref)] = rows_to_one_series(pooled, "line", look=index)
        if len(draws):
            small = {"marker": {"size": 5, "opacity": 0.5}, "showlegend": False}
            of_draws = rows_to_one_series(draws, "line", style=small, look=index)
            series[f"{ref}, single draws"] = of_draws._replace(low=None, high=None)
        # An open mark is larger than the filled one that may lie on it.
        opened = {"symbol": f"{colour_and_symbol(index)[1]}-open", "size": 15, "line": {"width": 2}}
        style = {"marker": opened, "offsetgroup": str(ref), "showlegend": False}
        series[f"{ref}, unedited"] = rows_to_one_series(pooled, "line", "baseline", style=style, look=index)
    return points(series, title, y=metric, log_y=suits_log_axis(rows))


def lines_panel(rows: pandas.DataFrame, metric: str, title: str) -> Panel:
    """Returns a line over steps for the unedited model and for each variant, with bands of a few."""
    rows = rows.sort_values("step", kind="stable")
    lines, known = dict.fromkeys(rows["line"]), rows[rows["baseline"].notna()]
    unedited = {f"{name}, unedited": part for name, part in known.groupby("line", sort=False)}
    if len(known) and (known.groupby("step")["baseline"].nunique() <= 1).all():
        unedited = {"unedited": known.drop_duplicates("step")}
    series = {name: rows_to_one_series(part, "step", "baseline") for name, part in unedited.items()}
    for name in lines:
        part = rows[rows["line"] == name]
        one = rows_to_one_series(part, "step")
        banded = len(lines) <= MOST_BANDS and part[["value_ci_low", "value_ci_high"]].notna().all(axis=None)
        series[str(name)] = one if banded else one._replace(low=None, high=None)
    return curve(series, title, y=metric, log_y=suits_log_axis(rows))


def suits_log_axis(rows: pandas.DataFrame) -> bool:
    """Returns whether values span two powers of ten and no value or interval reaches zero."""
    numbers = rows[["value", "baseline", "value_ci_low"]].to_numpy(dtype=float)
    there = numbers[numbers == numbers]
    return bool(there.size and there.min() > 0 and there.max() > 100 * there.min())


def single_head_mask(frame: pandas.DataFrame) -> pandas.Series:
    """Returns rows of the experiment ``heads`` that are about one head alone, and no group that happens to be one."""
    alone = frame["layer"].astype("string") + "." + frame["head"].astype("string")
    return (frame["experiment"] == "heads") & (frame["variant"] == alone).fillna(False)


def is_drawn_over_steps(frame: pandas.DataFrame) -> bool:
    """Returns whether a run has so many steps that values are drawn as lines over them."""
    checkpoints = frame.drop_duplicates("ref")
    if checkpoints[["run", "step"]].isna().any(axis=None) or checkpoints.duplicated(["run", "step"]).any():
        return False
    return bool((checkpoints["run"].value_counts() >= FEWEST_STEPS).any())
