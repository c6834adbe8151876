"""Maps of heads edited one by one: their colours have a scale that says what they mean, and how far they go."""

import pandas as pd
import pytest

from interp_tasks.measurement.figure import figure
from interp_tasks.measurement.table import tidy

EFFECTS = [[-0.5, 0.25], [0.1, -2.0], [0.0, 1.0]]


def table(effects, steps=(4,)):
    """Rows of `heads`: a head of each layer alone, and all of them together."""
    shared = {
        "experiment": "heads",
        "run": "runs/a",
        "intervention": "uniform",
        "metric": "loss",
        "baseline": 1.0,
    }
    rows = []
    for step in steps:
        at = shared | {"ref": f"runs/a@{step}", "step": step}
        for layer, row in enumerate(effects):
            for head, effect in enumerate(row):
                name = {"variant": f"{layer}.{head}", "layer": layer, "head": head}
                rows.append(at | name | {"effect": effect, "value": 1 + effect})
        rows.append(at | {"variant": "all", "effect": 3.0, "value": 4.0})
    return tidy(pd.DataFrame(rows).assign(value_ci_low=0.5, value_ci_high=5.0))


@pytest.mark.parametrize("steps", [(4,), (1, 2, 3, 4)])
def test_a_map_of_heads_has_a_scale_with_the_ends_of_its_colours(steps) -> None:
    drawn = figure(table(EFFECTS, steps))
    (trace,) = drawn.select_traces({"type": "heatmap"})
    bar = trace.colorbar
    assert trace.showscale is not False
    assert bar.title.text == "effect"
    assert [trace.zmin, trace.zmax] == [-2, 2]
    # It stands beside its map, in a margin that has room for it and for its numbers.
    low, high = drawn.layout.yaxis.domain
    assert bar.y == pytest.approx((low + high) / 2)
    assert drawn.layout.margin.r >= 60


def test_a_scale_of_one_layer_has_room_for_its_numbers() -> None:
    drawn = figure(table(EFFECTS[:1]))
    (trace,) = drawn.select_traces({"type": "heatmap"})
    panels = drawn.layout.height - drawn.layout.margin.t - drawn.layout.margin.b
    assert trace.colorbar.len * panels >= 100


def test_marks_on_the_edge_of_a_panel_are_whole() -> None:
    marks = list(figure(table(EFFECTS)).select_traces({"mode": "markers"}))
    assert marks
    assert all(trace.cliponaxis is False for trace in marks)
