"""Figures as files: pages that a browser opens, and pictures for papers."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

from circuits.errors import CircuitsError

#: Endings of files that need no exporter, and of pictures, which plotly's exporter draws with a browser.
PLAIN, PICTURES = (".html", ".json"), (".png", ".svg", ".pdf", ".jpg", ".webp")
#: Pixels of a picture without a width or height of its own, and how many of the picture's make one of those.
WIDTH, HEIGHT, SCALE = 1000, 450, 2.0
MISSING = (
    "pictures need plotly's exporter and a browser: pip install 'kaleido>=1', and Chrome or Chromium (Debian: apt "
    "install chromium); .html and .json need neither"
)


def save(
    figure: Any,
    path: str | PathLike[str],
    width: int | None = None,
    height: int | None = None,
    scale: int | float = SCALE,
) -> Path:
    """Write a figure where its ending says how: .html (one file, opens offline), .json, .png, .svg, .pdf, .jpg, .webp.

    Args:
        width: in pixels (default: the figure's own, else 1000 × 450).
        height: see `width`.
        scale: pixels of the picture for each of those; of no matter for .svg and .pdf.
    """
    to = Path(path)
    kind = to.suffix.lower()
    if kind not in PLAIN + PICTURES:
        raise CircuitsError(
            f"plots.save: {to.name!r}: name a file that ends in {', '.join(PLAIN + PICTURES)}"
        )
    try:
        if not to.parent.is_dir():
            raise CircuitsError(f"plots.save: {to}: there is no folder {to.parent}")
        if to.is_dir():
            raise CircuitsError(
                f"plots.save: {to} is a folder; name a file in it, such as {to / 'figure'}{kind}"
            )
        if not hasattr(figure, "to_html"):
            raise CircuitsError(f"plots.save: a plotly figure is needed; got {type(figure).__name__}")
        if kind in PICTURES:
            to.write_bytes(picture(figure, kind[1:], width, height, scale))
        elif kind == ".html":
            to.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
        else:
            to.write_text(figure.to_json(), encoding="utf-8")
    except OSError as error:
        raise CircuitsError(f"plots.save: cannot write {to}: {error.strerror or error}") from error
    return to


def picture(
    figure: Any, kind: str, width: int | None = None, height: int | None = None, scale: int | float = SCALE
) -> bytes:
    """A figure as "png", "svg" and so on."""
    check_exporter()
    size = {
        "width": width or figure.layout.width or WIDTH,
        "height": height or figure.layout.height or HEIGHT,
    }
    try:
        found: bytes = figure.to_image(format=kind, scale=scale, **size)
    except (RuntimeError, ValueError, OSError) as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CircuitsError(f"plots.save: no picture was made ({said}); {MISSING}") from error
    return found


def check_exporter() -> None:
    """Refuse pictures where what draws them is not installed, before anything slow."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major = int(version("kaleido").partition(".")[0])
    except PackageNotFoundError:
        major = 0
    if major < 1 or not _browser():
        raise CircuitsError(f"plots.save: {MISSING}")


def _browser() -> bool:
    """Whether the exporter finds a browser; told by the exporter itself."""
    from choreographer.browsers.chromium import Chromium

    return bool(os.environ.get("BROWSER_PATH") or Chromium.find_browser(skip_local=False))
