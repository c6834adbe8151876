"""The figure of the tidy table: values beside their baselines, maps of heads, over the steps of a run; and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw, mark
from circuits.figures.panels import Series, curve, heat, of_rows, points
from interp_tasks.pages import Figure, signed

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

    from interp_tasks.measurement.run_logs import Curve

#: The number of steps of a run from which values are lines over them.
FEWEST_STEPS = 4
#: The most lines of a panel beside the unedited model's, rows of a map over steps, and lines that have bands: more of
#: them hide each other.
MOST_LINES, MOST_ROWS, MOST_BANDS = 6, 32, 3


def figures(frame: pandas.DataFrame, examples: str) -> list[Figure]:
    """Returns the figure of a table, with its heading and how to read it.

    Args:
        examples: on how many it was measured, a sentence.
    """
    lines, has_map = over_training(frame), in_map(frame).any()
    heading = (
        "Effect of each head alone, and of heads together" if has_map else "Every metric, edited and unedited"
    )
    if lines:
        names = {str(name) for name in frame["run"].unique()}
        caption = f"Steps{f' of {names.pop()}' if len(names) == 1 else ''}, edited and unedited. {shown_part(frame)}"
    else:
        caption = "Filled: edited, with the 95% interval. Open: the unedited model, the baseline."
        caption += " Small: single draws." if frame["draw"].notna().any() else ""
    if has_map:
        caption += (
            " Maps: the effect of one head alone, in colours that mean the same in every map of a metric."
        )
    title = heading + (" over training" if lines else "")
    return [Figure(figure(frame), title, f"{caption} {examples}".strip())]


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each variant's value beside its baseline, per metric, and maps of heads edited one by one.

    Of runs with several steps both are over these.
    """
    if over_training(frame):
        return training_figure(frame)
    maps, rest = frame[in_map(frame)], frame[~in_map(frame)]
    refs = list(dict.fromkeys(frame["ref"]))
    panels: list[Panel] = []
    for metric in dict.fromkeys(frame["metric"]):
        of_metric = maps[maps["metric"] == metric]
        for ref in dict.fromkeys(of_metric["ref"]):
            effects = of_metric[of_metric["ref"] == ref].pivot(index="layer", columns="head", values="effect")
            panels.append(effects_map(effects, f"{metric}: effect of each head alone<br>{ref}", of_metric))
        title = f"{metric}: heads together" if len(maps) else ""
        panels.append(points_panel(rest[rest["metric"] == metric], str(metric), refs, title))
    return draw(panels, scattermode="group", scattergap=0.6)


def effects_map(effects: pandas.DataFrame, title: str, of_metric: pandas.DataFrame, **options: Any) -> Panel:
    """Returns a map of effects, whose colours are the same in all maps of a metric."""
    largest = float(of_metric["effect"].abs().max())
    text = effects.map(lambda value: "" if value != value else signed(value))
    end = 0.0 if largest != largest else largest
    return heat(effects, title, unit="effect", signed=True, text=text, end=end, **options)


def points_panel(rows: pandas.DataFrame, metric: str, refs: list[Any], title: str = "") -> Panel:
    """Returns values with their intervals (filled), single draws (small) and baselines (open) of one metric."""
    several = rows.duplicated(["ref", "variant", "draw"]).any()
    names = rows["variant"].astype(str) + ("<br>" + rows["intervention"].astype(str) if several else "")
    rows = rows.assign(named=names)
    series: dict[str, Series] = {}
    for index, ref in enumerate(refs):
        of_ref = rows[rows["ref"] == ref]
        pooled, draws = of_ref[of_ref["draw"].isna()], of_ref[of_ref["draw"].notna()]
        if of_ref.empty:
            continue
        series[str(ref)] = of_rows(pooled, "named", hover=hover_texts(pooled), look=index)
        if len(draws):
            small = {"marker": {"size": 5, "opacity": 0.5}, "showlegend": False}
            values = draws["named"].tolist(), draws["value"].tolist()
            series[f"{ref}, single draws"] = Series(
                *values, hover=hover_texts(draws), style=small, look=index
            )
        # An open mark is larger than the filled one that may lie on it.
        opened = {"symbol": f"{mark(index)[1]}-open", "size": 15, "line": {"width": 2}}
        style = {"marker": opened, "offsetgroup": str(ref), "showlegend": False}
        values = pooled["named"].tolist(), pooled["baseline"].tolist()
        series[f"{ref}, unedited"] = Series(*values, hover=hover_texts(pooled), style=style, look=index)
    return points(series, title, y=metric, log_y=is_log(rows))


def hover_texts(rows: pandas.DataFrame) -> list[str]:
    """Returns each row's value and effect with their intervals."""
    return [
        f"value {row['value']:.6g} [{row['value_ci_low']:.4g}, {row['value_ci_high']:.4g}]"
        f"<br>unedited {row['baseline']:.6g}<br>effect {row['effect']:+.4g} "
        f"[{row['effect_ci_low']:.4g}, {row['effect_ci_high']:.4g}]"
        for row in rows.to_dict("records")
    ]


def is_log(rows: pandas.DataFrame) -> bool:
    """Returns whether values span two powers of ten and no value or interval reaches zero."""
    numbers = rows[["value", "baseline", "value_ci_low"]].to_numpy(dtype=float)
    return bool(numbers.size and numbers.min() > 0 and numbers.max() > 100 * numbers.min())


def in_map(frame: pandas.DataFrame) -> pandas.Series:
    """Returns rows of the experiment ``heads`` that are about one head alone, and no group that happens to be one."""
    alone = frame["layer"].astype("string") + "." + frame["head"].astype("string")
    return (frame["experiment"] == "heads") & (frame["variant"] == alone).fillna(False)


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
    panels: list[Panel] = []
    for (metric, run), part in frame.groupby(["metric", "run"], sort=False):
        of_metric = maps[(maps["metric"] == metric) & maps["line"].isin(rows)]
        effects = of_metric[of_metric["run"] == run].pivot(index="line", columns="step", values="effect")
        if len(effects):
            effects = effects.loc[[row for row in rows if row in effects.index]]
            title = f"{metric}: effect of each head alone<br>{run}"
            panels.append(effects_map(effects, title, of_metric, across="step", down="head", row=22))
        part = lines[(lines["metric"] == metric) & (lines["run"] == run)]
        if len(part):
            title = f"{metric}: heads together<br>{run}" if len(maps) else f"{metric}<br>{run}"
            panels.append(lines_panel(part, shown, str(metric), title))
    return draw(panels)


def lines_panel(rows: pandas.DataFrame, names: list[str], metric: str, title: str) -> Panel:
    """Returns a line over steps for the unedited model and for each variant of ``names``, with bands of a few."""
    chosen = rows[rows["line"].isin(names)].sort_values("step", kind="stable")
    known = chosen[chosen["baseline"].notna()]
    if (known.groupby("step")["baseline"].nunique() <= 1).all():
        unedited = {"unedited": known.drop_duplicates("step")} if len(known) else {}
    else:
        unedited = {f"{name}, unedited": part for name, part in known.groupby("line", sort=False)}
    series = {name: of_rows(part, "step", "baseline") for name, part in unedited.items()}
    for name in names:
        part = chosen[chosen["line"] == name]
        one = of_rows(part, "step", hover=hover_texts(part))
        banded = len(names) <= MOST_BANDS and part[["value_ci_low", "value_ci_high"]].notna().all(axis=None)
        series[name] = one if banded else one._replace(low=None, high=None)
    return curve(series, title, y=metric, log_y=is_log(chosen))


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


def shown_part(frame: pandas.DataFrame) -> str:
    """Returns which lines and rows of maps a figure over training shows, where it has no room for all."""
    maps, lines = training_rows(frame)
    left = [
        f"Of {rows['line'].nunique()} {kind} the {most} with the largest effects at any step; the table has all."
        for rows, most, kind in ((maps, MOST_ROWS, "heads"), (lines, MOST_LINES, "variants"))
        if rows["line"].nunique() > most
    ]
    return " ".join(["Bands, of a few lines: 95% intervals.", *left])


def curves_panel(
    curves: Mapping[str, Curve], y: str, levels: Mapping[str, float] | None = None, title: str = ""
) -> Panel:
    """Returns a line over steps for each curve; what lies between onset and end is bold.

    Args:
        levels: of the plateaus by theory, by the name of the curve.
    """
    series: dict[str, Series] = {}
    for index, (name, one) in enumerate(curves.items()):
        thin = {"mode": "lines", "line": {"width": 1.3}}
        series[name] = Series(one.steps.tolist(), one.values.tolist(), style=thin, look=index)
        if one.drop is not None:
            inside = (one.steps >= one.drop.onset) & (one.steps <= one.drop.end)
            bold = {"mode": "lines", "showlegend": False, "line": {"width": 4, "dash": "solid"}}
            points = one.steps[inside].tolist(), one.values[inside].tolist()
            series[f"{name}, drop"] = Series(*points, style=bold, look=index)
        if (level := (levels or {}).get(name, 0.0)) > 0:
            ends = [int(one.steps[0]), int(one.steps[-1])]
            dotted: Any = {"mode": "lines", "line": {"dash": "dot", "width": 1.3}, "showlegend": False}
            series[f"{name}, plateau by theory"] = Series(ends, [level, level], style=dotted, look=index)
    log = min(one.values.min() for one in curves.values()) > 0
    return curve(series, title, y=y, log_y=bool(log), height=300)
