"""What all figures share: the template, a title with a line of explanation, and axes of logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from textwrap import wrap
from typing import Any

from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.palette import template
from circuits.tensors import as_dense_tensor

#: Pixels: a title, a line of what stands below it, and plotly's own width and height of a figure.
TITLE, LINE, WIDTH, HEIGHT = 38, 17, 900, 450
#: Mean width of a character of the line below a title.
CHARACTER = 6.9
#: Ticks of a logarithmic axis as powers of ten, which plotly writes a quarter larger than all others.
POWERS: dict[str, Any] = {"exponentformat": "power", "tickfont": {"size": 10}}
#: Where it is noted how much room a title took, for whoever says the title in another place.
ROOM = "room for the title"


def finished(figure: Any, title: str, subtitle: str = "") -> Any:
    """The figure in the template of the palette, with a title and, below it, how to read the figure."""
    figure.update_layout(template=template("light"))
    return titled(figure, title, subtitle)


def titled(figure: Any, title: str, subtitle: str = "") -> Any:
    """The figure with a title above all that is there: it becomes higher, and its panels stay as they are.

    A figure that has one gets this one instead.
    """
    figure = untitled(figure)
    layout = figure.layout
    lines = wrap(subtitle, int(((layout.width or WIDTH) - 40) / CHARACTER))
    room = TITLE + LINE * len(lines)
    meta = dict(layout.meta) if isinstance(layout.meta, Mapping) else {}
    # Where a figure says nothing of a margin, that of the template holds.
    top = layout.margin.t if layout.margin.t is not None else layout.template.layout.margin.t
    return figure.update_layout(
        title={
            "text": escape(title, quote=False),
            "subtitle": {
                "text": "<br>".join(escape(line, quote=False) for line in lines),
                "font": {"size": 12},
            },
            "font": {"size": 16},
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"l": 16, "t": 12},
        },
        height=(layout.height or HEIGHT) + room,
        margin={"t": (100 if top is None else top) + room},
        meta=meta | {ROOM: room},
    )


def untitled(figure: Any) -> Any:
    """A copy of the figure without the title that `titled` gave it, and as high as before."""
    meta = figure.layout.meta
    found = type(figure)(figure)
    if not isinstance(meta, Mapping) or ROOM not in meta:
        return found
    room = meta[ROOM]
    found.layout.title = None
    found.layout.meta = {key: value for key, value in meta.items() if key != ROOM} or None
    return found.update_layout(height=found.layout.height - room, margin={"t": found.layout.margin.t - room})


def log_axis(smallest: int | float, largest: int | float) -> dict[str, Any]:
    """A logarithmic axis whose ticks do not crowd: powers of ten, or, where there are few of them, 1, 2 and 5."""
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
    """Numbers as an array of floats.

    Raises:
        CircuitsError: naming what is needed, for what holds none, or rows of several lengths.
    """
    import numpy as np

    given = as_dense_tensor(values, caller)
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        found = array if np.iscomplexobj(array) else array.astype(float)
    except (TypeError, ValueError):
        raise CircuitsError(
            f"{caller}: {needed}; got {type(values).__name__} without numbers in rows of one length"
        ) from None
    if np.iscomplexobj(found):
        raise CircuitsError(f"{caller}: {needed}; got complex numbers: choose their real, imag or abs")
    return found


def interval(values: Any, low: Any, high: Any) -> dict[str, Any]:
    """Error bars from `low` to `high`, plotly's way."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [float(top - value) for value, top in zip(values, high, strict=True)],
        "arrayminus": [float(value - bottom) for value, bottom in zip(values, low, strict=True)],
        "thickness": 1.5,
    }
