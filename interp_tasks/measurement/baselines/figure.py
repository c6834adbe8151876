"""The figure of models beside methods: a panel per metric, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, of_rows

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each metric over the variations of the data, of checkpoints and of the methods beside them."""
    frame = frame[frame["value"].notna() & frame["value_ci_low"].notna()]
    refs, methods = (list(dict.fromkeys(frame[column])) for column in ("ref", "intervention"))
    order = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(dict.fromkeys(frame["variant"])),
    }
    panels = []
    for metric, rows in frame.groupby("metric", sort=False):
        series: dict[str, Series] = {}
        for index, ref in enumerate(refs):
            part = rows[rows["ref"] == ref].drop_duplicates("variant")
            series[str(ref)] = of_rows(part, "variant", look=index)
        for index, method in enumerate(methods, start=len(refs)):
            # The examples are the same for all checkpoints, and so is what a method makes of them.
            part = rows[(rows["intervention"] == method) & rows["baseline"].notna()].drop_duplicates(
                "variant"
            )
            dash = {"line": {"dash": "dot" if method == "truth" else "dash"}}
            if len(part):
                series[str(method)] = of_rows(part, "variant", "baseline", style=dash, look=index)
        log = rows[["value", "value_ci_low", "value_ci_high", "baseline"]].min().min() > 0
        axes: dict[str, Any] = {"x": "variation of the data", "y": str(metric), "x_axis": order}
        panels.append(curve(series, log_y=bool(log), bars=True, height=280, **axes))
    return draw(panels)
