"""Draws the tables of results: sweeps, heads, probes, screenings, the lens, tests of circuits, spectra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.panel_grid import colour_and_symbol, draw_panels
from circuits.figures.panel_kinds import Series, curve, heatmap, points, rows_to_one_series

#: How the controls of a probe are drawn.
CONTROLS = {
    "shuffled": ("dot", "Dotted: targets exchanged between examples."),
    "untrained": ("dash", "Dashed: an untrained model."),
}
#: Panels side by side.
ABREAST = 3


def sweep_figure(frame: pd.DataFrame, metrics: Sequence[str], texts: Sequence[str] | None = None) -> Any:
    """Draws heatmaps, one per metric and site, where the variants form a grid over layers or heads, else points.

    Args:
        texts: by position, its name (default: its number).
    """
    axes = _find_heatmap_axes(frame)
    if axes is None:
        return _draw_sweep_points(frame, metrics)
    return _draw_sweep_heatmaps(frame, metrics, axes, texts)


def _find_heatmap_axes(frame: pd.DataFrame) -> tuple[list[str], str] | None:
    """Returns the columns that identify every variant of a site: those of the rows of a heatmap and that across it;
    None if no such columns do.
    """
    variants = frame.drop_duplicates(["variant", "checkpoint", "draw"])
    if len(variants) < 4:
        return None
    for down, across in ((["layer"], "head"), (["layer"], "position"), (["layer", "head"], "position")):
        columns = [*down, across]
        if variants[columns].notna().all(axis=None) and not variants.duplicated(["site", *columns]).any():
            return down, across
    return None


def _draw_sweep_heatmaps(
    frame: pd.DataFrame, metrics: Sequence[str], axes: tuple[list[str], str], texts: Sequence[str] | None
) -> Any:
    columns, across = axes
    panels = []
    sites = list(dict.fromkeys(frame["site"]))
    for metric, site in product(metrics, sites):
        of_metric = frame[frame["metric"] == metric]
        grid = of_metric[of_metric["site"] == site].pivot(index=columns, columns=across, values="effect")
        grid.index = pd.Index([".".join(map(str, row if len(columns) > 1 else (row,))) for row in grid.index])
        if across == "position" and texts is not None:
            grid.columns = [
                escape(texts[at], quote=False) if 0 <= at < len(texts) else str(at) for at in grid.columns
            ]
        # Effects at several sites are compared by their colours.
        end = float(of_metric["effect"].abs().max())
        title = str(metric) if len(sites) == 1 else f"{metric}: {site}"
        axis = {"across": across, "down": columns[-1], "bar": site == sites[-1]}
        panels.append(heatmap(grid, title, unit="effect", signed=True, end=end, **axis))
    label = frame["checkpoint"].iloc[0]
    name = f", {label}" if isinstance(label, str) else ""
    subtitle = (
        f"Metric under the edit less that of the unedited model{name}; each metric has colours of its own."
    )
    return draw_panels(
        panels, f"Effect by {columns[-1]} and {across}", subtitle, columns=min(ABREAST, len(panels))
    )


def _draw_sweep_points(frame: pd.DataFrame, metrics: Sequence[str]) -> Any:
    """Draws each variant's value with its interval, one panel per metric, and a line for the unedited model."""
    panels = []
    for metric in metrics:
        series: dict[str, Series] = {}
        lines = []
        rows = frame[frame["metric"] == metric]
        for index, (label, part) in enumerate(rows.groupby("checkpoint", dropna=False, sort=False)):
            name = label if isinstance(label, str) else str(metric)
            for is_draw, each in part.groupby(part["draw"].notna(), sort=False):
                if is_draw:
                    style = {"marker": {"size": 5, "opacity": 0.5}}
                    values = (each["variant"].tolist(), each["value"].tolist())
                    series[f"{name}, each draw"] = Series(*values, style=style, look=index)
                else:
                    series[name] = rows_to_one_series(each, "variant", look=index)
            unedited = float(part["baseline"].iloc[0])
            if unedited == unedited:
                dashed = {"dash": "dash", "color": colour_and_symbol(index)[0], "width": 1.5}
                lines.append({"y": unedited, "line": dashed})
        label = "variant" if metric == metrics[-1] else ""
        panels.append(points(series, x=label, y=str(metric), lines=lines))
    # That an interval meets the dashes is no sign of no effect: the examples are the same ones.
    subtitle = (
        "Points: under the edit, with the 95% interval over examples. Dashed: the unedited model. Intervals of effects "
        "are paired: see the table."
    )
    more = " Small: single draws." if frame["draw"].notna().any() else ""
    return draw_panels(
        panels, "Metrics under each edit", subtitle + more, scattermode="group", scattergap=0.5
    )


#: Columns whose colours have their middle at 0.
SIGNED = ("effect", "estimate", "corrected")


def heads_figure(
    maps: Mapping[str, pd.DataFrame],
    unit: str,
    title: str,
    subtitle: str = "",
    *,
    signed: bool = False,
    text: Any = None,
) -> Any:
    """Draws numbers of heads as heatmaps by name, layers down and heads across; each has colours of its own.

    Args:
        unit: what the colours mean; "": what each map is called.
        signed: whether their middle is at 0 even where no number is negative.
        text: in the cells (default: the numbers).
    """
    drawn = [
        heatmap(grid, name, unit=unit or name, signed=signed or bool((grid < 0).any(axis=None)), text=text)
        for name, grid in maps.items()
    ]
    return draw_panels(drawn, title, subtitle, columns=min(ABREAST, len(drawn)))


def pivot_by_head(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns a column by layer (down) and head."""
    return frame.pivot(index="layer", columns="head", values=column)


def attention_figure(
    mean: Tensor,
    labels: Sequence[str] | None,
    titles: Mapping[Any, str],
    title: str,
    largest: float | None = None,
) -> Any:
    """Draws a heatmap per head, layers down and heads across, all in one colour scale that begins at 0.

    Args:
        mean: [layer head query key]; fewer queries than keys are the last positions.
        labels: names of the positions (default: their numbers).
        titles: (layer, head) -> its title (default: head 0.1).
        largest: the end of the colours (default: `max_attention_with_several_keys`).
    """
    if labels is not None and len(labels) != mean.shape[-1]:
        raise CircuitsError(f"plot: {len(labels)} labels for {mean.shape[-1]} positions")
    # A token such as <s> would be taken for a tag, and be gone.
    names = [escape(str(label), quote=False) for label in labels or range(mean.shape[-1])]
    largest, heads = max_attention_with_several_keys(mean) if largest is None else largest, mean.shape[1]
    side = 132 if heads <= 4 else 84
    panels = [
        heatmap(
            pd.DataFrame(mean[layer, head].numpy(), index=names[-mean.shape[2] :], columns=names),
            titles.get((layer, head), f"head {layer}.{head}"),
            across="key",
            down="query",
            unit="attention",
            end=largest,
            numbers=len(names) <= 4,
            bar=head == heads - 1,
            row=max(1, side // len(names)),
            width=side,
        )
        for layer in range(len(mean))
        for head in range(heads)
    ]
    subtitle = "Of a query (row) to the keys (columns) that it sees; rows add up to 1."
    if float(torch.nan_to_num(mean).max()) > 1.01 * largest:
        subtitle += " Larger shares, of queries that see one key, have the colour of the end."
    return draw_panels(panels, title, subtitle, columns=heads, share_y=True)


def max_attention_with_several_keys(mean: Tensor) -> float:
    """Returns the largest attention [... query key] of queries that see several keys: others put all of it on one."""
    shares = torch.nan_to_num(mean)
    chosen = shares[(shares > 0).sum(-1) > 1]
    return float((chosen if chosen.numel() else shares).max())


def probe_figure(frame: pd.DataFrame, by: str | None = None) -> Any:
    """Draws a row of panels per target, with one panel per metric.

    A line per site, head and split, as far as they differ, and per value of the column `by`; controls are
    dotted (shuffled) and dashed (untrained).
    """
    layers = ["–" if pd.isna(at) else str(at) for at in frame["layer"]]
    frame = frame.assign(line=_line_names(frame, by), layer=layers)
    looks = {name: look for look, name in enumerate(dict.fromkeys(frame["line"]))}
    panels = []
    for (target, metric), part in frame.groupby(["target", "metric"], sort=False):
        series: dict[str, Series] = {}
        for name, rows in part.groupby("line", sort=False):
            series[str(name)] = rows_to_one_series(rows, "layer", look=looks[name])
            for control, (dash, _) in CONTROLS.items():
                style = {"line": {"dash": dash, "width": 1.5}, "marker": {"size": 4}, "showlegend": False}
                if rows[control].notna().any():
                    values = rows["layer"].tolist(), rows[control].tolist()
                    series[f"{name}, {control}"] = Series(*values, style=style, look=looks[name])
        panels.append(curve(series, f"{target}: {metric}", x="layer", y=str(metric), width=180))
    subtitle = "On held-out examples, with 95% intervals. "
    subtitle += " ".join(said for name, (_, said) in CONTROLS.items() if frame[name].notna().any())
    columns = int(frame.groupby("target")["metric"].nunique().max())
    return draw_panels(panels, "Linear probes", subtitle, columns=columns)


def _line_names(frame: pd.DataFrame, by: str | None) -> list[str]:
    """Returns the name of each row's line: the columns whose values differ in this table, and the split."""
    prefixes = {"site": "", "head": "head "} | ({} if by is None else {by: ""})
    prefixes = {name: text for name, text in prefixes.items() if frame[name].nunique(dropna=False) > 1}
    return [
        ", ".join(
            [f"{text}{row[name]}" for name, text in prefixes.items() if not pd.isna(row[name])]
            + [f"{row['split']} entries"]
        )
        for row in frame.to_dict("records")
    ]
