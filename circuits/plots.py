"""Draws results as plotly figures with titles, axes and units, and writes figures to files.

    from circuits import plots

    figure = plots.attention(patterns.attention(model, tokens))   # a map per head
    plots.heads(result, "mse_masked")                             # layer × head, of a sweep, a table or an array
    plots.spectrum(fourier.spectrum(model.W_E[:113]))             # share of variance by frequency
    plots.curve({"test": (steps, losses)}, log_y=True)            # lines, with bands where there are bounds
    plots.save(figure, "attention.svg")                           # .html, .json, .png, .svg, .pdf, .jpg, .webp

Every result has a `plot()` of its own. Colour-blind readers tell colours apart, too (`circuits.figures.panel_grid`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from circuits.arguments import stringify_keys
from circuits.errors import CircuitsError
from circuits.figures import panel_kinds
from circuits.figures.export import picture, save
from circuits.figures.panel_grid import draw_panels, titled, untitled
from circuits.figures.panel_kinds import Series
from circuits.figures.results import SIGNED, attention_figure, heads_figure, pivot_by_head
from circuits.fourier import Bands, Spectrum
from circuits.fourier import spectrum as measure_spectrum
from circuits.frozen_tensors_and_positions import parse_numbers
from circuits.model.types import ArrayLike, Figure
from circuits.patterns import Maps
from circuits.sweeps.sweep_result import SweepResult
from circuits.table_printing import metrics_asked_for

__all__ = ["attention", "curve", "heads", "picture", "save", "spectrum", "titled", "untitled"]
__dir__ = __all__.copy


def attention(
    maps: Maps | ArrayLike, labels: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Returns a plotly figure: a heatmap per head, layers down, heads across, in one colour scale that begins at 0.

        plots.attention(patterns.attention(model, tokens))
        plots.attention(cache(model, tokens, ["pattern.0"]).popitem()[1].mean(0))

    Args:
        maps: what `patterns.attention` found, or attention [layer head query key], [head query key] or [query key];
            fewer queries than keys are the last positions.
        labels: what the positions are called (default: numbers).
    """
    if isinstance(maps, Maps):
        return maps.plot(labels, title=title)
    mean = torch.as_tensor(_parse_numbers(maps, "plots.attention"))
    if not 2 <= mean.ndim <= 4 or not mean.numel() or mean.shape[-2] > mean.shape[-1]:
        raise CircuitsError(
            "plots.attention: attention [layer head query key], [head query key] or [query key] is needed; got "
            f"{list(mean.shape)}"
        )
    mean = mean[(None,) * (4 - mean.ndim)]
    return attention_figure(mean, labels, {}, title or "Attention")


def heads(
    values: SweepResult | pd.DataFrame | ArrayLike | Mapping[str, ArrayLike],
    metric: str | Sequence[str] | None = None,
    *,
    column: str | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> Figure:
    """Returns a plotly figure with a heatmap, layers down and heads across, for each metric and checkpoint.

        plots.heads(sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model))))
        plots.heads(result.frame, "mse_masked", column="value")
        plots.heads({"diffuseness": maps.diffuseness})

    Args:
        values: a result with a `frame`, or a table: one row per head, with columns `layer`, `head`, and where there are
            several `metric`, `checkpoint` or `ref`; rows that are not of one head, and single draws, are left out. Or
            an array [layer head], or several by name.
        metric: these only.
        column: the column drawn (default: `effect` where one was measured, else `estimate`, else `value`).
        unit: what the colours mean (default: the column).
    """
    table = getattr(values, "frame", values)
    if isinstance(table, pd.DataFrame):
        of_heads = table.dropna(subset=[name for name in ("layer", "head") if name in table])
        drawn = (name for name in ("effect", "estimate") if name in table and of_heads[name].notna().any())
        column = column or next(drawn, "value")
        maps = _maps_of_table(table, metric, column)
    else:
        arrays = values if isinstance(values, Mapping) else {"": values}
        maps = {str(name): _map_of_array(array) for name, array in arrays.items()}
    if not maps:
        raise CircuitsError("plots.heads: there is nothing to draw")
    # The colours of an array among several are called by its name.
    unit = unit or column or ("" if all(maps) else "value")
    quantity = unit or next(iter(maps))
    title = title or f"{quantity[:1].upper()}{quantity[1:]} of each head"
    return heads_figure(maps, unit, title, signed=column in SIGNED)


def _maps_of_table(
    table: pd.DataFrame, metric: str | Sequence[str] | None, column: str
) -> dict[str, pd.DataFrame]:
    """Returns the values [layer head] of each metric and checkpoint of a table, from its rows about one head alone."""
    _check_columns(table, ("layer", "head"), column, "plots.heads")
    rows = table.dropna(subset=["layer", "head"])
    if "draw" in rows:
        rows = rows[rows["draw"].isna()]
    if "metric" in rows:
        rows = rows[rows["metric"].isin(metrics_asked_for(table, metric))]
        # Panels of one metric are drawn beside each other; metrics keep the order of the table.
        rows = rows.iloc[np.argsort(pd.factorize(rows["metric"])[0], kind="stable")]
    by = [name for name in ("metric", "checkpoint", "ref") if name in rows and rows[name].notna().any()]
    if rows.empty or rows.duplicated([*by, "layer", "head"]).any():
        raise CircuitsError("plots.heads: a table with one row per head, metric and checkpoint is needed")
    parts = rows.groupby(by, sort=False, dropna=False) if by else [((), rows)]
    return {"<br>".join(map(str, name)): pivot_by_head(part, column) for name, part in parts}


def _map_of_array(values: Any) -> pd.DataFrame:
    array = _parse_numbers(values, "plots.heads")
    if array.ndim != 2 or not array.size:
        raise CircuitsError(f"plots.heads: an array [layer head] is needed; got {list(array.shape)}")
    return pd.DataFrame(array)


def spectrum(
    values: Spectrum | Bands | ArrayLike, keys: Iterable[int] = (), *, title: str | None = None
) -> Figure:
    """Returns a plotly figure of the share of the variance that each frequency carries, all features together.

        plots.spectrum(fourier.spectrum(model.W_E[:113]))
        plots.spectrum(found, fourier.key_frequencies(found))
        plots.spectrum(model.W_E[:113])

    Args:
        values: a `Spectrum` or its `Bands`, or weights or activations as `fourier.spectrum` takes them.
        keys: frequencies that are marked, such as the key ones.
    """
    found = values if isinstance(values, Bands | Spectrum) else measure_spectrum(values)
    return found.plot(keys, title=title)


def curve(
    data: pd.DataFrame | Mapping[str, ArrayLike | tuple[ArrayLike, ...]],
    x: str = "step",
    y: str = "value",
    *,
    by: str | Sequence[str] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    title: str | None = None,
    x_title: str | None = None,
    y_title: str | None = None,
) -> Figure:
    """Returns a plotly figure with a line per series, and a band around it where there are bounds.

        plots.curve(result.frame[result.frame["metric"] == "mse_masked"], by="variant", log_y=True)
        plots.curve({"train": (steps, losses), "test": (steps, mean, low, high)}, x_title="step", y_title="loss (nats)")
        plots.curve({"seeds": (steps, losses)})       # losses [seed step]: the median, and a band over all seeds

    Args:
        data: a table, with a series per value of the columns `by`, in order of `x`, or of the rows where that is text.
            Its bounds are the columns `Y_ci_low` and `Y_ci_high`, where there are some, such as value_ci_low for value.
            Or name -> y, (x, y) or (x, y, low, high); where y is [run x], the line is the median over runs, and the
            band goes from the smallest run to the largest.
    """
    if isinstance(data, pd.DataFrame):
        series = _curves_of_table(data, x, y, by)
    elif isinstance(data, Mapping):
        named = stringify_keys(data, "plots.curve", "curves")
        series = {name: _curve_of_arrays(name, values) for name, values in named.items()}
    else:
        raise CircuitsError(f"plots.curve: a table, or name -> numbers, is needed; got {type(data).__name__}")
    if not series:
        raise CircuitsError("plots.curve: there is nothing to draw")
    x, y = x_title or x, y_title or y
    panel = panel_kinds.curve(series, x=x, y=y, log_x=log_x, log_y=log_y, height=310)
    bands = any(one.low is not None for one in series.values())
    subtitle = "Bands: from the lower to the upper bound." if bands else ""
    return draw_panels([panel], title or f"{y} over {x}", subtitle)


def _curves_of_table(
    table: pd.DataFrame, x: str, y: str, by: str | Sequence[str] | None
) -> dict[str, Series]:
    """Returns the series of a table by name, told apart by the columns `by`."""
    columns = [] if by is None else [by] if isinstance(by, str) else list(by)
    _check_columns(table, (x, *columns), y, "plots.curve")
    rows = table[table[y].notna()]
    # As text, step 100 comes before step 16.
    if not pd.api.types.is_string_dtype(table[x]):
        rows = rows.sort_values(x, kind="stable")
    series: dict[str, Series] = {}
    for names, part in rows.groupby(columns, sort=False, dropna=False) if columns else [((y,), rows)]:
        name = ", ".join(map(str, names))
        if part[x].duplicated().any():
            raise CircuitsError(
                f"plots.curve: {name!r} has several rows at one {x}; say with by= which columns tell its series apart"
            )
        series[name] = panel_kinds.rows_to_one_series(part, x, y)
    return series


def _curve_of_arrays(name: str, given: Any) -> Series:
    """Returns a series given as arrays, with bounds where they are given or several runs make them."""
    first, *rest = given if isinstance(given, tuple) else (None, given)
    ys: Any
    ys, *bounds = (_parse_numbers(part, f"plots.curve: {name!r}") for part in rest)
    # x may be names or dates: only its order is used.
    xs: Any = np.arange(ys.shape[-1] if ys.ndim else 0) if first is None else np.asarray(first)
    if ys.ndim == 2 and not bounds:
        ys, bounds = np.median(ys, axis=0), [ys.min(axis=0), ys.max(axis=0)]
    shapes = [list(part.shape) for part in (xs, ys, *bounds)]
    if len(bounds) not in (0, 2) or any(shape != [len(xs)] for shape in shapes):
        raise CircuitsError(
            f"plots.curve: {name!r} is y, (x, y), (x, y [run x]) or (x, y, low, high), of one length; got {shapes}"
        )
    ends: Any = bounds or (None, None)
    return Series(xs, ys, ends[0], ends[1])


def _check_columns(table: pd.DataFrame, needed: Sequence[str], numbers: str, caller: str) -> None:
    """Refuses a table that lacks columns, or in which that of numbers holds none."""
    if missing := [name for name in (*needed, numbers) if name not in table]:
        raise CircuitsError(
            f"{caller}: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    if not pd.api.types.is_numeric_dtype(table[numbers]):
        raise CircuitsError(f"{caller}: column {numbers} holds {table[numbers].dtype}, and no numbers")


def _parse_numbers(values: Any, caller: str) -> np.ndarray:
    """Returns the values as an array of floats; refuses complex numbers, and rows of several lengths."""
    numbers = parse_numbers(values, caller)
    if numbers.is_complex():
        raise CircuitsError(f"{caller}: got complex numbers: choose their real, imag or abs")
    return numbers.detach().cpu().double().numpy()
