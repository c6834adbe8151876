"""A page in a browser at three widths, light and dark: all is drawn, nothing fails, nothing is asked for."""

import shutil

import pandas
import pytest

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import Series, bars, curve, heatmap, points, spectrum
from interp_tasks.pages import Figure, Page, Table, Text, step_slider

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
REFS = [f"zoo:matrix-completion-7x7-seeds/seed-{seed}@step-40000" for seed in range(4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page with every kind of panel, long names, a slider and a table."""
    runs = {ref: Series([0, 10, 20], [3.0, 2.0, at + 1.0]) for at, ref in enumerate(REFS)}
    maps = [heatmap([[at * 0.25, -1.0]] * 8, f"map {at}", signed=True, bar=at == 2) for at in range(3)]
    panels = [
        curve(runs),
        points({ref: Series(REFS, [1.0, 2, 3, 4]) for ref in REFS}),
        bars(runs),
        points(runs, categories=False),
    ]
    steps = {f"step {step}": draw_panels([heatmap([[step, 2.0]], f"error {step}")]) for step in (0, 5)}
    table = pandas.DataFrame(
        {"name": ["b", "a", "c"], "number": [10.0, 9.0, float("nan")], **dict.fromkeys(REFS, 1)}
    )
    sections = [
        Text("Words"),
        Figure(draw_panels(panels, "Title", scattermode="group")),
        Figure(draw_panels(maps, columns=3, share_y=True)),
        Figure(draw_panels([spectrum(range(1, 57), [1.0] * 56, [3])])),
        Figure(step_slider(steps)),
        Table(table, "Table"),
    ]
    return Page("A page", sections).write(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE)
        yield opened
        opened.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (900, "dark"), (1400, "light")])
def test_a_page_is_drawn_without_errors(browser, written, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    said = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(("file:", "data:", "blob:")) else said.append(request.url)
        ),
    )
    page.goto(written.as_uri())
    page.wait_for_function("() => document.querySelectorAll('.plot .main-svg').length >= 4")
    assert page.evaluate("() => document.querySelectorAll('.plot .js-plotly-plot').length") == 4
    # The page itself does not scroll sideways; what is wider scrolls in its frame.
    assert page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth") <= 0
    wide = "() => [...document.querySelectorAll('.plot')].map((p) => p.clientWidth - p.parentElement.clientWidth)"
    assert any(beyond > 0 for beyond in page.evaluate(wide)) == (width == 400)
    # No text of a figure lies outside of it.
    cut = """() => [...document.querySelectorAll(".js-plotly-plot")].flatMap((plot) => {
        const whole = plot.getBoundingClientRect();
        const inside = ({ left, right, top, bottom }) => left > whole.left - 1 && right < whole.right + 1
            && top > whole.top - 1 && bottom < whole.bottom + 1;
        return [...plot.querySelectorAll(".legendtext, .xtitle, .ytitle, .annotation-text, .xtick text, .ytick text")]
            .filter((text) => !inside(text.getBoundingClientRect())).map((text) => text.textContent); })"""
    assert page.evaluate(cut) == []
    dark = page.evaluate("() => getComputedStyle(document.querySelector('.js-plotly-plot')).filter")
    assert ("invert" in dark) == (scheme == "dark")
    assert said == []
    page.close()
