"""What a search varies, holds and wants. Imports neither torch nor Optuna."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from interp_tasks.errors import UserError
from interp_tasks.file_io import read_toml
from interp_tasks.training.config import ResolvedConfig, TrainConfig, parse_setting_value, resolve_config
from tasks.model_settings import ModelSettings

#: What Optuna stores: lists are held as their JSON.
Scalar: TypeAlias = "str | int | float | bool | None"
#: What a setting is drawn from: a list of values, or a range ``{"low", "high"}``, perhaps with ``log`` or ``step``.
Values: TypeAlias = "list[Scalar] | dict[str, Any]"
Direction = Literal["minimize", "maximize"]
#: The objective is a mean over so many of the last logged evaluations (Syrkis & Søgaard 2024).
LAST = 10
#: The most combinations of settings that are looked at to find one in which a value is valid.
MAX_COMBINATIONS = 500


@dataclass(frozen=True)
class SearchPlan:
    """The plan of a search.

    Attributes:
        preset: of the task; ``fixed`` and what is varied override it.
        vary: setting -> what it is drawn from.
        fixed: setting -> value, as typed on a command line.
        objective: a validation metric; ``None``: ``loss`` if it is logged, else the one whose drop the task declares.
        direction: ``None``: ``maximize`` for accuracies and what the task wants large, else ``minimize``.
        seed: of the sampler. What trials are trained with is ``train.seed``, a setting like any other.
    """

    task_name: str
    preset: str
    vary: Mapping[str, Values]
    fixed: Mapping[str, str]
    objective: str | None = None
    direction: Direction | None = None
    seed: int = 42

    def config_of_trial(self, params: Mapping[str, Scalar]) -> ResolvedConfig:
        """Returns the configuration of a trial."""
        settings = {**self.fixed, **{key: setting_as_text(value) for key, value in params.items()}}
        return resolve_config(self.task_name, self.preset, settings)

    def identity(self, objective: str, direction: Direction) -> dict[str, Any]:
        """Returns as JSON what may not change between calls."""
        return {
            "task": self.task_name,
            "preset": self.preset,
            "settings": {name: parse_setting_value(text) for name, text in sorted(self.fixed.items())},
            "space": dict(self.vary),
            "objective": {"metric": objective, "direction": direction, "last": LAST},
            "sampler": {"name": "TPE", "seed": self.seed},
            "pruner": None,
        }

    def check_each_value_is_usable(self) -> None:
        """Refuses a value that is valid together with no value of the others."""
        all_ends = {key: representative_values(values) for key, values in self.vary.items()}
        for key, value in ((key, value) for key, values in all_ends.items() for value in values):
            complaints = []
            for combination in islice(product(*(all_ends | {key: [value]}).values()), MAX_COMBINATIONS):
                try:
                    self.config_of_trial(dict(zip(all_ends, combination, strict=True)))
                    break
                except ValueError as error:
                    complaints.append(error)
            else:
                raise UserError(f"{key} = {setting_as_text(value)}: {complaints[0]}")


def make_plan(
    task_name: str,
    *,
    preset: str = "cpu",
    space: str | None = None,
    vary: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    objective: str | None = None,
    seed: int = 42,
) -> SearchPlan:
    """Returns a plan, checked as far as that needs no torch.

    Args:
        space: name of a shipped space; ``None``: the first, or with ``vary`` none.
        vary: as :func:`parse_vary` takes it, beside what ``space`` varies or in its place.
        settings: held for all trials, whatever the space says of them.
        objective: a validation metric, as in ``accuracy``; ``NAME:min`` and ``NAME:max`` say which way is better.
    """
    resolve_config(task_name, preset)
    varied, settings = parse_vary(vary), dict(settings or {})
    if both := sorted(varied.keys() & settings.keys()):
        raise UserError(f"{both[0]} is given with --vary and with --set: vary it, or hold it")
    from_space, fixed = ({}, {}) if space is None and varied else read_space(task_name, space)
    varied = {key: values for key, values in {**from_space, **varied}.items() if key not in settings}
    fixed = {**{key: text for key, text in fixed.items() if key not in varied}, **settings}
    if not varied:
        raise UserError("nothing is left to vary: --set holds every setting of the space")
    if seed < 0:
        raise UserError(f"--seed {seed}: from 0 on")
    metric, colon, way = (objective or "").partition(":")
    directions: dict[str, Direction] = {"min": "minimize", "max": "maximize"}
    if colon and (not metric or way not in directions):
        raise UserError(
            f"--objective {objective!r}: write a validation metric, as in loss, accuracy or mse_masked:min"
        )
    plan = SearchPlan(task_name, preset, varied, fixed, metric or None, directions.get(way), seed)
    plan.check_each_value_is_usable()
    return plan


def read_shipped_spaces() -> dict[str, dict[str, Any]]:
    """Returns the content of each shipped space, by task and name."""
    file = Path(str(resources.files("interp_tasks.search"))) / "spaces.toml"
    return read_toml(file, "spaces")


def read_space(task_name: str, name: str | None) -> tuple[dict[str, Values], dict[str, str]]:
    """Returns what a shipped space varies and holds; ``None``: the first one shipped for the task."""
    shipped = read_shipped_spaces().get(task_name, {})
    if name is None and not shipped:
        raise UserError(f"no space is shipped for {task_name}: give --vary train.weight_decay=0.1,1")
    if (content := shipped.get(name or next(iter(shipped), ""))) is None:
        known = f"shipped ones of {task_name} are {', '.join(shipped)}" if shipped else "none is shipped"
        raise UserError(f"--space {name!r}: {known}; --vary says one of your own")
    varied, fixed = (
        {
            f"{section}.{key}": value
            for section, of in content.get(part, {}).items()
            for key, value in of.items()
        }
        for part in ("vary", "fixed")
    )
    return (
        {key: values_for_optuna(key, values) for key, values in varied.items()},
        {key: setting_as_text(value) for key, value in fixed.items()},
    )


def parse_vary(given: Sequence[str]) -> dict[str, Values]:
    """Parses ``train.weight_decay=0.1,0.5``, ``train.learning_rate=1e-4:1e-2:log``, ``model.d_model=64:256:64``."""
    varied: dict[str, Values] = {}
    for text in given:
        key, _, written = (part.strip() for part in text.partition("="))
        if not key or not written or key in varied:
            raise UserError(
                f"--vary {text!r}: write each key once, as in train.weight_decay=0.1,1 or "
                "train.learning_rate=1e-4:1e-2:log"
            )
        low, *rest = (parse_setting_value(part.strip()) for part in written.split(":"))
        if rest and all(type(end) in (int, float) for end in (low, rest[0])):
            values: Any = {"low": low, "high": rest[0]}
            if rest[1:]:
                values |= {"log": True} if rest[1] == "log" else {"step": rest[1]}
        else:
            try:  # lists in brackets, too
                values = list(json.loads(f"[{written}]"))
            except (ValueError, RecursionError):
                values = parse_setting_value(written, is_list=True)
        varied[key] = values_for_optuna(key, values)
    return varied


def values_for_optuna(key: str, values: Any) -> Values:
    """Returns what a setting is drawn from, as Optuna takes it; a range of whole numbers keeps them."""
    if isinstance(values, list):
        scalars = [setting_as_text(value) if isinstance(value, (list, dict)) else value for value in values]
        if len({setting_as_text(value) for value in scalars}) < max(2, len(scalars)):
            raise UserError(f"{key}: a search varies it, so give at least two different values")
        return scalars
    low, high, step = numbers = [values["low"], values["high"], values.get("step", 1)]
    if not all(type(each) in (int, float) and math.isfinite(each) and abs(each) < 2**63 for each in numbers):
        raise UserError(f"{key}: a range has two finite numbers, then log or a step")
    log = values.get("log", False)
    if not low < high or not step > 0 or (log and (low <= 0 or "step" in values)):
        raise UserError(
            f"{key}: {low:g}:{high:g} is no range: the first number is below the second, with log above 0 and "
            "without a step"
        )
    return {**values, "low": float(low), "high": float(high)} if takes_floats(key) else values


def takes_floats(key: str) -> bool:
    """Returns whether a setting is declared to take fractions; those of a task are as the range is written."""
    section, _, name = key.partition(".")
    fields = {"train": TrainConfig.model_fields, "model": ModelSettings.model_fields}.get(section, {})
    annotation = fields[name].annotation if name in fields else None
    return float in (get_args(annotation) or (annotation,))


def representative_values(values: Values) -> list[Scalar]:
    """Returns values that stand for all: of a list all of them, of a range both ends."""
    return values if isinstance(values, list) else [values["low"], values["high"]]


def setting_as_text(value: Any) -> str:
    """Returns a value as typed on a command line, so that it reads back as the same value."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
