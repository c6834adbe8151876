"""Saves figures as pages that a browser opens, or as pictures for papers."""

from __future__ import annotations

from html import unescape
from os import PathLike
from pathlib import Path

from circuits.errors import CircuitsError
from circuits.figures.panel_grid import SUBTITLE_KEY, Figure, titled

#: File suffixes that need no exporter, and those of pictures, which plotly's exporter draws with a browser.
PLAIN, PICTURES = (".html", ".json"), (".png", ".svg", ".pdf", ".jpg", ".webp")
#: Default width and height of a picture in pixels, and its resolution: pixels of the file per pixel of the figure.
WIDTH, HEIGHT, SCALE = 1000, 450, 2.0
MISSING = (
    "pictures need plotly's exporter and a browser: pip install 'kaleido>=1', and Chrome or Chromium (Debian: apt "
    "install chromium); .html and .json need neither"
)


def save(
    figure: Figure,
    path: str | PathLike[str],
    width: int | None = None,
    height: int | None = None,
    scale: int | float = SCALE,
) -> Path:
    """Writes a figure in the format of the file's suffix.

    The suffixes are .html (one file, opens offline), .json, .png, .svg, .pdf, .jpg and .webp.

    Args:
        width: in pixels (default: the figure's own, else 1000 × 450).
        height: in pixels.
        scale: pixels of the file per pixel of the figure; not used for .svg and .pdf.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in PLAIN + PICTURES:
        raise CircuitsError(
            f"plots.save: {target.name!r}: name a file that ends in {', '.join(PLAIN + PICTURES)}"
        )
    if not hasattr(figure, "to_html"):
        raise CircuitsError(f"plots.save: a plotly figure is needed; got {type(figure).__name__}")
    try:
        if kind in PICTURES:
            target.write_bytes(picture(figure, kind[1:], width, height, scale))
        else:
            text = figure.to_html(default_height=HEIGHT) if kind == ".html" else figure.to_json()
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CircuitsError(f"plots.save: cannot write {target}: {error.strerror or error}") from error
    return target


def picture(
    figure: Figure, kind: str, width: int | None = None, height: int | None = None, scale: int | float = SCALE
) -> bytes:
    """Returns the bytes of a figure as "png", "svg" and so on."""
    # A copy, of which the subtitle is broken anew for this width.
    copy, meta = type(figure)(figure), dict(figure.layout.meta or {})
    copy.layout.width = int(width or figure.layout.width or WIDTH)
    if SUBTITLE_KEY in meta:
        copy = titled(copy, unescape(copy.layout.title.text or ""), meta[SUBTITLE_KEY])
    sizes = {"width": copy.layout.width, "height": height or copy.layout.height or HEIGHT}
    try:
        drawn = 1 if kind in ("svg", "pdf") else scale
        image: bytes = copy.to_image(format=kind, scale=drawn, **sizes)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CircuitsError(f"plots.save: no picture was made ({reason}); {MISSING}") from error
    return image
