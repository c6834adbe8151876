"""Panels in a grid: where they stand, what is said once, and which kinds of panels hold which numbers."""

import numpy as np
import pandas as pd
import pytest

from circuits.figures.panel_grid import BAR, NARROWEST, draw_panels, least_readable_width
from circuits.figures.panel_kinds import Series, bars, curve, heatmap, points, spectrum


def panels():
    one = {"a": Series([0, 10], [1.0, 2.0], [0.5, 1.5], [1.5, 2.5])}
    return [
        curve(one, "curve"),
        points({"b": Series(["p", "q"], [1.0, 2.0])}, "points"),
        bars({"b": Series(["p", "q"], [1.0, 2.0])}, "bars"),
        points({"c": Series([1.0], [2.0])}, "scatter", categories=False),
        spectrum([1, 2, 3], [1.0, 2.0, 3.0], [2], "spectrum", noise=[1.0, 1.0, 1.0]),
        heatmap(np.eye(3), "map", signed=True),
    ]


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_panels_stand_in_rows_without_touching(columns):
    figure = draw_panels(panels(), "Title", "How to read it.", columns=columns)
    layout = figure.layout
    height = layout.height - layout.margin.t - layout.margin.b
    for number, panel in enumerate(panels()):
        end = str(number + 1) if number else ""
        x, y = layout[f"xaxis{end}"].domain, layout[f"yaxis{end}"].domain
        # The highest panel of a row says how high they are.
        assert (y[1] - y[0]) * height >= panel.height - 1
        for other in range(number):
            name = str(other + 1) if other else ""
            left, down = layout[f"xaxis{name}"].domain, layout[f"yaxis{name}"].domain
            assert left[1] < x[0] + 1e-9 or down[0] > y[1] + 1e-9
    assert [note.text for note in layout.annotations] == [panel.title for panel in panels()]
    assert least_readable_width(figure) >= NARROWEST
    assert least_readable_width(draw_panels(panels(), columns=3)) > least_readable_width(
        draw_panels(panels(), columns=2)
    )


def test_colour_bars_stand_beside_their_panels_and_never_lower_than_their_numbers():
    figure = draw_panels([heatmap(np.eye(2), "a"), heatmap(np.eye(2), "b", bar=False)], columns=2)
    with_bar, without = figure.data
    assert with_bar.colorbar.x == figure.layout.xaxis.domain[1]
    assert (with_bar.showscale, without.showscale) == (True, False)
    height = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    assert with_bar.colorbar.len * height == pytest.approx(100)
    assert draw_panels([heatmap(np.eye(2))]).layout.margin.r > BAR


def test_signed_maps_have_no_colour_at_0_and_others_begin_there():
    values = pd.DataFrame([[0.5, -2.0]], index=["l"], columns=["h", "i"])
    (trace,) = heatmap(values, signed=True).traces
    assert (trace["zmin"], trace["zmax"], trace["autocolorscale"]) == (-2.0, 2.0, True)
    assert trace["text"] == [["0.5", "-2"]]
    (trace,) = heatmap(values.abs(), start=0.1, end=3.0, numbers=False).traces
    assert (trace["zmin"], trace["zmax"], "text" in trace) == (0.1, 3.0, False)
