"""Maps of a transplant between many checkpoints: who receives the weights, by whose they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import SEQUENTIAL, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a row of a map, and between maps with their titles.
ROW, GAP, TOP, BOTTOM = 30, 110, 40, 70
#: Up to so many sources a cell has room for its number.
WITH_NUMBERS = 5


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Returns a row of maps for each component, one map per metric."""
    from plotly.subplots import make_subplots

    components, metrics = list(dict.fromkeys(frame["variant"])), list(dict.fromkeys(frame["metric"]))
    receivers = list(dict.fromkeys(frame["ref"]))
    height = max(ROW * len(receivers), 120)
    total_height = height * len(components) + GAP * (len(components) - 1)
    figure = make_subplots(
        rows=len(components),
        cols=len(metrics),
        shared_yaxes=True,
        vertical_spacing=GAP / total_height if len(components) > 1 else 0,
        horizontal_spacing=0.03,
        subplot_titles=[f"{component}: {metric}" for component in components for metric in metrics],
    )
    for column, metric in enumerate(metrics, start=1):
        of_metric = frame[frame["metric"] == metric]
        colours = Colours.of(of_metric)
        for row, component in enumerate(components, start=1):
            part = of_metric[of_metric["variant"] == component]
            figure.add_trace(heatmap(part, metric, colours), row=row, col=column)
            for update in (figure.update_xaxes, figure.update_yaxes):
                update(type="category", showgrid=False, row=row, col=column)
            figure.update_yaxes(autorange="reversed", row=row, col=column)
            figure.update_xaxes(title_text="weights of", row=row, col=column)
        figure.update_yaxes(title_text="run", col=1)
    figure.update_layout(
        height=TOP + total_height + BOTTOM, margin={"t": TOP, "b": BOTTOM}, template=template("light")
    )
    figure.update_annotations(font_size=13)
    return figure


class Colours:
    """From a value of a metric to its place in the colours, the same in all maps of that metric."""

    def __init__(self, smallest: float, largest: float) -> None:
        self.logarithmic = smallest > 0 and largest > 100 * smallest
        self.low, self.high = self(smallest), self(largest)

    @classmethod
    def of(cls, part: pandas.DataFrame) -> Colours:
        values = part["value"].dropna()
        return cls(float(values.min()), float(values.max())) if len(values) else cls(0.0, 1.0)

    def __call__(self, value: float) -> float:
        return math.log10(value) if self.logarithmic and value > 0 else value


def heatmap(part: pandas.DataFrame, metric: str, colours: Colours) -> dict[str, Any]:
    """Draws one component's values, receivers down, sources across, both by step where steps differ."""
    sources = part["intervention"].map(source_of)
    cells = part.assign(source=sources).pivot_table(
        index="ref", columns="source", values="value", sort=False, dropna=False
    )
    steps = part.drop_duplicates("ref").set_index("ref")["step"]
    refs = [str(ref) for ref in cells.index]
    of_one_run = all("@" in ref for ref in refs) and len({ref.rpartition("@")[0] for ref in refs}) == 1
    by_step = [str(steps[ref]) if steps.is_unique else ref for ref in refs]
    down = [short(ref, refs) for ref in refs] if of_one_run else by_step
    across = [short(source, list(cells.columns)) for source in cells.columns]
    values = cells.to_numpy(dtype=float)
    return {
        "type": "heatmap",
        "x": across,
        "y": down,
        "z": [[colours(value) for value in row] for row in values.tolist()],
        "customdata": values.tolist(),
        "text": [[f"{value:.3g}" for value in row] for row in values.tolist()],
        "texttemplate": "%{text}" if len(across) <= WITH_NUMBERS else "",
        # Named: logarithms are negative, and a scale that plotly chooses by signs would be another one for them.
        "colorscale": SEQUENTIAL,
        "zmin": colours.low,
        "zmax": colours.high,
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": f"run %{{y}}, weights of %{{x}}<br>{metric} %{{customdata:.4g}}<extra></extra>",
    }


def source_of(intervention: str) -> str:
    """Returns the source of the weights that a row's ``intervention`` names."""
    return intervention.rpartition("source=")[2].removesuffix(")")


def short(source: str, sources: list[str]) -> str:
    """Returns a REF without its run, where all are of one run."""
    runs = {each.rpartition("@")[0] for each in sources}
    return source.rpartition("@")[2] if len(runs) == 1 else source
