"""Numbers as people read them, in a terminal and on a page alike."""

from __future__ import annotations

import math
from collections.abc import Callable


def number(value: float | None) -> str:
    """Formats a number with four significant digits, integers with all; a dash stands for a missing one."""
    if value is None or math.isnan(value):
        return "–"
    return digits(value, 4)


def digits(value: float, significant: int) -> str:
    """Formats a number with ``count`` significant digits; no exponent from 1,000 to a million, no sign on 0."""
    value += 0.0
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.{significant}g}"


def signed(value: float | None) -> str:
    """Formats a difference with three significant digits, zeros included, and always its sign."""
    if value is None or math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{'+' if value > 0 else ''}{three_digits(value)}"


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, zeros included: 0.2 is 0.200; a whole number stays one."""
    plain = digits(value, 3)
    return plain if value == round(value) or abs(value) >= 1e3 else f"{value:#.3g}".rstrip(".")


def percent(value: float | None) -> str:
    """Formats a share as a percentage with one decimal; all of it and none without."""
    if value is None or math.isnan(value):
        return "–"
    return {"100.0%": "100%", "0.0%": "0%" if value == 0 else "0.0%"}.get(f"{value:.1%}", f"{value:.1%}")


def interval(low: float | None, high: float | None, shown: Callable[[float], str] = three_digits) -> str:
    """Formats ``[low, high]``; nothing where there is none."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"[{shown(low)}, {shown(high)}]"


def with_interval(
    text: str, low: float | None, high: float | None, shown: Callable[[float], str] = three_digits
) -> str:
    return f"{text} {interval(low, high, shown)}".rstrip()


def p_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"
