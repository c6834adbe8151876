"""Defines colours that colour-blind readers can tell apart, on light and dark backgrounds, as plotly templates.

The hues are Okabe and Ito's; each list is shifted in lightness until every colour has a contrast of at least
3:1 with its background (WCAG 1.4.11; tested). Figures use the light ones, and a page in the dark scheme replaces
them by the dark ones.
"""

from __future__ import annotations

from typing import Any, Literal

Scheme = Literal["light", "dark"]

GROUND: dict[Scheme, str] = {"light": "#ffffff", "dark": "#15181c"}
INK: dict[Scheme, str] = {"light": "#1b1f24", "dark": "#e6e8eb"}
GRID: dict[Scheme, str] = {"light": "#dfe3e8", "dark": "#343a42"}
COLOURS: dict[Scheme, list[str]] = {
    "light": ["#0072b2", "#d55e00", "#00805d", "#b3528a", "#8a6d00", "#2b87bd", "#5c5c5c"],
    "dark": ["#56b4e9", "#ff8a3d", "#2fc79b", "#e39cc4", "#f0e442", "#8fb8ff", "#c2c7cd"],
}
#: One symbol per series beside its colour, so that no reading rests on colour alone.
SYMBOLS = ["circle", "diamond", "square", "triangle-up", "x", "star", "cross"]
#: A perceptually even scale for one-sided values; `diverging` is the one for signed values.
SEQUENTIAL = "Cividis"
#: A scale for angles: its ends meet.
CYCLIC = "Phase"


def mark(index: int) -> tuple[str, str]:
    """Returns the light colour and the symbol of a series; where colours begin again, symbols are moved on by one."""
    colours = COLOURS["light"]
    return colours[index % len(colours)], SYMBOLS[(index + index // len(colours)) % len(SYMBOLS)]


def diverging(scheme: Scheme) -> list[list[float | str]]:
    blue, orange = COLOURS[scheme][0], COLOURS[scheme][1]
    return [[0.0, blue], [0.5, "#f2f2f2" if scheme == "light" else "#23272d"], [1.0, orange]]


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    )
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def template(scheme: Scheme) -> dict[str, Any]:
    """Returns a plotly layout template for one colour scheme."""
    axis = {
        "gridcolor": GRID[scheme],
        "linecolor": GRID[scheme],
        "zerolinecolor": GRID[scheme],
        "automargin": True,
        # Labels keep a distance from the panel, and titles one from the labels, however long these are.
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "rgba(0,0,0,0)",
        "title": {"standoff": 8},
        # Ticks read 20,000 and 0.00015, not 20k and 150µ, because steps and errors have no unit.
        "exponentformat": "none",
        "separatethousands": True,
    }
    return {
        "layout": {
            "colorway": COLOURS[scheme],
            "colorscale": {"sequential": SEQUENTIAL, "diverging": diverging(scheme)},
            "font": {"color": INK[scheme], "family": "system-ui, sans-serif", "size": 13},
            # The background is set, because the text could not be read on a dark one, such as a notebook's.
            "paper_bgcolor": GROUND[scheme],
            "plot_bgcolor": GROUND[scheme],
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": GROUND[scheme], "font": {"color": INK[scheme]}},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.04, "x": 0},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK[scheme], "activecolor": COLOURS[scheme][0]},
            "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
        },
        "data": {"bar": [{"error_y": {"color": INK[scheme]}}]},
    }
