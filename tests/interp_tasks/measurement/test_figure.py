"""The figure of the table: points beside baselines, lines over the steps of a run, maps of heads with a scale."""

import pandas as pd

from interp_tasks.measurement.result import Result, tidy_frame


def result(variants=2, steps=4, experiment="ablation", runs=1):
    """Variant v has the effect v + 1, which grows with the step; the steps are given in descending order."""
    rows = [
        {
            "experiment": experiment,
            "run": f"runs/{run}",
            "ref": f"runs/{run}@{step}",
            "step": step,
            "variant": f"0.{v}",
            "intervention": "uniform",
            "layer": 0,
            "head": v,
            "metric": metric,
            "value": 1.0 + (v + 1) * step,
            "value_ci_low": 0.5 + (v + 1) * step,
            "value_ci_high": 2.0 + (v + 1) * step,
            "baseline": 1.0 + run,
            "effect": (v + 1.0) * step,
        }
        for run in range(runs)
        for step in range(steps, 0, -1)
        for v in range(variants)
        for metric in ("loss", "other")
    ]
    return Result(experiment, tidy_frame(pd.DataFrame(rows)))


def lines(figure):
    return [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "lines+markers"]


def test_values_of_a_run_are_lines_over_steps_with_bands_beside_the_unedited_model():
    found = result()
    figure = found.plot()
    assert [line.name for line in lines(figure)] == ["unedited", "0.0", "0.1"] * 2
    unedited, first, second = lines(figure)[:3]
    assert list(first.x) == [1, 2, 3, 4]
    assert (list(unedited.y), list(first.y), list(second.y)) == ([1] * 4, [2, 3, 4, 5], [3, 5, 7, 9])
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert [band.legendgroup for band in bands] == ["0.0", "0.1"] * 2
    assert list(bands[0].y) == [3, 4, 5, 6, 4.5, 3.5, 2.5, 1.5]
    # A name stands in the legend once.
    assert [line.showlegend for line in lines(figure)] == [True] * 3 + [False] * 3
    [shown] = found.figures()
    assert shown.title == "Every metric, edited and unedited over training"
    assert "step" in [axis.title.text for axis in figure.select_xaxes()]


def test_values_over_two_powers_of_ten_have_a_log_axis_also_without_baselines():
    frame = result().frame.assign(baseline=float("nan"))
    shown = [Result("x", frame.assign(value=frame["value"] ** power)).plot() for power in (1, 4)]
    assert [figure.layout.yaxis.type for figure in shown] == [None, "log"]


def test_heads_edited_one_by_one_are_a_map_by_step():
    found = result(experiment="heads")
    maps = [trace for trace in found.plot().data if trace.type == "heatmap"]
    assert len(maps) == 2
    assert (list(maps[0].x), list(maps[0].y)) == (["1", "2", "3", "4"], ["0.0", "0.1"])
    assert [list(row) for row in maps[0].z] == [[1, 2, 3, 4], [2, 4, 6, 8]]
    assert found.figures()[0].title == "Effect of each head alone, and of heads together over training"
