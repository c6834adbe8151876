"""Figures on narrow pages, in a browser: no text is cut off, no label runs into the next, no page scrolls sideways."""

import shutil

import numpy as np
import pandas as pd
import pytest
from plotly.subplots import make_subplots

from circuits import plots
from interp_tasks.experiments._demo import figure as demo
from interp_tasks.experiments._gradients.figure import figure as gradients
from interp_tasks.experiments._primes.figure import figure as primes
from interp_tasks.measurement.curve_figures import curves_figure
from interp_tasks.measurement.run_logs import Curve
from interp_tasks.pages import Beside, Figure, Page

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
)
BROWSER = shutil.which("chromium") or shutil.which("chromium-headless-shell")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
#: A busy machine is slow, and no test is about seconds.
PATIENCE = 200_000
HIDDEN = np.eye(7, dtype=bool)


def figures():
    """Figures of what the shipped runs have: many runs, long names of tensors, answers side by side."""
    answers = [f"mod_{q}" for q in (2, 3, 5, 7, 11)]
    ref = "zoo:miiii-113-small@post"
    lost = pd.DataFrame(np.eye(5), index=answers, columns=answers)
    shares = pd.DataFrame(
        {"ref": ref, "metric": "share of variance", "variant": answers, "intervention": "digit: W_E"}
    ).assign(value=0.5, baseline=0.1)
    names = ["embed.W_E", *(f"blocks.0.attn.W_{letter}" for letter in "QKVO"), "blocks.0.mlp.W_out"]
    norms = pd.DataFrame({name: np.linspace(1, 0.1, 90) for name in names}, index=range(100, 9100, 100))
    metrics = ("mse_masked", "mse_masked (n=3)", "mse_masked (n=4)")
    curves = {
        (f"zoo:matrix-completion-sweeps/given-pos_embed-{run}", metric): Curve(
            metric, [0, 10, 20], [1, 0.5, 0.1], None
        )
        for run in range(6)
        for metric in metrics
    }
    matrix = demo.matrix(np.full((7, 7), -0.123), HIDDEN, 1.0, blank=True)
    return {
        "primes": Figure(primes(shares, {ref: {"waves of the digits taken away at embed": (lost, lost)}})),
        "gradients": Figure(gradients({"raw": norms})),
        "curves": Figure(curves_figure(curves)),
        "blanks": Beside([Figure(matrix), Figure(matrix)], narrowest=14),
    }


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE)
        yield opened
        opened.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["primes", "gradients", "curves", "blanks"])
def test_texts_have_room(browser, tmp_path, name):
    written = Page("A page", [figures()[name]]).write(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 600, "height": 900}, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    page.goto(written.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    cut, touching, panels, marks = page.evaluate(
        """() => {
            const box = (element) => element.getBoundingClientRect(), cut = [], touching = [];
            const plots = [...document.querySelectorAll(".plot")];
            for (const plot of plots) {
                const whole = box(plot.querySelector(".main-svg"));
                for (const text of plot.querySelectorAll(".main-svg text")) {
                    const { left, right, top, bottom, width } = box(text);
                    if (text.closest(".hoverlayer") || !width) continue;
                    const beside = left < whole.left - 1 || right > whole.right + 1;
                    if (beside || top < whole.top - 1 || bottom > whole.bottom + 1) cut.push(text.textContent);
                }
                for (const title of [...plot.querySelectorAll(".infolayer [class^='g-x'] text")].map(box))
                    for (const panel of [...plot.querySelectorAll(".nsewdrag")].map(box))
                        if (title.top < panel.bottom && title.bottom > panel.top) touching.push("title of an axis");
                for (const axis of plot.querySelectorAll(".xaxislayer-above")) {
                    const labels = [...axis.querySelectorAll(".xtick text, .x2tick text")].map(box);
                    const rows = Map.groupBy(labels, ({ top }) => Math.round(top));
                    for (const row of rows.values())
                        row.sort((a, b) => a.left - b.left)
                            .forEach(({ left }, i) => i && left < row[i - 1].right + 1 && touching.push(left));
                }
            }
            return [cut, touching, plots.map((plot) => box(plot.querySelector(".nsewdrag")).width),
                [...document.querySelectorAll(".main-svg text")].filter((text) => text.textContent === "?").length];
        }"""
    )
    page.close()
    assert cut == []
    assert touching == []
    # Legends and colour bars leave the panels more than half of the page, or of their half of it.
    assert min(panels) > (600 if name in ("gradients", "curves") else 300) / 2
    assert marks == (2 * HIDDEN.sum() if name == "blanks" else 0)


@pytest.mark.timeout(900)
def test_dark_numbers_in_cells_and_bars_are_black(browser, tmp_path):
    """Plotly's own dark, #444, has a contrast of 3:1 with the middle of a scale; black has 5:1 and more."""
    cells = demo.attention(2, 6).update_traces(z=np.linspace(0, 1, 12).reshape(2, 6))
    bar = {"value": 0.5, "value_ci_low": 0.4, "value_ci_high": 0.6}
    bars = demo.bars({"errors": {"as trained": [bar], "uniform": [bar]}}, ["after"], 0.6, "error")
    written = Page("A page", [Figure(cells), Figure(bars)]).write(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 600, "height": 900}, color_scheme="dark")
    page.set_default_timeout(PATIENCE)
    page.goto(written.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    fills = page.evaluate(
        """() => [...document.querySelectorAll(".heatmap-label text, .bartext")]
            .map((text) => getComputedStyle(text).fill)"""
    )
    page.close()
    assert len(fills) == 14
    assert set(fills) == {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}


#: What of a page is wider than its window; words above the figures that are cut; titles of panels, and labels of axes
#: and colour bars, that lie upon each other.
MEASURED = """() => {
    const box = (element) => element.getBoundingClientRect(), shown = document.documentElement.clientWidth;
    const words = [...document.querySelectorAll("h1, h2, body > p, figcaption")].map(box);
    const labels = ".annotation-text, .cbaxis text, .ytick text, .y2tick text, .y3tick text, .g-ytitle text";
    const texts = [...document.querySelectorAll(labels)].map((text) => ({ text: text.textContent, at: box(text) }));
    const touch = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 1 && other.top < one.bottom - 1;
    return {
        sideways: document.documentElement.scrollWidth - shown,
        cut: words.filter(({ left, right }) => left < 0 || right > shown).length,
        touching: texts.flatMap(({ text, at }, i) =>
            texts.slice(i + 1).filter((other) => touch(at, other.at)).map((other) => `${text} on ${other.text}`)),
        frames: [...document.querySelectorAll(".frame, .scroll")].map((frame) => frame.scrollWidth - frame.clientWidth),
    };
}"""


def measured(browser, path, widths, ready):
    """What a page is like at each width, none of which its window had when it was opened."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(ready, state="attached")
    found = {}
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        # Plotly waits a while before it draws anew.
        page.wait_for_function(
            "() => [...document.querySelectorAll('.js-plotly-plot')].every((plot) =>"
            " plot.clientWidth === plot.querySelector('.main-svg').clientWidth)"
        )
        page.wait_for_selector(ready, state="attached")
        found[width] = page.evaluate(MEASURED)
    page.close()
    assert errors == []
    return found


@pytest.mark.timeout(900)
def test_a_saved_figure_fits_its_window(browser, tmp_path):
    effects = {f"metric_{name}": np.random.default_rng(0).normal(size=(3, 4)) for name in "abc"}
    maps = plots.heads(
        effects, title="The effect of each head alone on three metrics of long names", unit="effect"
    )
    assert maps.layout.width > 1000
    for found in measured(
        browser, plots.save(maps, tmp_path / "maps.html"), [800, 380], ".main-svg"
    ).values():
        assert (found["sideways"], found["cut"], found["touching"]) == (0, 0, [])
        # The panels keep what they need, and are reached within their frame.
        assert found["frames"][0] > 0
    curve = plots.curve(
        {"test": [3.0, 2.0, 1.0]}, title="A loss over the steps of a run with a long name " * 2
    )
    for found in measured(
        browser, plots.save(curve, tmp_path / "curve.html"), [480, 380], ".main-svg"
    ).values():
        assert (found["sideways"], found["cut"], found["touching"], found["frames"]) == (0, 0, [], [0])


@pytest.mark.timeout(900)
def test_maps_side_by_side_scroll_in_their_frame(browser, tmp_path):
    titles = [f"mse_masked: {mode}" for mode in ("uniform", "mean_pattern", "zero")]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.03)
    for column in (1, 2, 3):
        figure.add_heatmap(z=np.eye(4), row=1, col=column, showscale=column == 3)
    figure.update_layout(height=220, margin={"l": 50, "r": 84, "t": 60, "b": 45}).update_annotations(
        font_size=12
    )
    written = Page("A page", [Figure(figure)]).write(tmp_path / "page.html")
    found = measured(browser, written, [480], "html[data-drawn]")[480]
    assert (found["sideways"], found["touching"]) == (0, [])
    assert found["frames"][0] > 0
