"""The panel of logged curves: their drops in bold, plateaus by theory dotted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.panels import Series, curve

if TYPE_CHECKING:
    from circuits.figures.layout import Panel
    from interp_tasks.measurement.run_logs import Curve


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
