"""What a figure of a sweep holds: the numbers of its table, at the right places."""

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import CircuitsError, SweepResult, ablate, grid, heads, patch, permute, sweep
from circuits.figures import results


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "other": output[:, 3, 0]}


FEW = {"draws": 30, "flips": 30}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(n_layers=3, n_heads=2)


@pytest.fixture(scope="module")
def per_head(model, tokens):
    return sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)), metric=metric, **FEW)


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


def test_positions_become_a_heatmap_too(model, tokens, other_tokens):
    sites = ["resid_pre.0", "resid_pre.1", "resid_pre.2"]
    variants = grid(patch.activations, {"site": sites, "positions": range(6)}, source=other_tokens)
    result = sweep(model, tokens, variants, metric=metric, **FEW)
    trace = result.plot("last").data[0]
    assert np.shape(trace.z) == (3, 6)
    assert list(trace.x) == [str(position) for position in range(6)]
    value = result.frame.set_index(["variant", "metric"])["effect"][("resid_pre.2, position 4", "last")]
    assert trace.z[2][4] == value
    assert result.plot("last").layout.xaxis.title.text == "position"


def test_a_word_that_looks_like_a_tag_is_shown():
    frame = pd.DataFrame(
        {"metric": "m", "variant": list("abcd"), "draw": None, "checkpoint": None, "head": None}
    )
    frame = frame.assign(site="z", layer=[0, 0, 1, 1], position=[0, 1, 0, 1], effect=1.0)
    words = ["0 <|endoftext|>", "1 a&b"]
    assert list(results.sweep_figure(frame, ["m"], "auto", words).data[0].x) == [
        "0 &lt;|endoftext|>",
        "1 a&amp;b",
    ]
    maps = results.attention_figure(torch.eye(2).expand(1, 1, 2, 2), [0], words, {}, "t")
    assert list(maps.data[0].x) == list(maps.data[0].y) == ["0 &lt;|endoftext|>", "1 a&amp;b"]


def test_what_is_no_grid_becomes_points(model, tokens, per_head):
    few = sweep(model, tokens, {"a": ablate.zero("0.1"), "b": ablate.zero("mlp_out.1")}, metric=metric, **FEW)
    mixed = sweep(
        model,
        tokens,
        {**ablate.each(ablate.uniform, heads("all", model)), "all": ablate.uniform("all")},
        metric=metric,
        **FEW,
    )
    for result in (few, mixed):
        figure = result.plot()
        assert {trace.type for trace in figure.data} == {"scatter"}
        with pytest.raises(
            CircuitsError, match="a heatmap needs a grid, one variant per layer and head"
        ) as caught:
            result.plot(kind="heatmap")
        assert "\n" not in str(caught.value)
    figure = few.plot()
    for trace, name in zip(figure.data, ("last", "other"), strict=True):
        rows = few.frame[few.frame["metric"] == name]
        assert list(trace.x) == ["a", "b"]
        assert list(trace.y) == list(rows["value"])
        assert list(trace.error_y.array) == list(rows["value_ci_high"] - rows["value"])
        assert list(trace.error_y.arrayminus) == list(rows["value"] - rows["value_ci_low"])
    lines = [shape.y0 for shape in figure.layout.shapes]
    assert lines == list(few.baseline["value"])
    assert {trace.type for trace in per_head.plot(kind="points").data} == {"scatter"}
    with pytest.raises(CircuitsError, match="kind='bars'; choose from auto, points, heatmap"):
        few.plot(kind="bars")
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
