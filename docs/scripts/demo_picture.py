"""docs/images/demo.png: a matrix that the shipped model fills in before and after its drop, below its training curve.

    python -P docs/scripts/demo_picture.py

measures and draws as `interp-run demo` does. Needs playwright, which brings no browser here, and Debian's chromium.
"""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from circuits.figures.palette import INK
from interp_tasks.experiments._demo import figure as draw
from interp_tasks.experiments._demo.matrices import Filled, fill_in
from interp_tasks.experiments._demo.measure import MATRIX_RUN
from interp_tasks.measurement.run_logs import Run, find_runs, plateau_levels, read_one
from interp_tasks.pages import Beside, Figure, Page

PICTURE = Path(__file__).parents[1] / "images" / "demo.png"
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, SCALE, CURVE, MATRICES = 1060, 1.55, 200, 300
#: Which of the matrices of the demo, the first of which has the median error, and the steps of the checkpoints before
#: and after the drop.
MATRIX, BEFORE, AFTER = 0, 4_000, 44_000


def curve(log: Run, filled: Filled) -> Figure:
    level = plateau_levels(log)["mse_masked"]
    says = f"answering 0 at every blank: {level:.4f}"
    figure = draw.curve({"": log.points("mse_masked")}, None, level, says, "error at the blanks")
    figure.update_layout(showlegend=False, margin={"t": 8, "b": 40}, height=CURVE)
    # The first is the slider's line.
    figure.layout.shapes = figure.layout.shapes[1:]
    for step in (BEFORE, AFTER):
        figure.add_vline(x=step, line={"color": draw.GREY, "width": 2})
        side = "left" if step == BEFORE else "right"
        figure.add_annotation(
            x=step, y=0.1, text=f" step {step:,} ", showarrow=False, xanchor=side, yanchor="bottom"
        )
    return Figure(figure, height=CURVE)


def matrices(filled: Filled) -> Beside:
    blanks = int(filled.hidden[MATRIX].sum())
    before, after = (list(filled.steps).index(step) for step in (BEFORE, AFTER))
    shown = {
        f"the truth: the {blanks} outlined<br>entries are blank": filled.truth[MATRIX],
        f"what it fills in<br>at step {BEFORE:,}": filled.trained[before, MATRIX],
        f"what it fills in<br>at step {AFTER:,}": filled.trained[after, MATRIX],
        "the same, every head made<br>to look everywhere equally": filled.uniform[after, MATRIX],
    }
    largest = float(abs(filled.truth[MATRIX]).max())
    figures = []
    for title, values in shown.items():
        figure = draw.matrix(values, filled.hidden[MATRIX], largest)
        # A title of two lines would begin above the figure's top.
        figure.add_annotation(
            text=title,
            showarrow=False,
            font={"size": 14},
            x=0.5,
            xref="paper",
            xanchor="center",
            y=1,
            yref="paper",
            yanchor="bottom",
        )
        figure.update_layout(margin={"t": 56})
        # At the width of a page of text numbers could not be read; blanks have an outline in place of bold ones.
        figure.update_traces(texttemplate="")
        for row, column in zip(*filled.hidden[MATRIX].nonzero(), strict=True):
            corners = {"x0": column - 0.46, "x1": column + 0.46, "y0": row - 0.46, "y1": row + 0.46}
            figure.add_shape(type="rect", line={"color": INK["light"], "width": 1.6}, **corners)
        figures.append(Figure(figure, height=MATRICES))
    return Beside(figures, narrowest=14)


def main() -> None:
    ((name, path),) = find_runs(MATRIX_RUN).items()
    filled = fill_in(MATRIX_RUN, samples=256, seed=0, tell=lambda _: None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        sections = [curve(read_one(name, path), filled), matrices(filled)]
        written = Page("", sections).write(Path(folder) / "picture.html")
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
        page.set_default_timeout(120_000)
        page.goto(written.as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector("html[data-drawn]", state="attached")
        page.add_style_tag(content=".modebar, h1, figcaption { display: none !important; }")
        box = page.locator("main").bounding_box()
        assert box, "nothing to see"
        clip = {"x": 0, "y": box["y"], "width": WIDTH, "height": box["height"]}
        page.screenshot(path=PICTURE, clip=clip, full_page=True)
        browser.close()
    print(PICTURE, PICTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
