"""Texts that others wrote (names, options, errors) made fit to be shown: nothing a terminal obeys, nothing endless."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Of what a user wrote, and of a whole refusal, so many characters are shown.
QUOTED, LONGEST = 80, 300
#: What a terminal obeys or reorders lines by: C0 and C1 controls, line separators, bidirectional marks; halves of
#: characters, which no encoding has.
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Those of a text of several lines that stay.
LAYOUT = "\n\t"


def printable(text: str, *, keep: str = "", json: bool = False) -> str:
    """Returns the text with control characters spelled out, such as ``\\x1b``.

    Args:
        keep: characters left as they are, such as ``LAYOUT``.
        json: spell them as JSON does within a string: ``\\u001b``.
    """

    def spelled(match: re.Match[str]) -> str:
        one = match[0]
        if one in keep:
            return one
        return f"\\u{ord(one):04x}" if json else repr(one)[1:-1]

    return OBEYED.sub(spelled, text)


def brief(text: str, most: int = QUOTED) -> str:
    """Returns the text, or its two ends where it is longer than ``most``."""
    if len(text) <= most:
        return text
    left = most - 3
    return f"{text[: left - left // 3]}...{text[len(text) - left // 3 :]}"


def one_line(message: str, written: Iterable[str] = ()) -> str:
    """Returns a refusal as one line of at most ``LONGEST`` characters.

    Args:
        written: what the user wrote; where it is quoted, it is shortened to ``QUOTED`` characters, and so is any other
            word that is longer.
    """
    line = printable(flat(message))
    # As it was written, or as its repr.
    quoted = {printable(flat(form)) for text in written for form in (text, repr(text)[1:-1])}
    for text in sorted((each for each in quoted if len(each) > QUOTED), key=len, reverse=True):
        line = line.replace(text, brief(text))
    return brief(re.sub(r"\S+", lambda word: brief(word[0]), line), LONGEST)


def flat(text: str) -> str:
    """Returns a text in one line, with a blank for every run of white space."""
    return " ".join(text.split())


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Returns the closest name as a question with a blank behind it, or nothing where none is close."""
    from difflib import get_close_matches

    return "".join(f"did you mean {name}? " for name in get_close_matches(given, list(names), 1))


def counted(count: int, noun: str) -> str:
    """Returns a number of things: ``1 unit``, ``2 units``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
