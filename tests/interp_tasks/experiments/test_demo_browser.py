"""The page of the demo in a browser: two sliders and their buttons, each moving its own pictures."""

import json
import shutil

import pytest

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments._demo import measure
from interp_tasks.experiments._demo.page import demo_page

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


def make_run(folder, task, settings, names, values):
    """A run folder with a drop at step 20, checkpoints at 10 and 40."""
    for step in (10, 40):
        save_checkpoint(folder / f"checkpoints/{step:08d}", task.build_model(step, settings), task, step=step)
    drop = {"name": task.drop_metric.name, "direction": task.drop_metric.direction}
    config = {"task": {"name": task.name, **task.model_dump(mode="json")}}
    (folder / "run.json").write_text(json.dumps({"format": 1, "config": config, "drop_metric": drop}))
    logged = (dict.fromkeys(names, values[step >= 20]) for step in range(41))
    lines = ({"step": step, "validation": each, "train": each} for step, each in enumerate(logged))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    matrix = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    addition = tasks.get("modular-addition", p=7)
    large = matrix.Model(n_layers=1, n_heads=2, d_model=8, init_std=0.4)
    small = addition.Model(n_layers=1, n_heads=2, d_model=8, init="nanda", normalization=None)
    with pytest.MonkeyPatch.context() as patch:
        names = ("mse_masked", "mse_observed")
        patch.setattr(measure, "MATRIX_RUN", make_run(folder / "matrix", matrix, large, names, (0.1, 0.0)))
        run = make_run(folder / "addition", addition, small, ("accuracy", "loss"), (0.0, 1.0))
        patch.setattr(measure, "MODULAR_RUN", run)
        return demo_page(measure.demo(samples=12)).write(folder / "demo.html")


@pytest.fixture(scope="module")
def opened(page_file):
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE)
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        page.set_default_timeout(PATIENCE)
        said = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith("file:") else said.append(request.url)
        )
        page.goto(page_file.as_uri())
        at(page, "1,0,1,0,0")
        yield page
        assert said == []
        browser.close()


def at(page, setting):
    """Waits until all is drawn: slider, matrix, slider of the sums, sum, edit."""
    page.wait_for_selector(f"html[data-drawn='{setting}']", state="attached")


def shown(page):
    """What each figure shows, by its description."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => [plot.getAttribute("aria-label"),
            JSON.stringify([plot.data.map(({ x, y, z, text }) => [x, y, z && [...z].map((row) => [...row]), text]),
                plot.layout.shapes, plot.layout.title?.text, plot.layout.xaxis.ticktext])])"""
    )
    return dict(found)


def moved(page, act, setting):
    before = shown(page)
    act()
    at(page, setting)
    after = shown(page)
    return {alt for alt in before if before[alt] != after[alt]}


@pytest.mark.timeout(900)
def test_each_control_moves_its_own_pictures_and_no_other(opened):
    page = opened
    filled = {"what the model makes of it", "the same with uniform attention"}
    sums = "attention of every head and the answer"
    first = shown(page)

    def press(key, which):
        page.locator(".stepper input").nth(which).focus()
        page.keyboard.press(key)

    assert moved(page, lambda: press("Home", 0), "0,0,1,0,0") == {*filled, "error over training"}
    assert moved(page, lambda: page.click("text=Another matrix"), "0,1,1,0,0") == {
        *filled,
        "the matrix with its blanks",
        "the whole matrix",
    }
    assert page.inner_text(".choice output >> nth=0") == "matrix 2 of 8"
    ring = "embeddings of the numbers along their key frequency"
    assert moved(page, lambda: press("Home", 1), "0,1,0,0,0") == {
        ring,
        sums,
        "share of right answers over training",
    }
    assert moved(page, lambda: page.click("text=Another sum"), "0,1,0,1,0") == {sums}
    button = ".choice button:text-is('uniform attention')"
    plain = shown(page)
    assert moved(page, lambda: page.click(button), "0,1,0,1,1") == {sums}
    assert page.get_attribute(button, "aria-pressed") == "true"
    assert "0.333" in shown(page)[sums]
    # And back.
    back = ".choice button:text-is('as trained')"
    assert moved(page, lambda: page.click(back), "0,1,0,1,0") == {sums}
    assert shown(page) == plain
    # The last matrix is followed by the first.
    for index in (2, 3, 4, 5, 6, 7, 0):
        page.click("text=Another matrix")
        at(page, f"0,{index},0,1,0")
    page.click(".stepper button:text-is('after the drop')")
    at(page, "1,0,0,1,0")
    again = shown(page)
    assert {alt for alt in first if first[alt] != again[alt]} == {
        ring,
        sums,
        "share of right answers over training",
    }


@pytest.mark.timeout(900)
def test_a_click_in_a_curve_moves_the_slider_of_its_chapter(opened):
    page = opened
    setting = page.get_attribute("html", "data-drawn").split(",")
    for chapter, place in ((1, 2), (0, 0)):
        curve = page.locator(".plot[data-picks]").nth(chapter)
        for share, index in ((0.95, "1"), (0.05, "0")):
            curve.scroll_into_view_if_needed()
            box = curve.locator(".nsewdrag").first.bounding_box()
            page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
            page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            page.wait_for_timeout(300)
            page.mouse.click(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            setting[place] = index
            at(page, ",".join(setting))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [800, 600])
def test_nothing_is_wider_than_a_narrow_window(opened, width):
    opened.set_viewport_size({"width": width, "height": 900})
    opened.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth")
    opened.set_viewport_size({"width": 1400, "height": 900})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [480, 380])
def test_steps_around_a_drop_have_their_buttons_on_a_narrow_window_too(opened, width):
    """They were hidden there, as was what the slider is about."""
    opened.set_viewport_size({"width": width, "height": 800})
    for row, change in zip(opened.locator(".controls").all(), ("drop", "rise"), strict=True):
        names = (f"before the {change}", f"{change} begins", f"{change} ends", f"after the {change}")
        assert row.locator(".marks button").all_inner_texts() == list(names)
        assert all(each.is_visible() for each in row.locator("label, button, input, output").all())
        for name, step in (names[0], "step 10"), (names[3], "step 40"):
            row.get_by_role("button", name=name).click()
            assert row.locator("label ~ output").inner_text() == step
        # They stay in view while one scrolls: most of the window is the page's.
        assert row.bounding_box()["height"] < 800 / 6
    opened.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth")
    opened.set_viewport_size({"width": 1400, "height": 900})
