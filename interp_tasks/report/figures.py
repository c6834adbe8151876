"""The figures of a report: training, all heads edited, each head's effect and attention by checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.run_logs import declared
from interp_tasks.pages import signed, step_labels, stepped
from interp_tasks.report.snapshots import ALL, MODES, Snapshot, View, shown_metrics

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

    from tasks import Task

#: The share of all effects of single heads that have a colour of their own: a few checkpoints of an untrained model
#: would take up the scale alone.
STRONGEST = 0.96
#: Numbers of attention maps that a page holds; of a run with more, checkpoints are left out evenly.
MOST_NUMBERS = 1_500_000


def training_figure(views: Sequence[View]) -> plotly.graph_objects.Figure | None:
    """Draws the logged metrics over training, losses above accuracies, with the drops shaded; None without a log."""
    from circuits.figures.layout import draw
    from circuits.figures.panels import DASHES, Series, curve

    logged = [view for view in views if view.source.run is not None and view.source.curve is not None]
    panels = []
    for are_shares in (False, True):
        series: dict[str, Series] = {}
        for view, dash in zip(logged, DASHES, strict=False):
            assert view.source.run is not None
            metrics = shown_metrics(view.source.run.logged(), view.source.run.drop_metric)
            for look, metric in enumerate(metrics):
                if ("accuracy" in metric) == are_shares:
                    series |= metric_series(view, metric, look, dash, len(logged) > 1)
        if not series:
            continue
        drops = [view.source.curve.drop for view in logged if view.source.curve and view.source.curve.drop]
        shaded = [{"x0": drop.onset, "x1": drop.end} for drop in drops]
        name = "share of right answers" if are_shares else "metric"
        panels.append(curve(series, y=name, log_y=is_log(name, series), lines=shaded, height=220))
    return draw(panels) if panels else None


def metric_series(view: View, metric: str, look: int, dash: str, several: bool) -> dict[str, Any]:
    """Returns a metric of a run over training, of the batch just trained on too, and the plateau by theory."""
    from circuits.figures.panels import Series

    run = view.source.run
    assert run is not None
    steps, values = run.points(metric)
    if not values:
        return {}
    name = f"{metric}, {view.name}" if several else metric
    series = {name: Series(steps, values, style={"mode": "lines", "line": {"dash": dash}}, look=look)}
    hidden: dict[str, Any] = {"mode": "lines", "showlegend": False}
    batch_steps, batch = run.points(metric, "train")
    if batch and not several:
        # A logarithm has no place for 0.
        known = [value if value > 0 else None for value in batch]
        faint = hidden | {"opacity": 0.5, "line": {"width": 1.1}}
        series[f"{metric}, train"] = Series(batch_steps, known, style=faint, look=look)
    if (level := declared(run, "plateau_levels").get(metric, 0.0)) > 0:
        dotted, ends = hidden | {"line": {"dash": "dot", "width": 1.2}}, [0, run.last_step]
        series[f"{name}, plateau by theory"] = Series(ends, [level, level], style=dotted, look=look)
    return series


def is_log(name: str, series: dict[str, Any]) -> bool:
    """Returns whether an axis is logarithmic: where values span a power of ten and are no shares."""
    known = [value for one in series.values() for value in one.y if value is not None and value == value]
    is_share = "accuracy" in name or name.startswith("share")
    return not is_share and bool(known) and min(known) > 0 and max(known) >= 10 * min(known)


def ablation_figure(views: Sequence[View]) -> plotly.graph_objects.Figure:
    """Draws each metric over checkpoints, unedited and with all heads edited, with 95% bands."""
    from circuits.figures.layout import draw
    from circuits.figures.panels import curve, of_rows

    panels = []
    for view in views:
        unedited, effects = view.unedited(), view.effects()
        together = effects[effects["variant"] == ALL]
        for metric in view.metrics:
            rows = together[together["metric"] == metric]
            lines = {"unedited": unedited[unedited["metric"] == metric]}
            lines |= {mode: rows[rows["intervention"] == mode] for mode in MODES}
            series = {
                name: of_rows(part.sort_values("step"), "step", look=look)
                for look, (name, part) in enumerate(lines.items())
                if len(part)
            }
            title = view.name if len(views) > 1 else ""
            panels.append(curve(series, title, y=metric, log_y=is_log(metric, series), height=220))
    return draw(panels)


def effects_figure(view: View, ends: dict[str, float]) -> plotly.graph_objects.Figure:
    """Draws the effect of every head under each edit, layer by head, with a slider over the checkpoints.

    Args:
        ends: metric -> the effect at the end of the colours, the same at every step.
    """
    from circuits.figures.layout import draw
    from circuits.figures.panels import heat

    def at(snapshot: Snapshot) -> plotly.graph_objects.Figure:
        panels = []
        for metric in view.metrics:
            for mode in MODES:
                grid = effects_grid(snapshot.effects, metric, mode)
                text = grid.map(lambda value: "" if value != value else signed(value))
                options: dict[str, Any] = {"bar": mode == MODES[-1], "signed": True, "end": ends[metric]}
                panels.append(heat(grid, f"{metric}: {mode}", unit="effect", text=text, **options))
        return draw(panels, columns=len(MODES), share_y=True)

    return over_checkpoints(view, view.snapshots, at)


def effects_grid(effects: pandas.DataFrame, metric: str, mode: str) -> pandas.DataFrame:
    """Returns the effect of each head by layer and head; last, a layer's heads together."""
    rows = effects[(effects["metric"] == metric) & (effects["intervention"] == mode)]
    alone = rows[rows["head"].notna()]
    grid = alone.pivot(index="layer", columns="head", values="effect").astype(float)
    together = rows.set_index("variant")["effect"]
    grid[ALL] = [float(together[f"layer {layer}"]) for layer in grid.index]
    return grid


def largest_effects(views: Sequence[View]) -> dict[str, float]:
    """Returns by metric the end of the colours of effects of single heads."""
    import pandas

    rows = pandas.concat([view.effects() for view in views], ignore_index=True)
    sizes = rows[rows["head"].notna()].set_index("metric")["effect"].abs().groupby(level=0)
    return {
        str(metric): float(part.quantile(STRONGEST)) or float(part.max()) or 1.0 for metric, part in sizes
    }


def attention_figure(view: View) -> plotly.graph_objects.Figure:
    """Draws the mean attention map of every head, with a slider over the checkpoints."""
    import numpy as np
    import torch

    from circuits.figures import results

    count, most = len(view.snapshots), max(2, MOST_NUMBERS // view.snapshots[0].maps.size)
    places = np.linspace(0, count - 1, min(count, most)).round().astype(int)
    snapshots = [view.snapshots[place] for place in places]
    largest = max(results.largest_choice(torch.as_tensor(each.maps)) for each in snapshots)
    layers, _, length, _ = snapshots[0].maps.shape
    labels = position_labels(view.task, length)

    def at(snapshot: Snapshot) -> plotly.graph_objects.Figure:
        mean = torch.as_tensor(snapshot.maps)
        return results.attention_figure(mean, range(layers), labels, {}, "", largest)

    return over_checkpoints(view, snapshots, at)


def over_checkpoints(
    view: View, snapshots: Sequence[Snapshot], at: Callable[[Snapshot], Any]
) -> plotly.graph_objects.Figure:
    """Returns a figure of each snapshot behind a slider, which names the marks around the drop."""
    labels = step_labels([each.step for each in snapshots], view.source.marks)
    return stepped(dict(zip(labels, map(at, snapshots), strict=True)))


def position_labels(task: Task | None, length: int) -> list[str]:
    """Returns the names of positions: their place on the task's grid, the input that stands there, or a number."""
    import numpy as np

    axes: Sequence[Any] = () if task is None else task.grid_axes()
    grid = [len(axis.values) for axis in axes if axis.position is None]
    if grid and int(np.prod(grid)) == length:
        return ["(" + ",".join(map(str, cell)) + ")" for cell in np.ndindex(*grid)]
    names = {axis.position: axis.name for axis in axes if axis.position is not None}
    return [f"{at} ({names[at]})" if at in names else str(at) for at in range(length)]
