"""The palette of all figures, which is that of ``circuits``."""

from circuits.figures.palette import (
    COLOURS,
    GRID,
    GROUND,
    INK,
    SEQUENTIAL,
    SYMBOLS,
    Scheme,
    contrast,
    diverging,
    mixed,
    readable_on,
    template,
)

__all__ = [
    "COLOURS",
    "GRID",
    "GROUND",
    "INK",
    "SEQUENTIAL",
    "SYMBOLS",
    "Scheme",
    "contrast",
    "diverging",
    "mixed",
    "readable_on",
    "template",
]
