"""`circuits.plots`: what figures hold, that each says what it shows, and the files of them."""

import json

import pandas as pd
import pytest
import torch

from circuits import CircuitsError, ablate, heads, plots, sweep
from circuits.figures import results
from circuits.figures.export import MISSING
from circuits.figures.panel_grid import TITLE_HEIGHT_KEY

FEW = {"draws": 30, "flips": 30}


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "other": output[:, 3, 0]}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(n_layers=3, n_heads=2)


@pytest.fixture(scope="module")
def per_head(model, tokens):
    return sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)), metric, **FEW)


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


# ---- Of sweeps


def test_a_word_that_looks_like_a_tag_is_shown():
    frame = pd.DataFrame(
        {"metric": "m", "variant": list("abcd"), "draw": None, "checkpoint": None, "head": None}
    )
    frame = frame.assign(site="z", layer=[0, 0, 1, 1], position=[0, 1, 0, 1], effect=1.0)
    words = ["0 <|endoftext|>", "1 a&b"]
    shown = ["0 &lt;|endoftext|&gt;", "1 a&amp;b"]
    assert list(results.sweep_figure(frame, ["m"], words).data[0].x) == shown
    maps = results.attention_figure(torch.eye(2)[1:].expand(1, 1, 1, 2), words, {}, "t")
    assert (list(maps.data[0].x), list(maps.data[0].y)) == (shown, shown[1:])
