"""How long a page takes to open: words, the first figure, every figure, in headless chromium.

    python benchmarks/report.py report.html [other.html ...] [--repeats 3]

Each opening is a window of its own, 1400 by 900 pixels; times begin when the address is asked for. Lines give the
median seconds with the range. Words and tables are there with the first, figures in sight before the others.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, sync_playwright

MOMENTS = ("words", "first figure", "every figure")


def opened(browser: Browser, page: Path) -> list[float]:
    """Seconds to each of the moments."""
    window = browser.new_page(viewport={"width": 1400, "height": 900})
    began = time.perf_counter()
    window.goto(page.resolve().as_uri(), wait_until="domcontentloaded")
    seconds = [time.perf_counter() - began]
    for there in (".main-svg", "html[data-drawn]"):
        window.wait_for_selector(there, state="attached")
        seconds.append(time.perf_counter() - began)
    window.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE.html")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if program is None:
        sys.exit("no chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for page in given.pages:
            times = list(zip(*(opened(browser, page) for _ in range(given.repeats)), strict=True))
            said = [
                f"{name} {median(each):.2f} s ({min(each):.2f}-{max(each):.2f})"
                for name, each in zip(MOMENTS, times, strict=True)
            ]
            print(f"{page.name}, {page.stat().st_size / 1e6:.1f} MB: {', '.join(said)}")
        browser.close()


if __name__ == "__main__":
    main()
