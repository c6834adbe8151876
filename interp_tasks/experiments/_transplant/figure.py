"""Maps of a transplant between many checkpoints: who receives the weights, by whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import heat

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Returns a row of maps for each component, one map per metric; its colours mean the same in each."""
    metrics = list(dict.fromkeys(frame["metric"]))
    panels = [
        component_map(
            rows[rows["metric"] == metric], f"{component}: {metric}", frame[frame["metric"] == metric]
        )
        for component, rows in frame.groupby("variant", sort=False)
        for metric in metrics
    ]
    return draw(panels, columns=len(metrics), share_y=True)


def component_map(rows: pandas.DataFrame, title: str, of_metric: pandas.DataFrame) -> Panel:
    """Returns one component's values, receivers down, sources across, both by step where steps differ."""
    import numpy as np

    cells = rows.assign(source=rows["intervention"].map(source_of)).pivot_table(
        index="ref", columns="source", values="value", sort=False, dropna=False
    )
    steps = rows.drop_duplicates("ref").set_index("ref")["step"]
    refs = [str(ref) for ref in cells.index]
    of_one_run = all("@" in ref for ref in refs) and len({ref.rpartition("@")[0] for ref in refs}) == 1
    if of_one_run:
        cells.index = [short(ref, refs) for ref in refs]
    elif steps.is_unique:
        cells.index = [str(steps[ref]) for ref in refs]
    cells.columns = [short(source, list(cells.columns)) for source in cells.columns]
    values = of_metric["value"].dropna()
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    text = cells.map("{:.3g}".format)
    # Colours of a metric that spans two powers of ten are those of its logarithm.
    log: Any = np.log10 if low > 0 and high > 100 * low else lambda number: number
    axes: dict[str, Any] = {"across": "weights of", "down": "run", "text": text, "bar": False}
    drawn = heat(log(cells), title, unit=title, start=float(log(low)), end=float(log(high)), **axes)
    hover = "run %{y}, weights of %{x}<br>%{text}<extra></extra>"
    return Panel(
        [{**drawn.traces[0], "hovertemplate": hover}], title, drawn.x, drawn.y, max(120, drawn.height), 180
    )


def source_of(intervention: str) -> str:
    """Returns the source of the weights that a row's ``intervention`` names."""
    return intervention.rpartition("source=")[2].removesuffix(")")


def short(source: str, sources: list[str]) -> str:
    """Returns a REF without its run, where all are of one run."""
    runs = {each.rpartition("@")[0] for each in sources}
    return source.rpartition("@")[2] if len(runs) == 1 else source
