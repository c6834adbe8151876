"""Numbers as people read them, in a terminal and on a page alike."""

from __future__ import annotations

import math


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
    """Formats a difference with three significant digits, and always its sign."""
    if value is None or math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:+.3g}"


def interval(low: float | None, high: float | None) -> str:
    """Formats ``[low, high]``; nothing where there is none."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"[{digits(low, 3)}, {digits(high, 3)}]"


def with_interval(shown: str, low: float | None, high: float | None) -> str:
    return f"{shown} {interval(low, high)}".rstrip()


def p_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"
