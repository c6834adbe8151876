"""The figure of ``gradients``: a map of each tensor's norm over its largest, and the norms themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, heat

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(logged: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Draws by stage a map of each tensor's norm over its largest, and below it the norms themselves.

    Args:
        logged: stage -> the norms, a row per step and a column per tensor.
    """
    import numpy as np

    panels = []
    for stage, norms in logged.items():
        finite = norms.replace([np.inf, -np.inf], np.nan)
        # Of one that is 0 or infinite nothing is a share.
        largest = norms.max().where(lambda each: (each > 0) & np.isfinite(each))
        title = f"{stage}: norm / its largest"
        axes: dict[str, Any] = {"across": "step", "down": "tensor", "numbers": False, "row": 26}
        panels.append(heat((norms / largest).T, title, unit="norm / largest", end=1.0, **axes))
        # A log axis has no room for 0.
        positive = finite.where(finite > 0)
        series = {str(name): Series(norms.index.tolist(), positive[name].tolist()) for name in norms}
        panels.append(curve(series, f"{stage}: norm", y="norm", log_y=True, height=320))
    return draw(panels)
