"""Writes a figure as a page of its own, which fits its window: words are broken by the browser, panels drawn anew."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape, unescape
from importlib import resources
from typing import Any

from circuits.figures.layout import laid_out, least_width
from circuits.figures.palette import GROUND, INK
from circuits.figures.style import HEIGHT, SUBTITLE_KEY, TITLE_HEIGHT_KEY, untitled

STYLE = f"""
body {{ margin: 0; padding: 1rem; background: {GROUND["light"]}; color: {INK["light"]};
  font: 13px/1.4 system-ui, sans-serif; }}
h1 {{ font-size: 16px; font-weight: normal; margin: 0 0 0.4rem; overflow-wrap: anywhere; }}
p {{ font-size: 12px; margin: 0; max-width: 56rem; overflow-wrap: anywhere; }}
/* The toolbar stands above its figure, where it covers neither legend nor title. */
.frame {{ overflow-x: auto; padding-top: 1.8rem; }}
.modebar-container {{ top: -1.8rem !important; }}
.plotly-graph-div, .svg-container {{ overflow: visible !important; }}
"""


def page(figure: Any) -> str:
    """Returns a page with plotly in it, on which a figure that cannot be as narrow as the window scrolls in a frame.

    In that of a circuit a click on a node fades the edges of others.
    """
    meta = figure.layout.meta if isinstance(figure.layout.meta, Mapping) else {}
    title = unescape(figure.layout.title.text or "") if TITLE_HEIGHT_KEY in meta else ""
    copy = untitled(figure)
    says = f"{meta.get(SUBTITLE_KEY, '')} {laid_out(copy) if title else ''}".strip()
    scripts = [script("windows.js")]
    if fades(meta):
        copy = without_menu(copy)
        scripts.append(f'{script("fading.js")}fadeOnClick(document.getElementById("{{plot_id}}"));')
    widest = copy.layout.width
    copy.update_layout(width=None, height=copy.layout.height or HEIGHT)
    sizes = f"min-width:{least_width(copy, widest)}px" + (f";max-width:{widest}px" if widest else "")
    drawn = copy.to_html(
        full_html=False,
        include_plotlyjs=True,
        default_height=f"{copy.layout.height}px",
        # Of several, each would be a function of its own, which does not see the others.
        post_script="".join([*scripts, script("saved.js")]),
    )
    words = (f"<h1>{escape(title)}</h1>\n" if title else "") + (f"<p>{escape(says)}</p>\n" if says else "")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title or 'Figure')}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'{words}<div class="frame"><div style="{sizes}">{drawn}</div></div>\n</body>\n</html>\n'
    )


def fades(meta: Any) -> bool:
    """Tells from a figure's `layout.meta` whether fading.js has something to do in it."""
    return isinstance(meta, Mapping) and "fading" in meta


def script(name: str) -> str:
    """Returns the source of a script that pages share: `fadeOnClick(plot)`, or what a narrow window needs."""
    return resources.files("circuits.figures").joinpath(name).read_text(encoding="utf-8")


def without_menu(figure: Any) -> Any:
    """Returns a copy without the menu, which does nothing in a picture and in a page is what a click does."""
    copy, menu = type(figure)(figure), figure.layout.meta["fading"]["menu"]
    copy.update_layout(updatemenus=[], overwrite=True)
    return copy.update_layout(height=copy.layout.height - menu, margin={"t": copy.layout.margin.t - menu})
