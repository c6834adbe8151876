"""Functions that the figures of a report share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, template
from interp_tasks.pages import Figure, Stepped

if TYPE_CHECKING:
    from interp_tasks.report.snapshots import View

#: Width in pixels that figures are planned for: of one alone, of one of two; they give way on narrow screens.
ALONE, PAIRED = 1240, 600


def width_of(views: Sequence[View]) -> int:
    return ALONE if len(views) == 1 else PAIRED


def stepped(
    view: View,
    figure: Any,
    moves: Mapping[str, Any],
    alt: str,
    height: int,
    picks: Sequence[int | float] = (),
    width: int | None = None,
) -> Stepped:
    """Returns a figure of a view; of one of two it says which run and step."""
    figure.update_layout(template=template("light"), height=height)
    moves = dict(moves)
    if view.beside:
        titles = [f"{view.name}, step {step:,}" for step in view.steps]
        figure.update_layout(
            title={"text": titles[0], "font": {"size": 13}, "x": 0, "y": 0.99, "yanchor": "top"}
        )
        moves["layout.title.text"] = titles
    return Stepped(
        Figure(figure, alt=f"{view.name}: {alt}", height=height, width=width), moves, view.at, picks
    )


def rounded(values: Any, digits: int = 6) -> Any:
    """Returns numbers with so many significant digits, as JSON holds them; ``None`` for NaN."""
    import numpy as np

    if isinstance(values, np.ndarray):
        return [rounded(part, digits) for part in values]
    value = float(values)
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None


def step_line() -> dict[str, Any]:
    """Returns a vertical line at the slider's step; its place is moved."""
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "line": {"color": COLOURS["light"][6], "width": 1.5, "dash": "dot"},
    }


def move_line(view: View, shape: int = 0) -> dict[str, Any]:
    return {f"layout.shapes.{shape}.{end}": view.steps for end in ("x0", "x1")}


def see_through(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
