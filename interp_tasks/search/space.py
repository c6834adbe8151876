"""Defines the space of a search: settings, and the values or the range of each. Imports neither torch nor Optuna."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from interp_tasks.errors import UserError
from interp_tasks.files import parse_value, read_toml
from interp_tasks.training.config import SECTIONS, TrainConfig, typed
from tasks.settings import ModelSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from optuna import Trial

#: What Optuna stores: lists are held as their JSON.
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Choices:
    """A setting that takes one of several values."""

    key: str
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2:
            raise UserError(f"{self.key}: a search varies it, so give at least two values")
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise UserError(f"{self.key}: a value is given twice in {as_text(list(self.values))}")

    def describe(self) -> list[Scalar]:
        return list(self.values)

    def samples(self) -> tuple[Scalar, ...]:
        """Returns values that stand for all: here all of them."""
        return self.values

    def suggest(self, trial: Trial) -> Scalar:
        chosen: Scalar = trial.suggest_categorical(self.key, self.values)
        return chosen


@dataclass(frozen=True)
class Range:
    """A setting that takes any number between two, both included.

    Attributes:
        log: uniform in the logarithm.
        step: distance between values that are tried; ``None``: any, of whole numbers each.
        whole: whole numbers only.
    """

    key: str
    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuses a range that is empty, infinite, or of other numbers than its setting takes."""
        if any(isinstance(end, int) and end.bit_length() > 63 for end in (self.low, self.high, self.step)):
            raise UserError(f"{self.key}: whole numbers of a range lie below 2^63")
        shown = f"{self.key}: {self.low:g}:{self.high:g}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise UserError(f"{shown} is no range: the first number is below the second, both finite")
        if self.log and self.low <= 0:
            raise UserError(f"{shown}:log starts at {self.low:g}: a logarithmic range is above 0")
        if self.log and self.step is not None:
            raise UserError(f"{shown}: a range is logarithmic or has a step, not both")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise UserError(f"{shown}: a step of {self.step:g} does not fit into it")
        numbers = (self.low, self.high, *([] if self.step is None else [self.step]))
        if self.whole and not all(isinstance(number, int) for number in numbers):
            raise UserError(f"{shown}: {self.key} takes whole numbers, so write the range in whole numbers")

    def describe(self) -> dict[str, Any]:
        description: dict[str, Any] = {"low": self.low, "high": self.high, "whole": self.whole}
        return (
            description
            | ({"log": True} if self.log else {})
            | ({} if self.step is None else {"step": self.step})
        )

    def samples(self) -> tuple[Scalar, ...]:
        return (self.low, self.high)

    def suggest(self, trial: Trial) -> Scalar:
        if self.whole:
            return trial.suggest_int(
                self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log
            )
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)


Dimension = Choices | Range


@dataclass(frozen=True)
class Space:
    """The settings that a search varies, in the order in which they are tried, and those it holds fixed.

    Attributes:
        name: of a shipped space, or the file it was read from; empty for one given key by key.
        fixed: key -> value, as :func:`~interp_tasks.training.config.resolve_config` takes them.
    """

    dimensions: tuple[Dimension, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dimension.key for dimension in self.dimensions)

    def varying(self, others: Iterable[Dimension]) -> Space:
        """Returns the space with dimensions added; one with a key that is there replaces it."""
        new = {dimension.key: dimension for dimension in others}
        dimensions = {dimension.key: dimension for dimension in self.dimensions} | new
        fixed = {key: value for key, value in self.fixed.items() if key not in new}
        return replace(self, dimensions=tuple(dimensions.values()), fixed=fixed)

    def holding(self, settings: Mapping[str, str]) -> Space:
        """Returns the space with these settings fixed, whether it varied or fixed them before."""
        left = tuple(dimension for dimension in self.dimensions if dimension.key not in settings)
        return replace(self, dimensions=left, fixed={**self.fixed, **settings})

    def describe(self) -> dict[str, Any]:
        """Returns the values or range of each key, as JSON."""
        return {dimension.key: dimension.describe() for dimension in self.dimensions}


def read_space(task_name: str, text: str | None) -> Space:
    """Reads a shipped space by name or a TOML file; ``None`` is the first one shipped for the task.

    Raises:
        UserError: in one line.
    """
    if text is not None and (text.endswith(".toml") or "/" in text):
        return parse_space(read_toml(Path(text), "a space, see docs/search.md", "--space"), text)
    shipped = shipped_spaces().get(task_name, {})
    if text is None:
        if not shipped:
            raise UserError(
                f"no space is shipped for {task_name}: give --vary train.weight_decay=0.1,1, or --space FILE.toml"
            )
        text = next(iter(shipped))
    if text not in shipped:
        known = f"shipped ones of {task_name} are {', '.join(shipped)}" if shipped else "none is shipped"
        raise UserError(f"--space {text!r}: {known}; or name a file that ends in .toml")
    return parse_space(shipped[text], text)


def shipped_spaces() -> dict[str, dict[str, Any]]:
    """Returns the content of each shipped space, by task and name."""
    text = resources.files("interp_tasks.search").joinpath("spaces.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse_space(content: Mapping[str, Any], name: str) -> Space:
    """Parses a space as TOML holds it: ``[vary.train]``, ``[fixed.model]`` and so on."""
    for part, sections in content.items():
        if part not in ("vary", "fixed") or not isinstance(sections, dict):
            raise UserError(
                f"--space {name}: {part!r} is not of a space; it has [vary.train], [fixed.model], ..."
            )
        for section, values in sections.items():
            if section not in SECTIONS or not isinstance(values, dict):
                raise UserError(
                    f"--space {name}: [{part}.{section}]: sections are {part}.task, {part}.model and {part}.train"
                )
    dimensions = tuple(
        dimension(f"{section}.{key}", value)
        for section, values in content.get("vary", {}).items()
        for key, value in values.items()
    )
    fixed = {
        f"{section}.{key}": as_text(value)
        for section, values in content.get("fixed", {}).items()
        for key, value in values.items()
    }
    both = sorted({one.key for one in dimensions} & set(fixed))
    if both:
        raise UserError(f"--space {name}: {both[0]} is both fixed and varied")
    return Space(dimensions, fixed, name)


def dimension(key: str, value: Any) -> Dimension:
    """Parses a dimension from TOML: a list of values, or a table of ``low``, ``high``, perhaps ``log`` or ``step``."""
    if isinstance(value, list):
        return Choices(key, tuple(map(storable, value)))
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log", "step"}:
        numbers = [value["low"], value["high"], value.get("step", 1)]
        if all(type(number) in (int, float) for number in numbers) and type(value.get("log", False)) is bool:
            return Range(key, **value, whole=is_whole(key, numbers))
    raise UserError(f"{key}: write a list of values, or {{ low = 1e-4, high = 1e-2, log = true }}")


def read_vary(given: Sequence[str]) -> tuple[Dimension, ...]:
    """Parses ``train.weight_decay=0.1,0.5``, ``train.learning_rate=1e-4:1e-2:log``, ``model.d_model=64:256:64``.

    Raises:
        UserError: in one line.
    """
    dimensions: dict[str, Dimension] = {}
    for text in given:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise UserError(
                f"--vary {text!r}: write train.weight_decay=0.1,1 or train.learning_rate=1e-4:1e-2:log"
            )
        if key in dimensions:
            raise UserError(f"--vary {key} is given twice")
        dimensions[key] = range_of(key, values) or Choices(key, tuple(map(storable, listed(values))))
    return tuple(dimensions.values())


def range_of(key: str, text: str) -> Range | None:
    """Parses ``LOW:HIGH``, ``LOW:HIGH:log`` or ``LOW:HIGH:STEP``; ``None`` where it is no range."""
    parts = [typed(part.strip()) for part in text.split(":")]
    if len(parts) not in (2, 3) or not all(type(part) in (int, float) for part in parts[:2]):
        return None
    last = parts[2] if len(parts) == 3 else None
    if last is not None and last != "log" and type(last) not in (int, float):
        raise UserError(f"--vary {key}={text}: after the range stands log, or a step")
    step = None if last in (None, "log") else last
    numbers = [*parts[:2], *([] if step is None else [step])]
    return Range(key, parts[0], parts[1], last == "log", step, is_whole(key, numbers))


def listed(text: str) -> list[Any]:
    """Splits ``0.1, 1`` or ``[2, 3], [5]`` at the commas outside brackets."""
    try:
        values: list[Any] = parse_value(f"[{text}]")
    except json.JSONDecodeError:
        return [typed(part.strip()) for part in text.split(",")]
    return values


def is_whole(key: str, numbers: Sequence[Any]) -> bool:
    """Tells whether a setting takes whole numbers, as declared or, for a task's setting, as the range is written."""
    section, _, name = key.partition(".")
    classes: dict[str, type[BaseModel]] = {"train": TrainConfig, "model": ModelSettings}
    declared = classes.get(section)
    if declared is None or name not in declared.model_fields:
        return all(type(number) is int for number in numbers)
    annotation = declared.model_fields[name].annotation
    kinds = get_args(annotation) or (annotation,)
    return int in kinds and float not in kinds


def storable(value: Any) -> Scalar:
    """Returns a value in a form that Optuna can store."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return as_text(value)


def as_text(value: Any) -> str:
    """Returns a value as typed on a command line, so that it reads back as the same value."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
