"""The report in a browser: its slider moves every figure, nothing fails and nothing is asked for."""

import csv
import json
import shutil
import time

import pytest

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.report import report

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
STEPS = (0, 10, 20, 40)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """A report on an untrained run that drops at step 20, beside itself with fewer checkpoints."""
    folder = tmp_path_factory.mktemp("report")
    task = tasks.get("matrix-completion", n=2, rank=1, grid_max=1.2, grid_step=0.2)
    settings = task.Model(n_layers=1, n_heads=2, d_model=8, init_std=0.4)
    run = folder / "run"
    for step in STEPS:
        save_checkpoint(run / f"checkpoints/{step:08d}", task.build_model(step, settings), task, step=step)
    described = {
        "format": 1,
        "config": {"task": {"name": task.name, **task.model_dump(mode="json")}, "train": {"steps": 40}},
        "drop_metric": {"name": "mse_masked", "direction": "down"},
    }
    (run / "run.json").write_text(json.dumps(described))
    metrics = ("mse_all", "mse_masked", "mse_observed")
    lines = (
        {"step": step, "validation": dict.fromkeys(metrics, 0.1 if step < 20 else 0.01)} for step in range(41)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report(str(run), f"{run}@0,40", samples=6).page().write(folder / "report.html")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE)
        yield opened
        opened.close()


def new_page(browser):
    """A window, and what pages in it will have complained of or asked for."""
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    said = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
    return page, said


@pytest.fixture(scope="module")
def opened(browser, page_file):
    """The page once everything is drawn, and what it complained of or asked for."""
    page, said = new_page(browser)
    began = time.perf_counter()
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    print(
        f"drawn {time.perf_counter() - began:.1f} s after it was opened, {page_file.stat().st_size / 1e6:.1f} MB"
    )
    yield page, said
    page.close()


def at(page, index):
    page.wait_for_selector(f"html[data-drawn='{index}']", state="attached")


def figures(page):
    """What every figure shows: its data, and the parts of its layout that a step may change."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => JSON.stringify([
            plot.data.map(({ x, y, z, text }) => [x, y, z && [...z].map((row) => [...row]), text]),
            plot.layout.shapes, plot.layout.title?.text, plot.layout.xaxis.title?.text]))"""
    )


@pytest.mark.timeout(900)
def test_the_slider_moves_every_figure_by_keyboard(opened):
    page, said = opened
    at(page, 3)
    shown = {3: figures(page)}
    page.focus(".stepper input")
    for key, index in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", 3)):
        page.keyboard.press(key)
        at(page, index)
        shown[index] = shown.get(index) or figures(page)
        if index == 3:
            assert figures(page) == shown[3]
    assert len(shown[0]) >= 10
    for before, after in zip(shown[0], shown[3], strict=True):
        assert before != after
    # Beside step 10 stands step 0 of the other, which has no nearer one.
    assert page.get_attribute(".stepper input", "aria-valuetext") == "step 40 (post) beside step 40"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    at(page, 1)
    assert page.inner_text(".stepper output") == "step 10 (pre, onset) beside step 0"
    assert page.get_attribute(".stepper input", "aria-valuetext") == "step 10 (pre, onset) beside step 0"
    assert said == []


@pytest.mark.timeout(900)
def test_marks_and_a_click_in_the_curve_move_the_slider(opened):
    page, said = opened
    page.click(".stepper button:text-is('end')")
    assert page.input_value(".stepper input") == "2"
    at(page, 2)
    assert page.get_attribute(".stepper button:text-is('end')", "aria-pressed") == "true"
    curve = page.locator(".plot[data-picks]").first
    curve.scroll_into_view_if_needed()
    box = page.locator(".plot[data-picks] .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + 0.06 * box["width"], box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    page.mouse.click(box["x"] + 0.06 * box["width"], box["y"] + box["height"] / 2)
    at(page, 0)
    assert said == []


@pytest.mark.timeout(900)
def test_the_table_follows_and_keeps_its_order_and_downloads_all(opened, tmp_path):
    page, said = opened
    table = page.locator("table[data-stepped]")
    page.focus(".stepper input")
    page.keyboard.press("End")
    at(page, 3)
    first = table.locator("tbody tr").all_inner_texts()
    page.evaluate("document.querySelector('table[data-stepped] th:last-child button').click()")
    page.evaluate("document.querySelector('table[data-stepped] th:nth-child(7) button').click()")
    page.keyboard.press("Home")
    at(page, 0)
    page.wait_for_function(
        "() => document.querySelector('table[data-stepped] td:nth-child(2)').textContent === '0'"
    )
    assert sorted(table.locator("tbody tr").all_inner_texts()) != sorted(first)
    effects = page.evaluate(
        "[...document.querySelectorAll('table[data-stepped] tbody tr')].map((r) => Number(r.cells[6].dataset.value))"
    )
    assert effects == sorted(effects)
    assert effects[0] < effects[-1]
    identifier = table.get_attribute("id")
    with page.expect_download() as download:
        page.evaluate(f"document.querySelector('button[data-table={identifier}]').click()")
    download.value.save_as(tmp_path / "effects.csv")
    rows = list(csv.DictReader((tmp_path / "effects.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["step"] for row in rows} == {"0", "10", "20", "40"}
    assert {row["intervention"] for row in rows} == {"uniform", "mean_pattern", "zero"}
    # Numbers as numbers, blanks last, and the other way round at the second click.
    sort = """(given) => {
        const table = document.querySelector("table[data-stepped]");
        [...table.tBodies[0].rows].forEach((row, i) => { row.cells[6].dataset.value = given[i] ?? ""; });
        table.querySelector("th:nth-child(7) button").click();
        return [...table.tBodies[0].rows].slice(0, 5).map((row) => row.cells[6].dataset.value); }"""
    given = ["10", "9", "-1e-3", "", "100"]
    assert page.evaluate(sort, given) == ["100", "10", "9", "-1e-3", ""]
    assert page.evaluate(sort, given) == ["-1e-3", "9", "10", "100", ""]
    assert said == []


@pytest.mark.timeout(900)
def test_dark_and_narrow(opened):
    page, said = opened
    # Functions, not bare expressions: those would be evaluated in the page, whose policy forbids it.
    colour = "document.querySelector('.plot').layout.template.layout.font.color"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => {colour} !== '{light}'")
    page.wait_for_selector("html[data-drawn]", state="attached")
    # Numbers in cells are there while there is room for them.
    numbers = """[...document.querySelectorAll(".plot")].flatMap((plot) => plot.data)
        .filter((trace) => trace.meta?.roomFrom).map((trace) => trace.texttemplate !== "")"""
    wide = page.evaluate(numbers)
    assert all(wide)
    page.set_viewport_size({"width": 500, "height": 900})
    page.wait_for_function("() => document.querySelector('.plot').clientWidth < 500")
    # Once the figures have followed the width.
    page.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth")
    # Maps side by side keep their width, and so the numbers in their cells, and scroll in a frame.
    frames = """[...document.querySelectorAll(".plot")]
        .map((plot) => ({ plot, rooms: plot.data.map((trace) => trace.meta?.roomFrom).filter(Boolean) }))
        .filter(({ rooms }) => rooms.length)
        .map(({ plot, rooms }) => ({ room: plot.clientWidth - Math.max(...rooms),
          hidden: plot.clientWidth - plot.closest(".scroll").clientWidth }))"""
    page.wait_for_function(f"() => {frames}.every(({{ room, hidden }}) => room >= 0 && hidden > 0)")
    assert page.evaluate(frames)
    assert all(page.evaluate(numbers))
    # A table that is wider than the page becomes a list, with the name of its column before each value.
    tables = """[...document.querySelectorAll(".scroll > table")].filter((table) => table.clientWidth).map((table) => ({
        list: table.classList.contains("stacked"), beyond: table.scrollWidth - table.parentElement.clientWidth,
        headers: [...table.tHead.rows[0].cells].map((header) => header.innerText),
        labels: [...table.tBodies[0].rows[0].cells].map((cell) => cell.dataset.label) }))"""
    page.wait_for_function(f"() => {tables}.every(({{ beyond }}) => beyond <= 1)")
    lists = [table for table in page.evaluate(tables) if table["list"]]
    assert lists
    assert all(table["labels"] == table["headers"] for table in lists)
    # One panel of square cells is no higher than its width asks for.
    panels = """[...document.querySelectorAll(".plot")].filter((plot) => plot.layout.yaxis.scaleanchor
        && !plot.layout.yaxis2 && plot.clientWidth < parseFloat(plot.style.maxWidth))
        .map((plot) => plot._fullLayout.yaxis.domain[1] - plot._fullLayout.yaxis.domain[0])"""
    page.wait_for_function(f"() => {panels}.length && {panels}.every((share) => share > 0.8)")
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"() => {colour} === '{light}'")
    assert said == []


@pytest.mark.timeout(900)
def test_what_is_in_sight_is_drawn_first_and_all_before_printing(browser, page_file):
    page, said = new_page(browser)
    # A browser that has something else to do until it is told.
    page.add_init_script(
        """window.idle = []; window.requestIdleCallback = (act) => window.idle.push(act);
        window.drawn = () => [...document.querySelectorAll(".plot")].map((plot) => plot._fullLayout !== undefined);"""
    )
    page.goto(page_file.as_uri())
    page.wait_for_function("() => window.idle.length === 1")
    seen = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => {
            const { top, bottom } = plot.getBoundingClientRect();
            return bottom > 0 && top < window.innerHeight; })"""
    )
    assert page.evaluate("() => window.drawn()") == seen
    assert page.get_attribute("html", "data-shown") == "3"
    last = len(seen) - 1
    page.evaluate("() => [...document.querySelectorAll('.plot')].at(-1).scrollIntoView()")
    page.evaluate("() => window.idle.pop()()")
    page.wait_for_function("() => window.idle.length === 1")
    found = page.evaluate("() => window.drawn()")
    assert found[last]
    assert not all(found)
    # The slider moves while most are not there yet.
    page.focus(".stepper input")
    page.keyboard.press("Home")
    moved = page.evaluate(
        """() => { window.dispatchEvent(new Event("beforeprint"));
            return [...document.querySelectorAll(".plot")].map((plot) => plot._fullLayout !== undefined); }"""
    )
    assert all(moved)
    shown = figures(page)
    page.evaluate(
        "() => { while (window.idle.length) window.idle.pop()(); window.requestIdleCallback = setTimeout; }"
    )
    at(page, 0)
    assert figures(page) == shown
    assert said == []
    page.close()
