"""docs/images/demo.png: a matrix that the shipped model fills in before and after its drop, below its training curve.

    python -P docs/scripts/demo_picture.py

measures and draws as `interp-run demo` does. Needs playwright, which brings no browser here, and Debian's chromium.
"""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.demo import MATRIX_RUN, complete, matrix_panel
from interp_tasks.measurement.run_logs import Run, declared, read_runs
from interp_tasks.measurement.subjects import Examples
from interp_tasks.pages import Figure, Page

PICTURE = Path(__file__).parents[1] / "images" / "demo.png"
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, SCALE = 1060, 1.55
#: The steps of the checkpoints before and after the drop.
BEFORE, AFTER = 4_000, 44_000


def picture(log: Run) -> list[Figure]:
    """Returns the training curve with both steps, and what the model fills in at each of them."""
    level = declared(log, "plateau_levels")["mse_masked"]
    logged, values = log.points("mse_masked")
    grey = {"color": "#5c5c5c", "width": 2}
    lines = [{"x": BEFORE, "line": grey}, {"x": AFTER, "line": grey}, {"y": level}]
    series = {"blanks": Series(logged, values, style={"mode": "lines"})}
    title = f"dashed: answering 0 at every blank, {level:.4f}; lines: steps {BEFORE:,} and {AFTER:,}"
    loss = draw([curve(series, title, x="training step", y="error at the blanks", height=150, lines=lines)])
    truth, hidden, made = complete(MATRIX_RUN, Examples(samples=256))
    shown = {
        f"the truth: the {hidden.sum()} bold entries are blank": truth,
        f"what it fills in at step {BEFORE:,}": made[BEFORE][0],
        f"what it fills in at step {AFTER:,}": made[AFTER][0],
        "the same, every head made to look everywhere equally": made[AFTER][1],
    }
    panels = [matrix_panel(values, hidden, says, float(abs(truth).max())) for says, values in shown.items()]
    return [Figure(loss), Figure(draw(panels, columns=4, share_y=True))]


def main() -> None:
    (log,) = read_runs(MATRIX_RUN)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        written = Page("", picture(log)).write(Path(folder) / "picture.html")
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
        page.set_default_timeout(120_000)
        page.goto(written.as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector(".main-svg")
        page.add_style_tag(content=".modebar, h1, figcaption { display: none !important; }")
        box = page.locator("main").bounding_box()
        assert box, "nothing to see"
        clip = {"x": 0, "y": box["y"], "width": WIDTH, "height": box["height"]}
        page.screenshot(path=PICTURE, clip=clip, full_page=True)
        browser.close()
    print(PICTURE, PICTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
