"""Shortens names of runs and checkpoints to what tells them apart, and spells those of positions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

#: Characters of a name that counts as short.
LONGEST_SHORT = 12


def short_names(refs: Sequence[str]) -> dict[str, str]:
    """Shortens REFs to their differences: ``@pre``, ``@post`` of one run; ``seed-0``, ``seed-1``; else letters."""
    common = in_common(refs)
    short = [] if common is None else [ref[len(common[0]) : len(ref) - len(common[1])] for ref in refs]
    if not short or max(map(len, short)) > LONGEST_SHORT:
        short = [chr(ord("A") + at) if len(refs) <= 26 else str(at + 1) for at in range(len(refs))]
    return dict(zip(refs, short, strict=True))


def spelled(text: str) -> str:
    """Returns a text as plotly shows it: a token such as <s> would be taken for a tag, and be gone."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def means(short: Mapping[str, str]) -> str:
    """Returns what short names stand for, in a sentence; what all names have in common is said once."""
    (name, first), *rest = short.items()
    begin, found, end = name.partition(first)
    if found and all(other == f"{begin}{each}{end}" for other, each in rest):
        return f"All names: {begin}…{end}."
    return "; ".join(f"{text}: {name}" for name, text in short.items()) + "."


def beginning_in_common(names: Sequence[str]) -> str:
    """Returns what all names begin with, up to a mark between parts, such that something of each is left."""
    letters = takewhile(lambda each: len({*each}) == 1, zip(*(name[:-1] for name in names), strict=False))
    same = "".join(each[0] for each in letters)
    return same[: max(same.rfind(mark) for mark in "@/:-") + 1]


def in_common(names: Sequence[str]) -> tuple[str, str] | None:
    """Returns what all names begin with and what they end with, in whole parts; ``None`` where too much is left.

    A part ends before ``@``, ``/`` or ``:``; where the rest of that is still long, at ``-`` too.
    """
    for marks in ("@/:", "@/:-"):
        parts = [re.findall(f"[{marks}]?[^{marks}]+|[{marks}]", name) for name in names]
        fewest = min(map(len, parts))
        begin = next((at for at in range(fewest) if len({each[at] for each in parts}) > 1), fewest - 1)
        end = next((at for at in range(fewest - begin) if len({each[-at - 1] for each in parts}) > 1), 0)
        before = "".join(parts[0][:begin])
        rests = ["".join(each[begin:]) for each in parts]
        if all(rest[:1] in "/:-" and len(rest) > 1 for rest in rests) and len({r[0] for r in rests}) == 1:
            before += rests[0][0]
        after = "".join(parts[0][len(parts[0]) - end :])
        left = [name[len(before) : len(name) - len(after)] for name in names]
        if len({*left}) == len({*names}) and all(left) and max(map(len, left)) <= LONGEST_SHORT:
            return before, after
    return None
