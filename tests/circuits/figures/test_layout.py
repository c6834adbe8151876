"""Every figure obeys the rules of the layout: labels, legends, titles of panels, axes and the ends of colour scales."""

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from plotly.subplots import make_subplots

from circuits import ablate, fourier, heads, lens, patterns, plots, sweep
from circuits.figures import layout
from circuits.figures.attention_maps import largest_choice, ticks
from circuits.figures.layout import CHARACTER, LINE, NARROW, OPEN_SIZE, laid_out
from circuits.figures.names import LONGEST_SHORT
from circuits.figures.style import fitted

LONG = [f"zoo:matrix-completion-7x7/seed-{seed}@the-{seed}-checkpoint" for seed in range(6)]


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "other": output[:, 3, 0]}


@pytest.fixture(scope="module")
def figures(make_model, tokens):
    model = make_model(n_layers=3, n_heads=2)
    result = sweep(
        model, tokens, ablate.each(ablate.uniform, heads("all", model)), metric=metric, draws=30, flips=30
    )
    named = go.Figure(
        [go.Scatter(x=LONG, y=list(range(6)), name=name, mode="markers") for name in LONG],
        {"height": 400, "xaxis": {"title": {"text": "run"}}, "yaxis": {"title": {"text": "value"}}},
    )
    scores = patterns.scores(model, tokens, {"self": patterns.identity(6)}, draws=20)
    return {
        "heatmaps": result.plot(),
        "points": result.plot(kind="points"),
        "attention": plots.attention(patterns.attention(model, tokens)),
        "heads": plots.heads(result, "last"),
        "scores": scores.plot(),
        "signed scores": scores.plot("effect"),
        "classes": patterns.classify(scores).plot(),
        "spectrum": plots.spectrum(fourier.spectrum(torch.randn(23, 4)), [2, 3]),
        "curve": plots.curve({name: [1, 2, 3] for name in LONG}, x_title="step", y_title="loss"),
        "lens": lens(model, tokens).plot(),
        "long names": plots.titled(named, "Long names"),
    }


def shown_labels(figure, name):
    """The labels of an axis of categories, as they are drawn."""
    axis = figure.layout[name]
    if axis.ticktext:
        return list(axis.ticktext)
    letter, number = name[0], name[5:]
    found = [
        trace[letter]
        for trace in figure.data
        if getattr(trace, letter, None) is not None and (trace[f"{letter}axis"] or letter) == letter + number
    ]
    return [str(value) for values in found for value in values if isinstance(value, str)]


def test_every_figure_obeys_the_rules(figures):
    for name, figure in figures.items():
        layout_of = figure.layout
        axes = [str(one) for one in layout_of if str(one)[1:].startswith("axis")]
        for letter in "xy":
            titles = [layout_of[one].title.text for one in axes if one[0] == letter]
            assert any(titles), f"{name}: no title of an axis {letter}"
        for axis in axes:
            labels = [layout._length(label) for label in dict.fromkeys(shown_labels(figure, axis))]
            span = layout_of[axis].domain or (0, 1)
            each = NARROW * (span[1] - span[0]) / CHARACTER / max(len(labels), 1)
            # Plotly turns short labels that have no room.
            room = max(each, LONGEST_SHORT) if axis[0] == "x" else layout.LONGEST_BESIDE
            assert max(labels, default=0) <= room, f"{name}: the labels of {axis} have no room"
        if (legend := layout_of.legend).orientation != "v" and legend.y is not None:
            assert legend.y >= 1 or legend.yref == "container" or legend.y <= 0, f"{name}: legend on a panel"
        for note in layout_of.annotations:
            columns = [axis.domain for axis in figure.select_xaxes() if axis.domain]
            span = next((e - b for b, e in columns if b - 1e-9 <= note.x <= e + 1e-9), 1)
            if note.yref == "paper" and note.yanchor == "bottom":
                assert layout._length(note.text) * CHARACTER * (note.font.size or 13) / 13 <= max(
                    NARROW * span, (LONGEST_SHORT + 1) * CHARACTER
                ), f"{name}: {note.text}"
        for trace in figure.select_traces({"type": "heatmap"}):
            values = torch.as_tensor(trace.z).double().nan_to_num()
            if trace.zmin is not None and bool((values < 0).any()):
                assert trace.zmin == -trace.zmax, f"{name}: no effect is not in the middle of the colours"
            elif trace.zmin is not None and trace.zmin < 0:
                assert trace.zmin == -trace.zmax
            else:
                assert trace.zmin in (0, None), f"{name}: the scale does not begin at 0"


def test_short_labels_are_explained_and_a_second_call_changes_nothing(figures):
    figure = figures["long names"]
    assert all(len(text) <= 12 for text in figure.layout.xaxis.ticktext)
    said = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "zoo:matrix-completion-7x7/seed-" in said
    before = figure.to_json()
    laid_out(figure)
    assert figure.to_json() == before


def test_a_long_legend_stands_below_with_room_of_its_own():
    figure = go.Figure(
        [go.Scatter(y=[1, 2], name=f"quite a long name, {name}") for name in "abcdefgh"],
        {"height": 300, "margin": {"b": 50}, "legend": {"orientation": "h", "y": 1.04}},
    )
    laid_out(figure)
    assert (figure.layout.legend.yref, figure.layout.legend.y) == ("container", 0)
    assert figure.layout.height - 300 == figure.layout.margin.b - 50 >= 3 * LINE


def test_titles_of_panels_get_lines_and_the_panels_room_for_them():
    titles = ["a title that is far too long for half of a narrow page", "b", "c " * 40, "d"]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.25)
    figure.update_layout(height=500, margin={"t": 60, "b": 40})
    sizes = [round((axis.domain[1] - axis.domain[0]) * 400, 6) for axis in figure.select_yaxes()]
    laid_out(figure)
    broken = [note.text.count("<br>") for note in figure.layout.annotations]
    assert [lines > 0 for lines in broken] == [True, False, True, False]
    room = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    after = [round((axis.domain[1] - axis.domain[0]) * room, 6) for axis in figure.select_yaxes()]
    assert after == pytest.approx(sizes), "panels keep their size"
    assert figure.layout.margin.t == 60 + LINE * broken[0]
    assert room == 400 + LINE * broken[2]
    for note, axis in zip(figure.layout.annotations, figure.select_yaxes(), strict=True):
        assert note.y == pytest.approx(axis.domain[1]), "a title stands on its panel"


def test_names_are_broken_behind_their_marks_and_only_where_they_are_longer_than_a_line():
    expected = {
        ("mlp_post.0: pairs of frequencies", 12): ["mlp_post.0:", "pairs of", "frequencies"],
        ("mse_masked: mean_pattern", 20): ["mse_masked:", "mean_pattern"],
        ("1.5 mask_ignore", 12): ["1.5", "mask_ignore"],
        ("blocks.0.attn.hook_result", 16): ["blocks.0.attn.", "hook_result"],
        ("zoo:matrix-completion-7x7@post", 20): ["zoo:matrix-", "completion-7x7@post"],
        ("a" * 20, 12): ["a" * 12, "a" * 8],
    }
    for (line, room), lines in expected.items():
        assert layout._wrapped(line, room) == lines


def test_labels_that_plotly_turns_stay_in_one_line_where_two_would_touch_the_next():
    names = [f"without direct {layer}.{head}" for layer in range(3) for head in range(8)]
    many, few = (go.Figure(go.Scatter(x=some, y=[1.0] * len(some))) for some in (names, names[:8]))
    for figure in (many, few):
        laid_out(figure)
    assert list(many.layout.xaxis.ticktext) == names
    assert all("<br>" in text for text in few.layout.xaxis.ticktext)


def test_lines_become_narrow_and_maps_of_many_cells_do_not():
    line = go.Figure(go.Scatter(y=[1, 2]), {"margin": {"l": 60, "r": 20}})
    maps = {n: go.Figure(go.Heatmap(z=np.zeros((2, n))), line.layout) for n in (4, 64, 400)}
    assert layout.least_width(line) == layout.least_width(maps[4]) == layout.NARROWEST
    assert layout.least_width(maps[64]) == 80 + 64 * layout.CELL
    assert (layout.least_width(maps[400]), layout.least_width(maps[400], 600)) == (layout.MAP, 600)
    later = go.Figure(go.Heatmap(x=list(map(str, range(64))), z=[]), line.layout)
    assert layout.least_width(later) == layout.least_width(maps[64]), "a map that a page fills"


def test_labels_and_colour_bars_between_panels_have_room():
    lines, shared = (
        make_subplots(rows=1, cols=4, horizontal_spacing=0.065, shared_yaxes=is_shared).update_layout(
            margin={"l": 60, "r": 20}
        )
        for is_shared in (False, True)
    )
    assert layout.least_width(lines) == pytest.approx(layout.LABELS / 0.065 + 80, abs=1)
    assert layout.least_width(shared) == layout.NARROW
    maps = plots.heads({name: np.eye(3) for name in "abc"})
    bar = maps.data[0].colorbar.x
    gap = maps.layout.xaxis2.domain[0] - bar
    panels = maps.layout.width - maps.layout.margin.l - maps.layout.margin.r
    assert layout.least_width(maps) == pytest.approx(layout.BAR / gap + maps.layout.width - panels, abs=1)
    assert layout.least_width(maps) <= maps.layout.width


def test_many_panels_are_wide_enough_for_their_titles_and_the_page_scrolls():
    few, many = (make_subplots(rows=1, cols=columns) for columns in (2, 12))
    assert layout.least_width(few) == layout.NARROW == 600 - 40, (
        "a page of 600 pixels shows all, colour bars too"
    )
    assert layout.least_width(few, 550) == 550, "no wider than it is where there is room"
    many.update_layout(margin={"l": 70, "r": 30})
    narrowest = min(axis.domain[1] - axis.domain[0] for axis in many.select_xaxes())
    assert (layout.least_width(many) - 100) * narrowest == pytest.approx(layout.PANEL, abs=1)


def test_texts_in_cells_say_from_which_width_they_have_room():
    def figure(**cells):
        drawn = go.Figure([go.Heatmap(z=[[0.123456, None, 1.0]], **cells)], {"margin": {"l": 50, "r": 10}})
        laid_out(drawn)
        return (drawn.data[0].meta or {}).get("roomFrom")

    per_cell = [(figure(**cells) - 60) / 3 for cells in NUMBERS]
    assert per_cell == pytest.approx([4 * 7 + 4, 6 * 0.58 * 10 + 4, 12 * 7 + 4], abs=0.5)
    assert figure() is None, "cells without texts"
    written = go.Figure(
        [
            go.Scatter(
                x=["a", "b"] * 2,
                y=["0", "0", "1", "1"],
                text=["+1e-05"] * 4,
                mode="text",
                textfont={"size": 10},
            )
        ],
        {"margin": {"l": 50, "r": 10}},
    )
    laid_out(written)
    assert (written.data[0].meta["roomFrom"] - 60) / 2 == pytest.approx(6 * 0.58 * 10 + 4, abs=0.5)
    assert figure(texttemplate="%{z}", meta={"roomFrom": 7}) == 7, "what a figure says itself holds"
    written = go.Figure(
        written.update_traces(textfont={"size": None}, meta=None).data, {"margin": {"l": 50, "r": 10}}
    )
    laid_out(written)
    assert (written.data[0].meta["roomFrom"] - 60) / 2 == pytest.approx(6 * 8.3 + 4, abs=0.5), (
        "13 pixels high"
    )


#: Texts of four, six and twelve characters.
NUMBERS = [
    {"texttemplate": "%{z:.2f}"},
    {"texttemplate": "%{text}", "text": [["one", "sixsix", "a"]], "textfont": {"size": 10}},
    {"texttemplate": "%{text}", "text": [["twelvetwelve<br>a", "b", "c"]]},
]


def test_an_open_mark_is_larger_than_a_filled_one():
    figure = go.Figure(
        [go.Scatter(y=[1], marker={"symbol": symbol, "size": 10}) for symbol in ("circle", "circle-open")]
    )
    laid_out(figure)
    assert [trace.marker.size for trace in figure.data] == [10, OPEN_SIZE]
    assert OPEN_SIZE > 10


def test_colours_of_attention_end_where_a_query_has_a_choice():
    causal = torch.tensor([[1.0, 0, 0], [0.4, 0.6, 0], [0.5, 0.45, 0.05]])
    assert largest_choice(causal) == pytest.approx(0.6)
    assert largest_choice(torch.eye(3)) == 1, "nobody has a choice"
    assert ticks(0.6, 1.0) == {"tickvals": [0, 0.3, 0.6], "ticktext": ["0", "0.3", "≥ 0.6"]}
    assert ticks(0.6, 0.6, parts=1)["ticktext"] == ["0", "0.6"], "no share is larger"
    assert ticks(0.997, 1.0, parts=1)["ticktext"] == ["0", "1"], "none is larger by the digits shown"


def test_a_picture_of_another_width_is_laid_out_for_it(figures):
    wide = figures["heatmaps"]
    room = max(trace.meta["roomFrom"] for trace in wide.data if trace.type == "heatmap")
    narrow = fitted(wide, 300)
    lines = narrow.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= (300 - 40) / CHARACTER + 3
    assert " ".join(lines) == wide.layout.title.subtitle.text.replace("<br>", " ")
    more = len(lines) - len(wide.layout.title.subtitle.text.split("<br>"))
    assert more > 0
    assert narrow.layout.height == wide.layout.height + LINE * more
    assert narrow.layout.title.text == wide.layout.title.text
    # No numbers where they would run into each other.
    assert {trace.texttemplate for trace in narrow.data if trace.type == "heatmap"} == {""}
    shown = [trace.texttemplate for trace in wide.data if trace.type == "heatmap"]
    assert [trace.texttemplate for trace in fitted(wide, room).data if trace.type == "heatmap"] == shown
    assert all(shown)
