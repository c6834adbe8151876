"""Layer × head heatmaps: a number for every head, from a sweep, a table or an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.style import finished, read_numbers

#: Pixels: of a cell, of a row of cells, below and beside a panel, around all, and the narrowest panel.
CELL, ROW, GAP, ASIDE, AROUND, NARROWEST = 62, 44, 100, 120, 100, 200
#: Up to so many columns a cell has room for its number; panels beside each other.
NUMBERED, ABREAST = 12, 3
_CALLER = "plots.heads"


@dataclass(frozen=True)
class Panel:
    """One map. values: rows are layers, columns heads or positions. unit: what the colours mean."""

    title: str
    values: pd.DataFrame
    unit: str
    #: Signed values have no colour at 0, others none at their smallest.
    signed: bool
    across: str = "head"
    #: What stands in the cells (default: the values).
    text: pd.DataFrame | None = None


def heads(
    values: Any,
    metric: str | Sequence[str] | None = None,
    *,
    column: str | None = None,
    title: str | None = None,
    unit: str | None = None,
    layers: Sequence[int] | None = None,
) -> Any:
    """A plotly figure with a heatmap, layers down and heads across, for each metric and checkpoint.

        plots.heads(sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model))))
        plots.heads(result.frame, "mse_masked", column="value")
        plots.heads({"diffuseness": maps.diffuseness})

    Args:
        values: a result with a `frame`, or a table: one row per head, with columns `layer`, `head`, and where there are
            several `metric`, `checkpoint` or `ref`; rows of no single head, and single draws, are left out. Or an array
            [layer head], or several by name.
        metric: these only.
        column: what is drawn (default: `effect` where there is one, else `value`).
        unit: what the colours mean (default: the column).
        layers: names of an array's rows, where they do not count from 0.
    """
    table = getattr(values, "frame", values)
    if isinstance(table, pd.DataFrame):
        panels = _of_table(table, metric, column, unit)
    else:
        named = values if isinstance(values, Mapping) else {"": values}
        if not named:
            raise CircuitsError(f"{_CALLER}: there is nothing to draw")
        panels = [_of_array(str(name), one, unit, layers) for name, one in named.items()]
    said = panels[0].unit
    return maps(panels, title or f"{said[:1].upper()}{said[1:]} of each head")


def maps(panels: Sequence[Panel], title: str, subtitle: str = "") -> Any:
    """Panels in rows of up to three; the rows of all have one height."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    columns, rows = min(ABREAST, len(panels)), -(-len(panels) // ABREAST)
    height = ROW * max(len(panel.values.index) for panel in panels)
    across = max(NARROWEST, CELL * min(NUMBERED, max(len(panel.values.columns) for panel in panels)))
    whole, wide = height * rows + GAP * (rows - 1), across * columns + ASIDE * (columns - 1)
    found = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[panel.title for panel in panels],
        vertical_spacing=GAP / whole if rows > 1 else 0,
        horizontal_spacing=ASIDE / wide,
    )
    for index, panel in enumerate(panels):
        at = {"row": index // ABREAST + 1, "col": index % ABREAST + 1}
        grid = panel.values
        largest = float(np.nan_to_num(grid.abs().to_numpy(dtype=float)).max()) or 1.0
        right, middle = (
            found.layout[_axis("x", at, columns)].domain[1],
            found.layout[_axis("y", at, columns)].domain,
        )
        trace = graph_objects.Heatmap(
            x=[str(x) for x in grid.columns],
            y=[str(y) for y in grid.index],
            z=grid.to_numpy(dtype=float),
            # The template's colours, which a page in the dark scheme replaces: diverging about 0 where signed.
            autocolorscale=True,
            # Symmetric, so that no effect has the same colour in every panel.
            zmin=-largest if panel.signed else 0,
            zmax=largest,
            text=_in_cells(panel),
            texttemplate="%{text}",
            colorbar={
                "x": right,
                "y": sum(middle) / 2,
                "len": middle[1] - middle[0],
                "thickness": 12,
                "title": {"text": panel.unit, "font": {"size": 12}},
                "tickfont": {"size": 11},
            },
            xgap=1,
            ygap=1,
            hovertemplate=f"layer %{{y}}, {panel.across} %{{x}}<br>{panel.unit} %{{z:.4g}}<extra>{panel.title}</extra>",
        )
        found.add_trace(trace, **at)
        found.update_xaxes(title_text=panel.across, type="category", showgrid=False, **at)
        if at["col"] == 1:
            found.update_yaxes(title_text="layer", **at)
    found.update_yaxes(type="category", autorange="reversed", showgrid=False)
    lines = max(panel.title.count("<br>") for panel in panels)
    found.update_layout(
        height=AROUND + 16 * lines + whole,
        width=max(520, 60 + wide + ASIDE),
        margin={
            "t": 40 + 16 * lines,
            "b": 60,
            "l": 60,
            "r": ASIDE if 60 + wide + ASIDE > 520 else 460 - wide,
        },
    )
    found.update_annotations(font_size=13)
    return finished(found, title, subtitle)


def _axis(name: str, at: Mapping[str, int], columns: int) -> str:
    """What plotly calls an axis of a panel."""
    place = (at["row"] - 1) * columns + at["col"]
    return f"{name}axis{place if place > 1 else ''}"


def _in_cells(panel: Panel) -> list[list[str]] | None:
    if panel.text is not None:
        return [[str(cell) for cell in row] for row in panel.text.to_numpy().tolist()]
    if len(panel.values.columns) > NUMBERED:
        return None
    rows = panel.values.to_numpy(dtype=float).tolist()
    return [["" if cell != cell else f"{cell:.2g}".replace("e-0", "e-") for cell in row] for row in rows]


def _of_table(
    table: pd.DataFrame, metric: str | Sequence[str] | None, column: str | None, unit: str | None
) -> list[Panel]:
    shown = column or ("effect" if "effect" in table else "value")
    missing = [name for name in ("layer", "head", shown) if name not in table]
    if missing:
        raise CircuitsError(
            f"{_CALLER}: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    alone = table[table["layer"].notna() & table["head"].notna()]
    if "draw" in alone:
        alone = alone[alone["draw"].isna()]
    if metric is not None:
        wanted = [metric] if isinstance(metric, str) else list(metric)
        if not wanted:
            raise CircuitsError(f"{_CALLER}: metric= names none; leave it out for all")
        there = list(dict.fromkeys(alone["metric"])) if "metric" in alone else []
        if unknown := [name for name in wanted if name not in there]:
            raise CircuitsError(
                f"{_CALLER}: no metric {unknown[0]!r}; there are {', '.join(map(str, there))}"
            )
        alone = alone[alone["metric"].isin(wanted)]
    if alone.empty:
        raise CircuitsError(f"{_CALLER}: the table has no row about one head alone")
    if not pd.api.types.is_numeric_dtype(alone[shown]):
        raise CircuitsError(f"{_CALLER}: column {shown} holds {alone[shown].dtype}, and no numbers")
    by = [name for name in ("metric", "checkpoint", "ref") if name in alone and alone[name].notna().any()]
    panels: list[Panel] = []
    for name, part in alone.groupby(by, sort=False, dropna=False) if by else [((), alone)]:
        if part.duplicated(["layer", "head"]).any():
            raise CircuitsError(
                f"{_CALLER}: a head has several rows in the table; keep one per head, metric and checkpoint"
            )
        signed = bool((part[shown] < 0).any()) or shown == "effect"
        grid = part.pivot(index="layer", columns="head", values=shown)
        panels.append(Panel("<br>".join(map(str, name)), grid, unit or shown, signed))
    # Those of one metric beside each other, in the order of the table.
    order = {
        title: place
        for place, title in enumerate(dict.fromkeys(one.title.split("<br>")[0] for one in panels))
    }
    panels.sort(key=lambda one: order[one.title.split("<br>")[0]])
    return panels


def _of_array(name: str, values: Any, unit: str | None, layers: Sequence[int] | None) -> Panel:
    array = read_numbers(values, _CALLER, "an array [layer head] is needed")
    if array.ndim != 2 or not array.size:
        raise CircuitsError(f"{_CALLER}: an array [layer head] is needed; got {list(array.shape)}")
    if layers is not None and len(layers) != len(array):
        raise CircuitsError(f"{_CALLER}: {len(layers)} names of layers for {len(array)} rows")
    grid = pd.DataFrame(array, index=None if layers is None else list(layers))
    return Panel(name, grid, unit or name or "value", bool((array < 0).any()))
