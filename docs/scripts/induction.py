"""docs/images/induction.png: what the README's Python block draws, its two figures side by side.

    python -P docs/scripts/induction.py

runs the block. Needs playwright, which brings no browser here, and Debian's chromium.
"""

import re
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from circuits.figures.layout import untitled
from interp_tasks.pages import Figure, Page

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "induction.png"
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, SCALE = 760, 1.25


def main() -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    figures = [Figure(untitled(figure)) for figure in names["figures"]]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        written = Page("", figures).write(Path(folder) / "induction.html")
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": WIDTH, "height": 700}, device_scale_factor=SCALE)
        page.set_default_timeout(120_000)
        page.goto(written.as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector(".main-svg")
        page.add_style_tag(content=".modebar, h1 { display: none !important; }")
        box = page.locator("main").bounding_box()
        assert box, "nothing to see"
        clip = {"x": 0, "y": box["y"], "width": WIDTH, "height": box["height"]}
        page.screenshot(path=PICTURE, clip=clip, full_page=True)
        browser.close()
    print(PICTURE, PICTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
