"""Draws curves with bands: a quantity over steps, layers or anything that is ordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished, log_axis, read_numbers
from circuits.tensors import as_dense_tensor

#: Curves of at most this many points have a symbol at each.
MARKED = 40
_CALLER = "plots.curve"


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
        series = _of_table(data, x, y, by, low, high)
    elif not isinstance(data, Mapping):
        raise CircuitsError(f"{_CALLER}: a table, or name -> numbers, is needed; got {type(data).__name__}")
    else:
        series = {str(name): _of_arrays(str(name), values) for name, values in data.items()}
        if len(series) < len(data):
            raise CircuitsError(f"{_CALLER}: two curves have one name as text; give them different names")
    if not series:
        raise CircuitsError(f"{_CALLER}: there is nothing to draw")
    return _figure(
        series,
        log_x=log_x,
        log_y=log_y,
        title=title or f"{y_title or y} over {x_title or x}",
        x_title=x_title or x,
        y_title=y_title or y,
    )


def _figure(
    series: Mapping[str, Sequence[Any]],
    *,
    log_x: bool,
    log_y: bool,
    title: str,
    x_title: str,
    y_title: str,
) -> Any:
    """Draws the series, given as name -> (x, y, low, high); low and high are None for a series without a band."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for index, (name, (xs, ys, lower, upper)) in enumerate(series.items()):
        colour = COLOURS["light"][index % len(COLOURS["light"])]
        if lower is not None:
            red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
            figure.add_scatter(
                x=[*xs, *xs[::-1]],
                y=[*upper, *lower[::-1]],
                fill="toself",
                fillcolor=f"rgba({red},{green},{blue},0.2)",
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
                name=f"{name}, band",
            )
        figure.add_scatter(
            x=xs,
            y=ys,
            name=name,
            legendgroup=name,
            showlegend=len(series) > 1,
            mode="lines+markers" if len(xs) <= MARKED else "lines",
            line={"color": colour, "dash": ("solid", "dash", "dot")[index // len(COLOURS["light"]) % 3]},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "color": colour},
            hovertemplate=f"%{{x}}<br>%{{y:.4g}}<extra>{name}</extra>",
        )
    for update, log, columns, text in (
        (figure.update_xaxes, log_x, (0,), x_title),
        (figure.update_yaxes, log_y, (1, 2, 3), y_title),
    ):
        update(title_text=text)
        if log:
            values = np.concatenate(
                [item[column] for item in series.values() for column in columns if item[column] is not None]
            )
            if values.dtype.kind not in "biuf":
                raise CircuitsError(f"{_CALLER}: {text} holds {values.dtype}, which has no logarithm")
            values = values[np.isfinite(values) & (values > 0)].astype(float)
            if not len(values):
                raise CircuitsError(f"{_CALLER}: no value of {text} is above 0, where a logarithm is")
            update(**log_axis(values.min(), values.max()))
    figure.update_layout(height=420, margin={"t": 50 if len(series) > 1 else 20, "b": 60})
    bands = any(item[2] is not None for item in series.values())
    return finished(figure, title, "Bands: from the lower to the upper bound." if bands else "")


def _of_table(
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str | Sequence[str] | None,
    low: str | None,
    high: str | None,
) -> dict[str, Sequence[Any]]:
    """Returns the series of a table as (x, y, low, high) by name, told apart by the columns `by`."""
    columns = [] if by is None else [by] if isinstance(by, str) else list(by)
    if missing := [name for name in (x, y, *columns) if name not in table]:
        raise CircuitsError(
            f"{_CALLER}: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    if not pd.api.types.is_numeric_dtype(table[y]):
        raise CircuitsError(f"{_CALLER}: column {y} holds {table[y].dtype}, and no numbers")
    rows = table[table[y].notna()]
    # As text, step 100 comes before step 16.
    if not pd.api.types.is_string_dtype(table[x]):
        rows = rows.sort_values(x, kind="stable")
    low, high = (
        f"{y}_ci_{end}" if named == "auto" else named for named, end in ((low, "low"), (high, "high"))
    )
    bounded = low in table and high in table
    series: dict[str, Sequence[Any]] = {}
    for names, part in rows.groupby(columns, sort=False, dropna=False) if columns else [((y,), rows)]:
        name = ", ".join(map(str, names))
        if part[x].duplicated().any():
            raise CircuitsError(
                f"{_CALLER}: {name!r} has several rows at one {x}; say with by= which columns tell its series apart"
            )
        bounds: list[Any] = [None, None]
        if bounded and not part[[low, high]].isna().any(axis=None):
            bounds = [part[bound].to_numpy(dtype=float) for bound in (low, high)]
        series[name] = (part[x].to_numpy(), part[y].to_numpy(dtype=float), *bounds)
    return series


def _of_arrays(name: str, given: Any) -> Sequence[Any]:
    """Returns a series given as arrays as (x, y), with bounds where they are given or several runs make them."""
    parts = list(given) if isinstance(given, tuple) else [given]
    needed = f"{name!r} is y, (x, y), (x, y [run x]) or (x, y, low, high)"
    numbers = [read_numbers(part, _CALLER, needed) for part in parts[min(1, len(parts) - 1) :]]
    # x may be names or dates: only its order is used.
    first = parts[0] if len(parts) > 1 else np.arange(numbers[0].shape[-1] if numbers[0].ndim else 0)
    arrays = [
        np.asarray(first if isinstance(first, np.ndarray) else as_dense_tensor(first, _CALLER)),
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
            f"{_CALLER}: {name!r} is y, (x, y), (x, y [run x]) or (x, y, low, high), of one length; got {shapes}"
        )
    return (xs, ys, *(bounds or [None, None]))
