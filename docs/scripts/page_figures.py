"""Pictures of pages in docs/images: the list `figures` that the Python of a page leaves, as many to a picture as named.

    python -P docs/scripts/page_figures.py README.md
    STORIES260K=FOLDER python -P docs/scripts/page_figures.py docs/tutorials/language-model.md

runs the page's commands and Python in an empty folder. Needs playwright, which brings no browser here, and Debian's
chromium.
"""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from circuits.figures.panel_grid import untitled
from interp_tasks.cli import main
from interp_tasks.pages import Figure, Page

ROOT = Path(__file__).parents[2]
#: Page -> picture -> which of its figures.
PICTURES = {
    "README.md": {"induction": slice(None)},
    "docs/tutorials/induction.md": {"induction-circuit": slice(None)},
    "docs/tutorials/language-model.md": {
        "language-model": slice(0, 2),
        "language-model-circuit": slice(2, None),
    },
}
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, SCALE = 760, 1.25


def figures_of(page: str) -> list[Any]:
    """Returns the figures that a page's code leaves, run in the current folder."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    for language, code in blocks:
        if language == "python":
            exec(compile(code, page, "exec"), names)
        elif page != "README.md":
            for line in code.splitlines():
                main(shlex.split(line)[1:])
    return list(names["figures"])


def draw(figures: list[Any], picture: Path) -> None:
    shown = [Figure(untitled(figure)) for figure in figures]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        written = Page("", shown).write(Path(folder) / "page.html")
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": WIDTH, "height": 700}, device_scale_factor=SCALE)
        page.set_default_timeout(120_000)
        page.goto(written.as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector(".main-svg")
        page.add_style_tag(content=".modebar, h1 { display: none !important; }")
        box, last = page.locator("main").bounding_box(), page.locator(".plot").last.bounding_box()
        assert box, "nothing to see"
        assert last, "nothing to see"
        clip = {"x": 0, "y": box["y"], "width": WIDTH, "height": last["y"] + last["height"] - box["y"]}
        page.screenshot(path=picture, clip=clip, full_page=True)
        browser.close()
    print(picture, picture.stat().st_size, "bytes")


if __name__ == "__main__":
    (chosen,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        if "STORIES260K" in os.environ:
            Path("stories260K").symlink_to(os.environ["STORIES260K"])
        found = figures_of(chosen)
    for name, part in PICTURES[chosen].items():
        draw(found[part], ROOT / "docs" / "images" / f"{name}.png")
