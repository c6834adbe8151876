"""Pages: self-contained, escaped, sortable, in colours that can be told apart."""

import base64
import math
from html.parser import HTMLParser

import pandas
import plotly.graph_objects
import pytest

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import heatmap
from interp_tasks.pages import (
    Column,
    Figure,
    Page,
    Table,
    Text,
    format_p_value,
    format_percent,
    number,
    step_slider,
    with_interval,
)

HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028"
VOID = {"meta", "img", "br", "link", "input", "hr", "wbr"}


class Reader(HTMLParser):
    """Collects elements with their attributes, the text of scripts, and whether every tag is closed."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.scripts, self.text = [], [], {}, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened, _ = self.open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "script":
            self.scripts[attributes.get("id")] = self.scripts.get(attributes.get("id"), "") + data
        elif tag != "style":
            self.text += data


@pytest.fixture
def frame():
    return pandas.DataFrame(
        {"name": ["a", HOSTILE, "c"], "value": [0.123456789, float("nan"), -3.0], "step": [4000, 200, 10]}
    )


def page(frame, with_figure=True):
    sections = [
        Text(f"First {HOSTILE}\n\n- one\n- two", "Words"),
        Table(frame, "Numbers", columns=[Column("who", "name"), Column("value", "value")], name="numbers"),
    ]
    if with_figure:
        figure = plotly.graph_objects.Figure()
        figure.add_scatter(x=[1, 2], y=[3, 4], name=HOSTILE)
        sections.append(Figure(figure, "Drawing", HOSTILE))
    return Page(f"Title {HOSTILE}", sections, {"seed": 0, "text": HOSTILE}, {"torch": "1.2.3"})


def test_page_is_well_formed_and_shows_everything_as_text(frame):
    reader = Reader(page(frame).html())
    assert reader.open == []
    assert not [tag for tag, _ in reader.elements if tag == "img"], "hostile text became markup"
    assert reader.text.count("<img src=x onerror=alert(1)>") >= 4  # title, heading, paragraph, cell, config
    for title in ("Words", "Numbers", "Drawing", "torch 1.2.3"):
        assert title in reader.text
    identifiers = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_page_asks_for_nothing_from_outside(frame):
    for tag, attributes in Reader(page(frame).html()).elements:
        assert tag not in {"link", "iframe", "object", "embed"}
        assert not {"src", "srcset"} & attributes.keys(), (tag, attributes)
        assert attributes.get("href", "data:").startswith("data:")


def test_a_download_has_every_column_and_digit(frame):
    (link,) = (a for tag, a in Reader(page(frame).html()).elements if "download" in a)
    assert link["download"] == "numbers.csv"
    assert base64.b64decode(link["href"].partition("base64,")[2]).decode() == frame.to_csv(index=False)


def test_a_slider_has_the_numbers_and_titles_of_every_step():
    figures = {
        f"step {step}": draw_panels([heatmap([[step, 0.123456]], f"error {step}")], "Title")
        for step in (0, 5)
    }
    figure = step_slider(figures)
    (slider,) = figure.layout.sliders
    assert [step.label for step in slider.steps] == ["step 0", "step 5"]
    assert [step.args[0]["z"] for step in slider.steps] == [[[[0.0, 0.1235]]], [[[5.0, 0.1235]]]]
    assert [step.args[1] for step in slider.steps] == [
        {"annotations[0].text": f"error {step}"} for step in (0, 5)
    ]
    assert (slider.active, figure.data[0].z[0][0]) == (1, 5)
    assert step_slider({"one": figures["step 0"]}).layout.sliders == ()


def test_addresses_are_links_and_hostile_words_are_none():
    text = Text(f'See (https://x.org/a-b.c). {HOSTILE} https://x.org/"><b>')
    reader = Reader(Page("t", [text]).html())
    links = [attributes["href"] for tag, attributes in reader.elements if tag == "a"]
    assert links == ["https://x.org/a-b.c", "https://x.org"]
    assert not [tag for tag, _ in reader.elements if tag in ("b", "img")]


def test_table_cells_sort_by_full_precision_and_blanks_are_blank(frame):
    cells = [a for t, a in Reader(page(frame).html()).elements if t == "td"]
    assert [c["data-value"] for c in cells if c.get("class") == "number"] == ["0.123456789", "", "-3.0"]


def test_numbers_as_people_read_them():
    assert number(0.123456) == "0.1235"
    assert [number(value) for value in (1162.4, 123456.0, 2e6, -0.0)] == ["1162", "123456", "2e+06", "0"]
    assert with_interval("1", 928.4, 1311.2) == "1 [928, 1311]"
    assert with_interval("x", 0.2, 1.0) == "x [0.200, 1]"
    assert [number(value, 3, sign=True) for value in (0.2, -0.0625, 348.2, 3.0, 0.0, math.nan)] == [
        *("+0.200", "-0.0625", "+348", "+3", "0", "–")
    ]
    assert [format_percent(value) for value in (0.0, 0.0001, 0.1914, 0.9999, 1.0, None)] == [
        *("0%", "0.0%", "19.1%", "100%", "100%", "–")
    ]
    assert number(None) == number(float("nan")) == "–"
    assert with_interval("1", 0.5, 1.5) == "1 [0.500, 1.50]"
    assert with_interval("1", float("nan"), 2.0) == "1"
    assert format_p_value(0.00001) == "<0.001"
    assert format_p_value(0.25) == "0.250"
