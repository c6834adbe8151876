"""`circuits.plots`: what figures hold, that each says what it shows, and the files of them."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import CircuitsError, SweepResult, ablate, fourier, heads, lens, patterns, permute, plots, sweep
from circuits.figures import results
from circuits.figures.export import MISSING
from circuits.figures.layout import TITLE_HEIGHT_KEY

FEW = {"draws": 30, "flips": 30}


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "other": output[:, 3, 0]}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(n_layers=3, n_heads=2)


@pytest.fixture(scope="module")
def per_head(model, tokens):
    return sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)), metric, **FEW)


def has_title_and_axes(figure):
    """A title, and a name on at least one axis of each direction, unless a panel says it."""
    assert figure.layout.title.text
    assert figure.layout.height > 100
    for axis in ("xaxis", "yaxis"):
        names = [figure.layout[one].title.text for one in figure.layout if str(one).startswith(axis)]
        assert any(names), f"no {axis} of the figure {figure.layout.title.text!r} has a name"
    return True


def test_key_frequencies_are_marked():
    wave = torch.cos(2 * torch.pi * 3 * torch.arange(29) / 29)[:, None] + 0.01 * torch.randn(29, 4)
    found = fourier.spectrum(wave)
    other, key = plots.spectrum(found, fourier.key_frequencies(found, "of-largest")).data
    assert list(key.x) == [3]
    assert sum(other.y) + sum(key.y) == pytest.approx(100)
    assert key.marker.color != other.marker.color
    assert list(plots.spectrum(wave).data[0].x) == list(range(1, 15))
    bands = found.bands().plot([3], title="Bands")
    assert (list(bands.data[1].x), bands.layout.title.text) == ([3], "Bands")


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
    shares = lens(model, tokens, lambda output: output[:, -1, 0])
    figures = [
        per_head.plot(),
        scores.plot(),
        scores.plot("bits"),
        classes.plot(),
        plots.heads(patterns.movement(model, tokens, other_tokens, draws=20), column="distance"),
        shares.plot(),
    ]
    assert all(map(has_title_and_axes, figures))
    assert classes.plot().data[0].text[0][0] == classes[0, 0]
    frame = scores.frame[scores.frame["template"] == "first"].set_index(["layer", "head"])
    assert scores.plot().data[1].z[2][1] == frame["score"][2, 1]
    bars, cells = shares.plot().data
    assert list(bars.y) == list(shares.layers["share"])
    assert cells.z[1][1] == pytest.approx(float(shares.shares["1.1"].mean()))


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
    monkeypatch.setattr("plotly.io._kaleido.kaleido_available", lambda: False)
    with pytest.raises(CircuitsError) as caught:
        plots.save(per_head.plot(), tmp_path / "map.png")
    assert str(caught.value).startswith("plots.save: no picture was made (")
    assert str(caught.value).endswith(MISSING)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_curve_of_runs_has_their_median_and_their_range():
    steps, runs = np.arange(5), np.random.default_rng(0).random((3, 5))
    band, line = plots.curve({"seeds": (steps, runs)}).data
    np.testing.assert_array_equal(line.y, np.median(runs, axis=0))
    np.testing.assert_array_equal(band.y[:5], runs.max(axis=0))
    np.testing.assert_array_equal(band.y[5:], runs.min(axis=0)[::-1])
    assert list(plots.curve({"bare": runs[0]}).data[0].x) == list(steps)


# ---- Of sweeps


def test_heads_become_a_heatmap_with_layer_0_on_top(per_head):
    figure = per_head.plot()
    assert [trace.type for trace in figure.data] == ["heatmap", "heatmap"]
    for trace, name in zip(figure.data, ("last", "other"), strict=True):
        rows = per_head.frame[per_head.frame["metric"] == name]
        assert list(trace.x) == ["0", "1"]
        assert list(trace.y) == ["0", "1", "2"]
        for _, row in rows.iterrows():
            assert trace.z[row["layer"]][row["head"]] == row["effect"]
        # No effect is white: the colours are symmetric about 0.
        assert trace.zmax == -trace.zmin == np.abs(rows["effect"]).max()
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.xaxis.title.text == "head"
    assert figure.layout.yaxis.title.text == "layer"
    assert [note.text for note in figure.layout.annotations] == ["last", "other"]
    assert len(per_head.plot("other").data) == 1
    # A table and an array give the same map; values that are never below 0 begin at 0.
    for same in (plots.heads(per_head.frame, "other"), plots.heads(torch.tensor(np.array(trace.z, float)))):
        np.testing.assert_array_equal(same.data[0].z, trace.z)
    assert plots.heads(np.ones((1, 2))).data[0].zmin == 0


def test_a_word_that_looks_like_a_tag_is_shown():
    frame = pd.DataFrame(
        {"metric": "m", "variant": list("abcd"), "draw": None, "checkpoint": None, "head": None}
    )
    frame = frame.assign(site="z", layer=[0, 0, 1, 1], position=[0, 1, 0, 1], effect=1.0)
    words = ["0 <|endoftext|>", "1 a&b"]
    shown = ["0 &lt;|endoftext|&gt;", "1 a&amp;b"]
    assert list(results.sweep_figure(frame, ["m"], words).data[0].x) == shown
    maps = results.attention_figure(torch.eye(2).expand(1, 1, 2, 2), words, {}, "t")
    assert list(maps.data[0].x) == list(maps.data[0].y) == shown


def test_what_is_no_grid_becomes_points(model, tokens, per_head):
    each = ablate.each(ablate.uniform, heads("all", model))
    few = sweep(model, tokens, {"a": ablate.zero("0.1"), "b": ablate.zero("mlp_out.1")}, metric, **FEW)
    mixed = sweep(model, tokens, {**each, "all": ablate.uniform("all")}, metric, **FEW)
    for result in (few, mixed):
        figure = result.plot()
        assert {trace.type for trace in figure.data} == {"scatter"}
    figure = few.plot()
    for trace, name in zip(figure.data, ("last", "other"), strict=True):
        rows = few.frame[few.frame["metric"] == name]
        assert list(trace.x) == ["a", "b"]
        assert list(trace.y) == list(rows["value"])
        assert list(trace.error_y.array) == list(rows["value_ci_high"] - rows["value"])
        assert list(trace.error_y.arrayminus) == list(rows["value"] - rows["value_ci_low"])
    lines = [shape.y0 for shape in figure.layout.shapes]
    assert lines == list(few.baseline["value"])
    with pytest.raises(CircuitsError, match="no metric 'loss'; it has last, other"):
        few.plot("loss")


def test_draws_and_checkpoints_are_traces_of_their_own(model, tokens, make_model):
    other = make_model(3, n_layers=3, n_heads=2)
    variants = {"zero": ablate.zero("0.1"), "places": permute.draws(3)}

    def at_both(variants):
        models = {"early": other, "late": model}
        return SweepResult.concat(
            {name: sweep(one, tokens, variants, metric, **FEW) for name, one in models.items()}
        )

    result = at_both(variants)
    figure = result.plot("last")
    assert [trace.name for trace in figure.data] == ["early", "early, each draw", "late", "late, each draw"]
    frame = result.frame[(result.frame["metric"] == "last") & (result.frame["checkpoint"] == "late")]
    assert list(figure.data[2].x) == ["zero", "places"]
    assert list(figure.data[2].y) == list(frame[frame["draw"].isna()]["value"])
    assert list(figure.data[3].y) == list(frame[frame["draw"].notna()]["value"])
    assert figure.data[3].error_y.array is None
    assert [shape.y0 for shape in figure.layout.shapes] == list(
        result.baseline[result.baseline["metric"] == "last"]["value"]
    )
    # One map cannot show two checkpoints.
    both = at_both(ablate.each(ablate.uniform, heads("all", model)))
    assert {trace.type for trace in both.plot().data} == {"scatter"}
