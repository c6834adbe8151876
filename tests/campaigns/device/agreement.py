"""Compares what two devices measured, number by number and word by word.

Rows of a table are paired by their words and not by their order, because near ties are ranked by rounding; for the same
reason ranks are not compared, nor p-values of effects that are rounding alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tests.campaigns.frame import Fault, told

#: What tells a row of a table from the others, beside its words.
PLACES = ("step", "seed", "draw", "layer", "head", "position")
#: What is made of the order of all rows.
OF_ORDER = ("rank", "p_adjusted")
#: By how much p-values may differ: a flip whose sum is the observed one but for rounding counts or does not.
P_VALUE = 0.05
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)")

Column = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may differ: by a share of each and of the largest beside it, and where all should be zero."""

    relative: float
    of_largest: float
    at_zero: float

    def bounds(self, expected: Column) -> Column:
        finite = np.abs(expected[np.isfinite(expected)])
        return self.relative * np.abs(expected) + self.of_largest * finite.max(initial=0.0) + self.at_zero


@dataclass(frozen=True)
class Check:
    """What one trial compares.

    Attributes:
        here: measures it on the CPU.
        there: measures it with the device that it is given, in one way or several, each with a name.
    """

    kind: str
    name: str
    tolerance: Tolerance
    here: Callable[[], Any]
    there: Callable[[str], Iterable[tuple[str, Any]]]

    def make(self, device: str, planted: Callable[[], AbstractContextManager[Any]]) -> list[str]:
        """Raises Fault where the device has other numbers."""
        try:
            expected = columns(self.here())
            with planted():
                for way, measured in self.there(device):
                    wrong = differences(expected, columns(measured), self.tolerance)
                    if wrong:
                        raise Fault(f"{way or device}: {'; '.join(wrong[:3])} ({len(wrong)} columns)")
        except Exception as error:
            raise Fault(f"{self.name}: {told(error)}") from error
        return [self.kind]


def columns(measured: Any, name: str = "") -> dict[str, Column]:
    """Returns all numbers and words of what was measured, by their place in it."""
    if isinstance(measured, pd.DataFrame):
        measured = measured.to_dict("records")
    if isinstance(measured, Tensor):
        value = measured.detach().cpu()
        return {name: (torch.view_as_real(value) if value.is_complex() else value.double()).numpy()}
    if isinstance(measured, Mapping):
        return merged(columns(value, f"{name}/{key}") for key, value in measured.items())
    if isinstance(measured, Sequence) and not isinstance(measured, str):
        if measured and all(isinstance(row, Mapping) for row in measured):
            return table(measured, name)
        parts = merged(columns(value, f"{name}/{place}") for place, value in enumerate(measured))
        return {f"{name}/length": column([len(measured)]), **parts}
    return {name: column([measured])}


def merged(parts: Iterable[dict[str, Column]]) -> dict[str, Column]:
    return dict(chain.from_iterable(part.items() for part in parts))


def table(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Column]:
    """Returns the columns of rows, which are ordered by their words."""
    flat = sorted((dict(cells(row, name)) for row in rows), key=words)
    found: dict[str, list[Any]] = {each: [row.get(each) for row in flat] for row in flat for each in row}
    return {each: column(values) for each, values in found.items() if last(each) not in OF_ORDER}


def cells(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields what stands in a row, and in rows within it, by its place."""
    if isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from cells(value, f"{name}/{key}")
    elif isinstance(thing, (list, tuple)):
        for place, value in enumerate(thing):
            yield from cells(value, f"{name}/{place}")
    else:
        yield name, thing


def words(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, str(value)) for name, value in row.items() if isinstance(value, str) or last(name) in PLACES
    ]


def last(name: str) -> str:
    return name.rpartition("/")[2]


def column(values: Sequence[Any]) -> Column:
    """Returns numbers, of which those that are missing are NaN, or words."""
    if all(value is None or isinstance(value, (int, float, np.number, np.bool_)) for value in values):
        return np.array([np.nan if value is None else float(value) for value in values])
    return np.array([str(value) for value in values])


def differences(expected: dict[str, Column], found: dict[str, Column], tolerance: Tolerance) -> list[str]:
    """Returns a line for every column that differs."""
    if expected.keys() != found.keys():
        return [f"one has, the other has not: {sorted(expected.keys() ^ found.keys())[:5]}"]
    lines = []
    for name, one in expected.items():
        other = found[name]
        if one.shape != other.shape or one.dtype.kind != other.dtype.kind:
            lines.append(f"{name}: {one.dtype} {one.shape}, and {other.dtype} {other.shape}")
            continue
        if one.dtype.kind == "f":
            differs = numbers_differ(one, other, tolerance.bounds(one))
            if last(name) == "p_value":
                effect = expected[name.removesuffix("p_value") + "effect"]
                differs = (np.abs(effect) > 10 * tolerance.bounds(effect)) & (np.abs(one - other) > P_VALUE)
        else:
            differs = np.array(
                [text_differs(*pair, tolerance) for pair in zip(one.flat, other.flat, strict=True)]
            )
        if differs.any():
            place = int(differs.argmax())
            lines.append(
                f"{name}: {differs.sum()} of {one.size}, as {one.flat[place]} and {other.flat[place]}"
            )
    return lines


def numbers_differ(one: Column, other: Column, bounds: Column) -> Column:
    finite = np.isfinite(one) & np.isfinite(other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        return np.where(finite, np.abs(one - other) > bounds, ~same)


def text_differs(one: str, other: str, tolerance: Tolerance) -> bool:
    """Returns whether texts differ by more than the rounding of a number in them."""
    parts, others = NUMBER.split(one), NUMBER.split(other)
    if parts[::2] != others[::2]:
        return True
    pairs = zip(parts[1::2], others[1::2], strict=True)
    read = np.array([[float(each.replace(",", "") or 0) for each in pair] for pair in pairs]).reshape(-1, 2)
    return bool((np.abs(read[:, 0] - read[:, 1]) > tolerance.relative * read[:, 0]).any())
