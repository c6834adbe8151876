"""Saves figures as pages that a browser opens, or as pictures for papers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import unescape
from os import PathLike
from pathlib import Path
from typing import Any

from circuits.errors import CircuitsError
from circuits.figures.layout import SUBTITLE_KEY, least_width, titled

#: File suffixes that need no exporter, and those of pictures, which plotly's exporter draws with a browser.
PLAIN, PICTURES = (".html", ".json"), (".png", ".svg", ".pdf", ".jpg", ".webp")
#: Default width and height of a picture in pixels, and its resolution: pixels of the file per pixel of the figure.
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
    """Writes a figure in the format of the file's suffix.

    The suffixes are .html (one file, opens offline), .json, .png, .svg, .pdf, .jpg and .webp.

    Args:
        width: in pixels (default: the figure's own, else 1000 × 450).
        height: see `width`.
        scale: pixels of the file per pixel of the figure; not used for .svg and .pdf.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in PLAIN + PICTURES:
        raise CircuitsError(
            f"plots.save: {target.name!r}: name a file that ends in {', '.join(PLAIN + PICTURES)}"
        )
    try:
        if not target.parent.is_dir():
            raise CircuitsError(f"plots.save: {target}: there is no folder {target.parent}")
        if target.is_dir():
            raise CircuitsError(
                f"plots.save: {target} is a folder; name a file in it, such as {target / 'figure'}{kind}"
            )
        if not hasattr(figure, "to_html"):
            raise CircuitsError(f"plots.save: a plotly figure is needed; got {type(figure).__name__}")
        if kind in PICTURES:
            target.write_bytes(picture(figure, kind[1:], width, height, scale))
        elif kind == ".html":
            target.write_text(page(figure), encoding="utf-8")
        else:
            target.write_text(figure.to_json(), encoding="utf-8")
    except OSError as error:
        raise CircuitsError(f"plots.save: cannot write {target}: {error.strerror or error}") from error
    return target


def page(figure: Any) -> str:
    """Returns a page with plotly in it; a figure that cannot be as narrow as its window scrolls."""
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        default_height=f"{figure.layout.height or HEIGHT}px",
        config={"responsive": True},
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Figure</title>\n</head>\n'
        f'<body style="margin:0;overflow-x:auto"><div style="min-width:{least_width(figure)}px">{drawn}</div></body>\n'
        "</html>\n"
    )


def picture(
    figure: Any, kind: str, width: int | None = None, height: int | None = None, scale: int | float = SCALE
) -> bytes:
    """Returns the bytes of a figure as "png", "svg" and so on."""
    check_exporter()
    width = int(width or figure.layout.width or WIDTH)
    figure = at_width(figure, width)
    try:
        image: bytes = figure.to_image(
            format=kind, scale=scale, width=width, height=height or figure.layout.height or HEIGHT
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CircuitsError(f"plots.save: no picture was made ({reason}); {MISSING}") from error
    return image


def at_width(figure: Any, width: int) -> Any:
    """Returns a copy for a picture of a width, its subtitle broken anew."""
    copy, meta = type(figure)(figure), figure.layout.meta
    copy.layout.width = width
    if not isinstance(meta, Mapping) or SUBTITLE_KEY not in meta:
        return copy
    return titled(copy, unescape(copy.layout.title.text or ""), meta[SUBTITLE_KEY])


def check_exporter() -> None:
    """Raises `CircuitsError` where the exporter of pictures or its browser is missing, before anything slow."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major = int(version("kaleido").partition(".")[0])
    except PackageNotFoundError:
        major = 0
    if major < 1 or not _browser():
        raise CircuitsError(f"plots.save: {MISSING}")


def _browser() -> bool:
    """Returns whether the exporter finds a browser, by the exporter's own search."""
    from choreographer.browsers.chromium import Chromium

    return bool(os.environ.get("BROWSER_PATH") or Chromium.find_browser(skip_local=False))
