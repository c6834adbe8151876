"""Texts that others wrote made fit to be shown (nothing a terminal obeys, nothing endless), and amounts in words."""

from __future__ import annotations

import re

#: Of what a user wrote, and of a whole refusal, so many characters are shown.
QUOTED, LONGEST = 80, 300
#: What a terminal obeys or reorders lines by: C0 and C1 controls, line separators, bidirectional marks; halves of
#: characters, which no encoding has.
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Those of a text of several lines that stay.
LAYOUT = "\n\t"


def escape_control_characters(text: str, *, keep: str = "", as_json: bool = False) -> str:
    """Returns the text with control characters spelled out, such as ``\\x1b``.

    Args:
        keep: characters left as they are, such as ``LAYOUT``.
        as_json: spell them as JSON does within a string: ``\\u001b``.
    """

    def spell_out(match: re.Match[str]) -> str:
        one = match[0]
        if one in keep:
            return one
        return f"\\u{ord(one):04x}" if as_json else repr(one)[1:-1]

    return OBEYED.sub(spell_out, text)


def shorten_middle(text: str, max_length: int = QUOTED) -> str:
    """Returns the text, or its two ends where it is longer than ``max_length``."""
    if len(text) <= max_length:
        return text
    left = max_length - 3
    return f"{text[: left - left // 3]}...{text[len(text) - left // 3 :]}"


def one_line(message: str) -> str:
    """Returns a refusal as one line of at most ``LONGEST`` characters, no word of it longer than ``QUOTED``."""
    return shorten_middle(
        re.sub(
            r"\S+", lambda word: shorten_middle(word[0]), escape_control_characters(" ".join(message.split()))
        ),
        LONGEST,
    )


def pluralise(count: int | str, noun: str) -> str:
    """Returns a number of things: ``1 unit``, ``2 units``, ``all units``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_flop(count: int) -> str:
    """Formats FLOP as ``3.82 GFLOP``."""
    return format_scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_bytes(count: int) -> str:
    """Formats bytes as ``3.82 MiB``."""
    return format_scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_scaled(count: int, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base ** (power + 1) and power < len(units) - 1:
        power += 1
    amount = count / base**power
    return f"{amount:.3g} {units[power]}" if amount < 1000 else f"{amount:.0f} {units[power]}"


def format_duration(seconds: float) -> str:
    """Formats seconds as ``45 s``, ``12 min``, ``3.4 h`` or ``12 days``: a forecast is worth two digits."""
    for unit, length, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86400:,.0f} days"
