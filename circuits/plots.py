"""Draws results as plotly figures with titles, axes and units, and writes figures to files.

    from circuits import plots

    figure = plots.attention(patterns.attention(model, tokens))   # a map per head
    plots.heads(result, "mse_masked")                             # layer × head, of a sweep, a table or an array
    plots.spectrum(fourier.spectrum(model.W_E[:113]))             # share of variance by frequency
    plots.curve({"test": (steps, losses)}, log_y=True)            # lines, with bands where there are bounds
    plots.save(figure, "attention.svg")                           # .html, .json, .png, .svg, .pdf, .jpg, .webp

Every result has a `plot()` of its own. Colours are told apart by colour-blind readers too (`circuits.figures.layout`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures import panels
from circuits.figures.export import picture, save
from circuits.figures.layout import draw, titled, untitled
from circuits.figures.panels import Series
from circuits.figures.results import ABREAST, attention_figure
from circuits.fourier import Bands, Spectrum
from circuits.fourier import spectrum as measure_spectrum
from circuits.patterns import Maps
from circuits.tensors import as_dense_tensor

__all__ = ["attention", "curve", "heads", "picture", "save", "spectrum", "titled", "untitled"]


def attention(
    maps: Any,
    labels: Sequence[str] | None = None,
    titles: Mapping[Any, str] | None = None,
    *,
    title: str | None = None,
) -> Any:
    """Returns a plotly figure: a heatmap per head, layers down, heads across, in one colour scale that begins at 0.

        plots.attention(patterns.attention(model, tokens))
        plots.attention(cache(model, tokens, ["pattern.0"]).popitem()[1].mean(0))

    Args:
        maps: what `patterns.attention` found, or attention [layer head query key], [head query key] or [query key].
        labels: what the positions are called (default: numbers).
        titles: Head -> its title (default: head 0.1).
    """
    if isinstance(maps, Maps):
        return maps.plot(labels, titles, title=title)
    if not isinstance(maps, Tensor):
        maps = torch.as_tensor(
            _read_numbers(maps, "plots.attention", "attention [layer head query key] is needed")
        )
    if not 2 <= maps.ndim <= 4 or not maps.is_floating_point() or not maps.numel():
        raise CircuitsError(
            f"plots.attention: attention [layer head query key], [head query key] or [query key] is needed; got "
            f"{list(maps.shape)} of {str(maps.dtype).removeprefix('torch.')}"
        )
    mean = maps.detach().cpu().double()[(None,) * (4 - maps.ndim)]
    return attention_figure(mean, range(len(mean)), labels, titles or {}, title or "Attention")


def heads(
    values: Any,
    metric: str | Sequence[str] | None = None,
    *,
    column: str | None = None,
    title: str | None = None,
    unit: str | None = None,
    layers: Sequence[int] | None = None,
) -> Any:
    """Returns a plotly figure with a heatmap, layers down and heads across, for each metric and checkpoint.

        plots.heads(sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model))))
        plots.heads(result.frame, "mse_masked", column="value")
        plots.heads({"diffuseness": maps.diffuseness})

    Args:
        values: a result with a `frame`, or a table: one row per head, with columns `layer`, `head`, and where there are
            several `metric`, `checkpoint` or `ref`; rows that are not of one head, and single draws, are left out. Or
            an array [layer head], or several by name.
        metric: these only.
        column: the column drawn (default: `effect` where there is one, else `value`).
        unit: what the colours mean (default: the column).
        layers: names of an array's rows, where they do not count from 0.
    """
    table = getattr(values, "frame", values)
    if isinstance(table, pd.DataFrame):
        drawn = _heads_of_table(table, metric, column, unit)
    else:
        named = values if isinstance(values, Mapping) else {"": values}
        if not named:
            raise CircuitsError("plots.heads: there is nothing to draw")
        drawn = [_heads_of_array(str(name), array, unit, layers) for name, array in named.items()]
    quantity = unit or drawn[0].unit
    maps = [
        panels.heat(
            each.values, each.title, unit=quantity if len(drawn) == 1 else each.unit, signed=each.signed
        )
        for each in drawn
    ]
    return draw(
        maps, title or f"{quantity[:1].upper()}{quantity[1:]} of each head", columns=min(ABREAST, len(maps))
    )


class _HeadMap(NamedTuple):
    """The values of one map, layers down and heads across; `unit` names the colours, whose middle is 0 if `signed`."""

    title: str
    values: pd.DataFrame
    unit: str
    signed: bool


def _heads_of_table(
    table: pd.DataFrame, metric: str | Sequence[str] | None, column: str | None, unit: str | None
) -> list[_HeadMap]:
    """Returns a panel for each metric and checkpoint of a table, from its rows about one head alone."""
    drawn_column = column or ("effect" if "effect" in table else "value")
    missing = [name for name in ("layer", "head", drawn_column) if name not in table]
    if missing:
        raise CircuitsError(
            f"plots.heads: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    rows = table[table["layer"].notna() & table["head"].notna()]
    if "draw" in rows:
        rows = rows[rows["draw"].isna()]
    if metric is not None:
        metrics = [metric] if isinstance(metric, str) else list(metric)
        if not metrics:
            raise CircuitsError("plots.heads: metric= names none; leave it out for all")
        known = list(dict.fromkeys(rows["metric"])) if "metric" in rows else []
        if unknown := [name for name in metrics if name not in known]:
            raise CircuitsError(
                f"plots.heads: no metric {unknown[0]!r}; there are {', '.join(map(str, known))}"
            )
        rows = rows[rows["metric"].isin(metrics)]
    if rows.empty:
        raise CircuitsError("plots.heads: the table has no row about one head alone")
    if not pd.api.types.is_numeric_dtype(rows[drawn_column]):
        raise CircuitsError(
            f"plots.heads: column {drawn_column} holds {rows[drawn_column].dtype}, and no numbers"
        )
    by = [name for name in ("metric", "checkpoint", "ref") if name in rows and rows[name].notna().any()]
    found: list[_HeadMap] = []
    for name, part in rows.groupby(by, sort=False, dropna=False) if by else [((), rows)]:
        if part.duplicated(["layer", "head"]).any():
            raise CircuitsError(
                "plots.heads: a head has several rows in the table; keep one per head, metric and checkpoint"
            )
        signed = bool((part[drawn_column] < 0).any()) or drawn_column == "effect"
        grid = part.pivot(index="layer", columns="head", values=drawn_column)
        found.append(_HeadMap("<br>".join(map(str, name)), grid, unit or drawn_column, signed))
    # Panels of one metric are drawn beside each other; metrics keep the order of the table.
    order = {
        title: index
        for index, title in enumerate(dict.fromkeys(panel.title.split("<br>")[0] for panel in found))
    }
    found.sort(key=lambda panel: order[panel.title.split("<br>")[0]])
    return found


def _heads_of_array(name: str, values: Any, unit: str | None, layers: Sequence[int] | None) -> _HeadMap:
    array = _read_numbers(values, "plots.heads", "an array [layer head] is needed")
    if array.ndim != 2 or not array.size:
        raise CircuitsError(f"plots.heads: an array [layer head] is needed; got {list(array.shape)}")
    if layers is not None and len(layers) != len(array):
        raise CircuitsError(f"plots.heads: {len(layers)} names of layers for {len(array)} rows")
    grid = pd.DataFrame(array, index=None if layers is None else list(layers))
    return _HeadMap(name, grid, unit or name or "value", bool((array < 0).any()))


def spectrum(
    values: Any, keys: Iterable[Any] = (), *, by: str | None = None, title: str | None = None
) -> Any:
    """Returns a plotly figure of the share of the variance that each frequency carries, all features together.

        plots.spectrum(fourier.spectrum(model.W_E[:113]))
        plots.spectrum(found, fourier.key_frequencies(found))
        plots.spectrum(model.W_E[:113])

    Args:
        values: a `Spectrum` or its `Bands`, or weights or activations as `fourier.spectrum` takes them.
        keys: frequencies that are marked, such as the key ones.
        by: bars by "block", "component" or a coordinate, see `Spectrum.bands`; default: a bar per frequency of one
            coordinate, and of two a map, or with keys bars by block.
    """
    if isinstance(values, Bands):
        return values.plot(keys, title=title)
    if not isinstance(values, Spectrum):
        values = measure_spectrum(values)
    return values.plot(keys, by=by, title=title)


def curve(
    data: Any,
    x: str = "step",
    y: str = "value",
    *,
    by: str | Sequence[str] | None = None,
    low: str | None = "auto",
    high: str | None = "auto",
    log_x: bool = False,
    log_y: bool = False,
    title: str | None = None,
    x_title: str | None = None,
    y_title: str | None = None,
) -> Any:
    """Returns a plotly figure with a line per series, and a band around it where there are bounds.

        plots.curve(result.frame[result.frame["metric"] == "mse_masked"], by="variant", log_y=True)
        plots.curve({"train": (steps, losses), "test": (steps, mean, low, high)}, x_title="step", y_title="loss (nats)")
        plots.curve({"seeds": (steps, losses)})       # losses [seed step]: the median, and a band over all seeds

    Args:
        data: a table, with a series per value of the columns `by`, in order of `x`, or of the rows where that is text.
            Or name -> y, (x, y) or (x, y, low, high); where y is [run x], the line is the median over runs, and the
            band goes from the smallest run to the largest.
        low: the column of a table that bounds y from below. "auto": `Y_ci_low`, where there is one, such as
            value_ci_low for value. None: no band.
        high: that which bounds it from above, likewise.
    """
    if isinstance(data, pd.DataFrame):
        series = _curves_of_table(data, x, y, by, low, high)
    elif not isinstance(data, Mapping):
        raise CircuitsError(f"plots.curve: a table, or name -> numbers, is needed; got {type(data).__name__}")
    else:
        series = {str(name): _curve_of_arrays(str(name), values) for name, values in data.items()}
        if len(series) < len(data):
            raise CircuitsError("plots.curve: two curves have one name as text; give them different names")
    if not series:
        raise CircuitsError("plots.curve: there is nothing to draw")
    for text, log, parts in (
        (x_title or x, log_x, [one.x for one in series.values()]),
        (y_title or y, log_y, [each for one in series.values() for each in (one.y, one.low, one.high)]),
    ):
        if log:
            _check_logarithm(text, [np.asarray(part) for part in parts if part is not None])
    panel = panels.curve(series, x=x_title or x, y=y_title or y, log_x=log_x, log_y=log_y, height=310)
    bands = any(one.low is not None for one in series.values())
    subtitle = "Bands: from the lower to the upper bound." if bands else ""
    return draw([panel], title or f"{y_title or y} over {x_title or x}", subtitle)


def _check_logarithm(text: str, parts: Sequence[Any]) -> None:
    values = np.concatenate(parts)
    if values.dtype.kind not in "biuf":
        raise CircuitsError(f"plots.curve: {text} holds {values.dtype}, which has no logarithm")
    if not (values[np.isfinite(values)] > 0).any():
        raise CircuitsError(f"plots.curve: no value of {text} is above 0, where a logarithm is")


def _curves_of_table(
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str | Sequence[str] | None,
    low: str | None,
    high: str | None,
) -> dict[str, Series]:
    """Returns the series of a table as (x, y, low, high) by name, told apart by the columns `by`."""
    columns = [] if by is None else [by] if isinstance(by, str) else list(by)
    if missing := [name for name in (x, y, *columns) if name not in table]:
        raise CircuitsError(
            f"plots.curve: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    if not pd.api.types.is_numeric_dtype(table[y]):
        raise CircuitsError(f"plots.curve: column {y} holds {table[y].dtype}, and no numbers")
    rows = table[table[y].notna()]
    # As text, step 100 comes before step 16.
    if not pd.api.types.is_string_dtype(table[x]):
        rows = rows.sort_values(x, kind="stable")
    low, high = (
        f"{y}_ci_{end}" if named == "auto" else named for named, end in ((low, "low"), (high, "high"))
    )
    bounded = low in table and high in table
    series: dict[str, Series] = {}
    for names, part in rows.groupby(columns, sort=False, dropna=False) if columns else [((y,), rows)]:
        name = ", ".join(map(str, names))
        if part[x].duplicated().any():
            raise CircuitsError(
                f"plots.curve: {name!r} has several rows at one {x}; say with by= which columns tell its series apart"
            )
        bounds: list[Any] = [None, None]
        if bounded and not part[[low, high]].isna().any(axis=None):
            bounds = [part[bound].to_numpy(dtype=float) for bound in (low, high)]
        series[name] = Series(part[x].to_numpy(), part[y].to_numpy(dtype=float), *bounds)
    return series


def _curve_of_arrays(name: str, given: Any) -> Series:
    """Returns a series given as arrays as (x, y), with bounds where they are given or several runs make them."""
    parts = list(given) if isinstance(given, tuple) else [given]
    needed = f"{name!r} is y, (x, y), (x, y [run x]) or (x, y, low, high)"
    numbers = [_read_numbers(part, "plots.curve", needed) for part in parts[min(1, len(parts) - 1) :]]
    # x may be names or dates: only its order is used.
    first = parts[0] if len(parts) > 1 else np.arange(numbers[0].shape[-1] if numbers[0].ndim else 0)
    arrays = [
        np.asarray(first if isinstance(first, np.ndarray) else as_dense_tensor(first, "plots.curve")),
        *numbers,
    ]
    xs, ys, *rest = arrays
    bounds: list[Any] = rest
    if ys.ndim == 2 and not bounds:
        ys, bounds = np.median(ys, axis=0), [ys.min(axis=0), ys.max(axis=0)]
    if (
        len(bounds) not in (0, 2)
        or any(values.shape != (len(xs),) for values in (ys, *bounds))
        or not len(xs)
    ):
        shapes = ", ".join(str(list(values.shape)) for values in arrays)
        raise CircuitsError(
            f"plots.curve: {name!r} is y, (x, y), (x, y [run x]) or (x, y, low, high), of one length; got {shapes}"
        )
    return Series(xs, ys, *(bounds or [None, None]))


def _read_numbers(values: Any, caller: str, needed: str) -> Any:
    """Returns the values as an array of floats.

    Raises:
        CircuitsError: with the text `needed`, for values that are no real numbers, or rows of several lengths.
    """
    tensor = as_dense_tensor(values, caller)
    try:
        array = np.asarray(tensor.detach().cpu() if isinstance(tensor, Tensor) else tensor)
        numbers = array if np.iscomplexobj(array) else array.astype(float)
    except (TypeError, ValueError):
        raise CircuitsError(
            f"{caller}: {needed}; got {type(values).__name__} without numbers in rows of one length"
        ) from None
    if np.iscomplexobj(numbers):
        raise CircuitsError(f"{caller}: {needed}; got complex numbers: choose their real, imag or abs")
    return numbers
