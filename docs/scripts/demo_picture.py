"""docs/images/demo.png: the first figure of the page of `interp-run demo`, as a browser shows it.

    python docs/scripts/demo_picture.py

runs the demo in a folder of its own. Needs playwright, which brings no browser here, and Debian's chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "images" / "demo.png"
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, MARGIN = 1000, 12


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        command = [str(Path(sys.executable).with_name("interp-run")), "demo", "--quiet"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.set_default_timeout(120_000)
        page.goto((Path(folder) / "interp-demo.html").as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector(".main-svg")
        figure = page.locator("figure").first.bounding_box()
        assert figure, "no figure"
        clip = {"x": 0, "y": figure["y"], "width": WIDTH, "height": figure["height"] + MARGIN}
        page.add_style_tag(content=".modebar { display: none !important; }")
        page.screenshot(path=PICTURE, clip=clip, full_page=True)
        browser.close()
    print(PICTURE, PICTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
