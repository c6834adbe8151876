"""A click on a node of a circuit's picture, in a browser: it fades all edges but the node's own."""

import shutil

import pytest

from circuits import circuit, plots
from circuits.figures.circuit_graph import FADED, SHOWN
from interp_tasks.pages import Figure, Page

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
#: The edge from 0.1 to mlp1 passes behind 1.2.
NAMES = ("embed -> 0.0.v", "embed -> 0.1.q", "0.0 -> 1.2.k", "0.1 -> mlp1", "1.2 -> output", "mlp1 -> output")


def written(kind, folder):
    figure = circuit.edges(NAMES).plot()
    if kind == "saved":
        return plots.save(figure, folder / "circuit.html")
    return Page("A page", [Figure(figure, "The circuit", "Below it.")]).write(folder / "page.html")


def click(page, node):
    """Clicks where a node is drawn."""
    x, y = page.evaluate(
        """(node) => {
            const plot = document.querySelector(".js-plotly-plot"), { xaxis, yaxis } = plot._fullLayout;
            const nodes = plot.data.find(({ name }) => name === "nodes"), i = nodes.text.indexOf(node);
            plot.scrollIntoView({ block: "center" });
            const box = plot.getBoundingClientRect();
            return [box.left + xaxis._offset + xaxis.l2p(nodes.x[i]), box.top + yaxis._offset + yaxis.l2p(nodes.y[i])];
        }""",
        node,
    )
    page.mouse.move(x, y)
    page.wait_for_timeout(500)
    page.wait_for_function('() => document.querySelector(".js-plotly-plot")._hoverdata?.length')
    before = opacities(page)
    page.mouse.click(x, y)
    for _ in range(200):
        if opacities(page) != before:
            break
        page.wait_for_timeout(50)
    # Two clicks at once are a double click, which resets the axes.
    page.wait_for_timeout(500)


def opacities(page):
    """The opacity of each edge, by its name, of the nodes, and of each line of the key as it is drawn."""
    drawn = page.evaluate(
        """() => [
            ...document.querySelector(".js-plotly-plot").data.filter(({ name, meta }) => meta || name === "nodes").map(
                (trace) => [trace.name === "nodes" ? "nodes" : trace.text[0], trace.opacity ?? 1]),
            ...[...document.querySelectorAll(".legend .traces")].map((entry) => [
                `key: ${entry.querySelector(".legendtext").textContent}`,
                Number(getComputedStyle(entry.querySelector(".layers")).opacity)
                    * Number(getComputedStyle(entry).opacity)]),
        ]"""
    )
    return {text.split("<b>")[-1].split("</b>")[0]: opacity for text, opacity in drawn}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["saved", "page"])
def test_a_click_on_a_node_fades_all_edges_but_its_own(kind, tmp_path):
    file = written(kind, tmp_path)
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE)
        said = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector(".js-plotly-plot .nsewdrag", state="attached")
        # The key stays as it is, whatever fades.
        others = {
            "nodes": 1,
            **dict.fromkeys((f"key: into {name}" for name in ("q", "k", "v", "MLP", "output")), 1),
        }
        whole = {**dict.fromkeys(NAMES, SHOWN), **others}

        def shown_after(node):
            click(page, node)
            return opacities(page)

        kept = {"mlp1": {"0.1 -> mlp1", "mlp1 -> output"}, "1.2": {"0.0 -> 1.2.k", "1.2 -> output"}}
        assert opacities(page) == whole
        for node in ("mlp1", "1.2"):
            expected = {name: SHOWN if name in kept[node] else FADED for name in NAMES} | others
            assert shown_after(node) == expected
        assert shown_after("1.2") == whole
        # What the click does needs no menu beside it.
        assert page.locator(".updatemenu-container").count() == 0
        assert said == []
        browser.close()
