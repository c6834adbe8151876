"""Styles all figures: the template, a title with an explanation below it, logarithmic axes and error bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape, unescape
from textwrap import wrap
from typing import Any

from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.layout import ROOM_KEY, laid_out
from circuits.figures.palette import template
from circuits.tensors import as_dense_tensor

#: Pixels: height of a title with plotly's toolbar above it, and of a line of the subtitle; plotly's width and height.
TITLE, LINE, WIDTH, HEIGHT = 54, 17, 900, 450
#: Mean width in pixels of a character of the subtitle.
CHARACTER = 6.9
#: Ticks of a logarithmic axis as powers of ten; the font is smaller, because plotly enlarges powers by a quarter.
POWERS: dict[str, Any] = {"exponentformat": "power", "tickfont": {"size": 10}}
#: The key in a figure's meta under which `titled` notes the height that it added, so that `untitled` can remove it.
TITLE_HEIGHT_KEY = "room for the title"
#: The key in a figure's meta of its subtitle as it was given: in one line, without what short labels mean.
SUBTITLE_KEY = "subtitle"

#: The key in a figure's meta of its subtitle in a picture, where the other one speaks of what a page does.
STILL_KEY = "subtitle of a picture"


def finished(figure: Any, title: str, subtitle: str = "") -> Any:
    """Gives the figure the palette's template, a title and a subtitle that explains how to read the figure."""
    figure.update_layout(template=template("light"))
    return titled(figure, title, subtitle)


def titled(figure: Any, title: str, subtitle: str = "") -> Any:
    """Returns the figure with a title above its panels: the figure becomes higher, and its panels keep their size.

    A title that the figure has is replaced.
    """
    figure = untitled(figure)
    layout = figure.layout
    whole = f"{subtitle} {laid_out(figure)}".strip()
    subtitle_lines = wrap(whole, int(((layout.width or WIDTH) - 40) / CHARACTER))
    title_height = TITLE + LINE * len(subtitle_lines)
    meta = dict(layout.meta) if isinstance(layout.meta, Mapping) else {}
    # A figure without a margin of its own has the template's.
    margin_top = layout.margin.t if layout.margin.t is not None else layout.template.layout.margin.t
    return figure.update_layout(
        title={
            "text": escape(title, quote=False),
            "subtitle": {
                "text": "<br>".join(escape(line, quote=False) for line in subtitle_lines),
                "font": {"size": 12},
            },
            "font": {"size": 16},
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"l": 16, "t": 28},
        },
        height=(layout.height or HEIGHT) + title_height,
        margin={"t": (100 if margin_top is None else margin_top) + title_height},
        meta=meta | {TITLE_HEIGHT_KEY: title_height, SUBTITLE_KEY: subtitle},
    )


def untitled(figure: Any) -> Any:
    """Returns a copy of the figure without the title and the height that `titled` added."""
    meta = figure.layout.meta
    copy = type(figure)(figure)
    if not isinstance(meta, Mapping) or TITLE_HEIGHT_KEY not in meta:
        return copy
    title_height = meta[TITLE_HEIGHT_KEY]
    copy.layout.title = None
    noted = (TITLE_HEIGHT_KEY, SUBTITLE_KEY)
    copy.layout.meta = {key: value for key, value in meta.items() if key not in noted} or None
    return copy.update_layout(
        height=copy.layout.height - title_height, margin={"t": copy.layout.margin.t - title_height}
    )


def fitted(figure: Any, width: int) -> Any:
    """Returns a copy for a picture of a width: its subtitle broken anew, no texts in cells without room for them."""
    copy = type(figure)(figure)
    copy.layout.width = width
    for trace in copy.data:
        if isinstance(trace.meta, Mapping) and trace.meta.get(ROOM_KEY, 0) > width:
            trace.update({"visible": False} if trace.type == "scatter" else {"texttemplate": ""})
    meta = copy.layout.meta
    if not isinstance(meta, Mapping) or SUBTITLE_KEY not in meta:
        return copy
    return titled(copy, unescape(copy.layout.title.text or ""), meta[SUBTITLE_KEY])


def log_axis(smallest: int | float, largest: int | float) -> dict[str, Any]:
    """Returns a logarithmic axis with few ticks: powers of ten, or, below two decades, multiples of these."""
    powers = math.log10(largest / smallest)
    if not math.isfinite(powers):
        return {"type": "log"}
    if powers >= 2:
        return {"type": "log", **POWERS, "dtick": max(1, round(powers / 4))}
    digits = (1, 2, 5) if powers > 0.6 else range(1, 10)
    decades = range(math.floor(math.log10(smallest)), math.ceil(math.log10(largest)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks],
    }


def read_numbers(values: Any, caller: str, needed: str) -> Any:
    """Returns the values as an array of floats.

    Raises:
        CircuitsError: with the text `needed`, for values that are no real numbers, or rows of several lengths.
    """
    import numpy as np

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


def interval(values: Any, low: Any, high: Any) -> dict[str, Any]:
    """Returns plotly's settings of error bars from `low` to `high`."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [float(top - value) for value, top in zip(values, high, strict=True)],
        "arrayminus": [float(value - bottom) for value, bottom in zip(values, low, strict=True)],
        "thickness": 1.5,
    }
