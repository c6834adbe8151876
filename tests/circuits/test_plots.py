"""`circuits.plots`: what figures hold, that each says what it shows, and the files of them."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import CircuitsError, ablate, fourier, heads, lens, patterns, plots, sweep
from circuits.figures.export import MISSING, check_exporter
from circuits.figures.layout import TITLE_HEIGHT_KEY, log_axis
from circuits.fourier._modular_sum import CosineFit


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "other": output[:, 3, 0]}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(n_layers=3, n_heads=2)


@pytest.fixture(scope="module")
def per_head(model, tokens):
    return sweep(
        model, tokens, ablate.each(ablate.uniform, heads("all", model)), metric=metric, draws=30, flips=30
    )


def has_title_and_axes(figure):
    """A title, and a name on at least one axis of each direction, unless a panel says it."""
    assert figure.layout.title.text
    assert figure.layout.height > 100
    for axis in ("xaxis", "yaxis"):
        names = [figure.layout[one].title.text for one in figure.layout if str(one).startswith(axis)]
        assert any(names), f"no {axis} of the figure {figure.layout.title.text!r} has a name"
    return True


def test_a_table_an_array_and_a_sweep_give_the_same_map(per_head):
    of_sweep = plots.heads(per_head, "last").data[0]
    of_table = plots.heads(per_head.frame, "last").data[0]
    grid = per_head.frame[per_head.frame["metric"] == "last"].pivot(
        index="layer", columns="head", values="effect"
    )
    of_array = plots.heads(torch.tensor(grid.to_numpy(dtype=float))).data[0]
    for trace in (of_sweep, of_table, of_array):
        np.testing.assert_array_equal(trace.z, grid)
        assert list(trace.y) == ["0", "1", "2"]
    # Values that are never below 0 begin at 0; effects are symmetric.
    assert (of_sweep.zmin, plots.heads(np.ones((1, 2))).data[0].zmin) == (-of_sweep.zmax, 0)


def test_panels_are_of_one_metric_and_checkpoint_each(per_head):
    later = per_head.frame.assign(checkpoint="late", effect=2 * per_head.frame["effect"])
    both = pd.concat([per_head.frame.assign(checkpoint="early"), later])
    figure = plots.heads(both)
    titles = [note.text for note in figure.layout.annotations]
    assert titles == ["last<br>early", "last<br>late", "other<br>early", "other<br>late"]
    np.testing.assert_allclose(figure.data[1].z, 2 * np.array(figure.data[0].z))
    # The fourth panel is in a row of its own.
    assert figure.data[3].yaxis != figure.data[0].yaxis


def test_attention_of_tensors(model, tokens):
    maps = patterns.attention(model, tokens)
    whole = plots.attention(maps)
    assert len(whole.data) == len(plots.attention(maps.mean).data) == 6
    assert len(plots.attention(maps.mean[0]).data) == 2
    (one,) = plots.attention(maps.of((1, 1))).data
    np.testing.assert_array_equal(one.z, maps.of((1, 1)))
    assert f"{maps.n}" in whole.layout.title.text


def test_key_frequencies_are_marked():
    wave = torch.cos(2 * torch.pi * 3 * torch.arange(29) / 29)[:, None] + 0.01 * torch.randn(29, 4)
    found = fourier.spectrum(wave)
    other, key = plots.spectrum(found, fourier.key_frequencies(found, "of-largest")).data
    assert list(key.x) == [3]
    assert sum(other.y) + sum(key.y) == pytest.approx(100)
    assert key.marker.color != other.marker.color
    assert list(plots.spectrum(wave).data[0].x) == list(range(1, 15))
    assert list(found.bands().plot([3]).data[1].x) == [3]


def test_a_table_becomes_a_line_with_a_band_for_each_series():
    table = pd.DataFrame(
        {
            "step": [100, 0, 0, 100],
            "value": [1.0, 2.0, 20.0, 10.0],
            "value_ci_low": [0.5, 1.0, 10.0, 5.0],
            "value_ci_high": [2.0, 4.0, 40.0, 20.0],
            "variant": ["a", "a", "b", "b"],
        }
    )
    figure = plots.curve(table, by="variant", log_y=True)
    lines = {trace.name: trace for trace in figure.data if trace.showlegend}
    # In order of the steps, whatever that of the rows.
    assert list(lines["a"].x) == [0, 100]
    assert list(lines["a"].y) == [2, 1]
    assert [list(trace.y) for trace in figure.data if trace.name == "b, band"] == [[40, 20, 5, 10]]
    assert figure.layout.yaxis.type == "log"
    assert has_title_and_axes(figure)


def test_ticks_of_logarithms_do_not_crowd():
    wide = log_axis(1e-9, 1)
    assert wide["dtick"] == 2
    near = log_axis(0.02, 0.9)
    inside = [text for at, text in zip(near["tickvals"], near["ticktext"], strict=True) if 0.02 <= at <= 0.9]
    assert inside == ["0.02", "0.05", "0.1", "0.2", "0.5"]
    assert "1,000" in log_axis(900, 1100)["ticktext"]


def test_a_title_takes_room_of_its_own_and_gives_it_back(per_head):
    titled = per_head.plot()
    # Plotly's toolbar ends 25 pixels below the upper edge.
    assert titled.layout.title.pad.t >= 25
    bare = plots.untitled(titled)
    room = titled.layout.height - bare.layout.height
    assert room == titled.layout.meta[TITLE_HEIGHT_KEY] > 0
    assert titled.layout.margin.t - bare.layout.margin.t == room
    assert bare.layout.title.text is None
    assert titled.layout.title.text, "the figure itself keeps its title"
    again = plots.titled(titled, "a < b", "How to read it.")
    assert again.layout.title.text == "a &lt; b"
    assert again.layout.title.subtitle.text == "How to read it."
    assert plots.untitled(again).layout.height == bare.layout.height
    # Nothing to give back.
    assert plots.untitled(bare).layout.height == bare.layout.height


def test_every_result_plots_with_a_title_and_axes(model, tokens, other_tokens, per_head):
    templates = {"self": patterns.identity(6), "first": patterns.constant(6, 0)}
    scores = patterns.scores(model, tokens, templates, draws=20)
    classes = patterns.classify(scores)
    cosines = CosineFit(torch.randn(7).double(), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1))
    shares = lens(model, tokens, lambda output: output[:, -1, 0])
    figures = [
        per_head.plot(),
        per_head.plot(kind="points"),
        scores.plot(),
        scores.plot("bits"),
        classes.plot(),
        patterns.movement(model, tokens, other_tokens, draws=20).plot(),
        shares.plot(),
        cosines.plot(keys=[2]),
    ]
    assert all(map(has_title_and_axes, figures))
    assert classes.plot().data[0].text[0][0] == classes[0, 0]
    frame = scores.frame[scores.frame["template"] == "first"].set_index(["layer", "head"])
    assert scores.plot().data[1].z[2][1] == frame["score"][2, 1]
    bars, cells = shares.plot().data
    assert list(bars.y) == list(shares.layers["share"])
    assert cells.z[1][1] == pytest.approx(float(shares.shares["1.1"].mean()))
    assert list(cosines.plot(keys=[2]).data[1].y) == [float(cosines.coefficients[2])]


@pytest.mark.parametrize("kind", ["html", "json"])
def test_pages_and_json_need_no_exporter(per_head, tmp_path, kind):
    path = plots.save(per_head.plot(), tmp_path / f"map.{kind}")
    text = path.read_text(encoding="utf-8")
    if kind == "json":
        assert json.loads(text)["data"][0]["type"] == "heatmap"
    else:
        assert "plotly.js v" in text
        assert 'src="http' not in text


def test_a_picture_without_an_exporter_is_one_line_that_says_what_to_install(per_head, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.1")
    with pytest.raises(CircuitsError) as caught:
        plots.save(per_head.plot(), tmp_path / "map.png")
    assert str(caught.value) == f"plots.save: {MISSING}"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pictures(per_head, tmp_path):
    """Only where the exporter and its browser are."""
    try:
        check_exporter()
    except CircuitsError:
        pytest.skip(MISSING)
    plots.save(per_head.plot("last"), tmp_path / "map.svg")
    assert "Effect by layer and head" in (tmp_path / "map.svg").read_text(encoding="utf-8")


def test_a_curve_of_runs_has_their_median_and_their_range():
    steps, runs = np.arange(5), np.random.default_rng(0).random((3, 5))
    band, line = plots.curve({"seeds": (steps, runs)}).data
    np.testing.assert_array_equal(line.y, np.median(runs, axis=0))
    np.testing.assert_array_equal(band.y[:5], runs.max(axis=0))
    np.testing.assert_array_equal(band.y[5:], runs.min(axis=0)[::-1])
    assert list(plots.curve({"bare": runs[0]}).data[0].x) == list(steps)
