"""Specifies a grid: models to train, existing runs, and experiments on all of them. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from interp_tasks.errors import UserError
from interp_tasks.files import WHOLE_END, read_toml
from interp_tasks.training.config import SECTIONS
from tasks.settings import one_line

#: What a file should hold.
FORM = "a grid, see docs/grids.md"


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def seed_numbers(given: Any) -> tuple[int, ...]:
    """Parses different seeds from ``"0:4"``, ``"0,2"`` or a list."""
    if isinstance(given, str):
        from interp_tasks.settings import parse_seeds

        given = parse_seeds(given) or []
    if not isinstance(given, (list, tuple)) or not all(type(seed) is int for seed in given):
        raise ValueError('write seeds as "0:4", "0,2" or [0, 2]')
    if not given or min(given) < 0 or max(given) >= WHOLE_END or len(set(given)) < len(given):
        raise ValueError("name different seeds from 0 up, below 2^63")
    return tuple(given)


def several(given: Any) -> Any:
    """Returns a list of one where one is written without brackets."""
    return [given] if isinstance(given, (str, int, Mapping)) else given


def flattened(settings: Any) -> Any:
    """Flattens sections: ``task.p = 11`` without quotes is a table in TOML, and means ``"task.p" = 11``."""
    if not isinstance(settings, Mapping):
        return settings
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = key in SECTIONS and isinstance(value, Mapping)
        own = {f"{key}.{name}": each for name, each in value.items()} if is_section else {key: value}
        twice = flat.keys() & own.keys()
        if twice:
            raise UserError(f"{min(twice)} is set twice, with quotes and without: leave one out")
        flat |= own
    return checked_settings(flat)


def checked_settings(given: Any) -> Any:
    """Refuses values that cannot be part of a key: dates, infinities, objects."""
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"settings are text, finite numbers, true or false, and lists of them ({error})"
        ) from None
    return given


Seeds = Annotated[tuple[int, ...], BeforeValidator(seed_numbers)]
#: Marks or steps.
Steps = Annotated[tuple[StrictStr | StrictInt, ...], BeforeValidator(several)]


class Shipment(Entry):
    """Says which runs of a block ship with the package, under which name, with which checkpoints.

    Attributes:
        name: the model's name in the zoo, ``NAME`` or ``FOLDER/NAME``; ``{seed}`` and ``{train.dropout}`` stand for the
            seed and for a setting of the run.
        seeds: those of the block that ship; none named: all.
        at: marks or steps of the checkpoints that ship; empty: the log alone.
        exact: whether the last of them keeps its precision; all others are halved to float16.
    """

    name: str
    seeds: Annotated[tuple[int, ...] | None, BeforeValidator(lambda given: given and seed_numbers(given))] = (
        None
    )
    at: Steps = ("last",)
    exact: bool = False


class Training(Entry):
    """Runs to train: every combination of the values given, each with every seed.

    Attributes:
        task, preset: as of ``interp-run train``.
        settings: as of ``--set``, in the file under ``set``. A list stands for one run per value; of a setting that is
            a list itself, a list of lists does.
        seeds: ``"0:4"``, ``"0,2"``, or a list.
        ship: which of the runs ship with the package, and how; training does not read it.
    """

    task: str
    preset: str = "cpu"
    settings: Annotated[dict[str, Any], BeforeValidator(flattened)] = Field(default_factory=dict, alias="set")
    seeds: Seeds = (0,)
    ship: Annotated[tuple[Shipment, ...], BeforeValidator(several)] = ()

    def count(self, lists: frozenset[str]) -> int:
        """Returns how many runs these are."""
        return len(self.seeds) * math.prod(
            len(axis(value, key in lists)) for key, value in self.settings.items()
        )

    def combinations(self, lists: frozenset[str]) -> Iterator[dict[str, Any]]:
        """Yields each combination of settings; ``lists``: keys whose value is a list itself."""
        options = {key: axis(value, key in lists) for key, value in self.settings.items()}
        for values in product(*options.values()):
            yield dict(zip(options, values, strict=True))

    def axes(self, lists: frozenset[str]) -> tuple[str, ...]:
        """Returns the settings that differ between combinations."""
        return tuple(key for key, value in self.settings.items() if len(axis(value, key in lists)) > 1)


def axis(value: Any, is_list: bool) -> list[Any]:
    """Returns the values that a setting runs through."""
    if not isinstance(value, list):
        return [value]
    if is_list:
        return value if value and all(isinstance(each, list) for each in value) else [value]
    return value


class ExperimentSpec(Entry):
    """An experiment: a function of ``interp_tasks.experiments``.

    Attributes:
        at: marks or steps, ``RUN@mark`` each; none: the experiment takes the run itself, as ``drops`` does.
        over: one call for each run, for all seeds of one configuration, or for all runs.
        settings: its keyword arguments.
    """

    name: str
    at: Steps = ()
    over: Literal["run", "seeds", "all"] = "run"
    settings: Annotated[dict[str, Any], BeforeValidator(checked_settings)] = Field(default_factory=dict)


class Spec(Entry):
    """A grid.

    Attributes:
        train: what is trained.
        runs: runs that are there already, ``zoo:NAME`` or folders.
        experiment: what is measured on each.
        threads: CPU threads of a unit; results depend on it.
    """

    train: Annotated[tuple[Training, ...], BeforeValidator(several)] = ()
    runs: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    experiment: Annotated[tuple[ExperimentSpec, ...], BeforeValidator(several)] = ()
    threads: int = Field(1, ge=1, le=1024, strict=True)


#: What may stand below a key of a grid.
KEYS = {
    "train": [field.alias or name for name, field in Training.model_fields.items()],
    "experiment": list(ExperimentSpec.model_fields),
}


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Names a grid's file, once, in an error about what it holds."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(name) else f"{name}: {message}") from None


def read_spec(path: str | Path) -> Spec:
    """Returns a grid from a TOML file.

    Raises:
        UserError: in one line, naming what is wrong.
    """
    values = dict(read_toml(Path(path), FORM))
    if "train" in values:
        # What is of another form is refused below.
        blocks = values["train"] if isinstance(values["train"], list) else [values["train"]]
        values["train"] = [with_base(block, Path(path)) for block in blocks]
    return spec_of(values, str(path))


def with_base(block: Any, path: Path) -> Any:
    """Returns a block with task, preset and settings of the grid beside its file that it names as its base.

    Raises:
        UserError: if there is no such grid, it has not one block, or that has a base itself.
    """
    if not isinstance(block, Mapping) or "base" not in block:
        return block
    name = block["base"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"{path}: base = {name!r}: name a grid file beside this one, without its .toml")
    own_settings = {key: value for key, value in block.items() if key != "base"}
    fixed = [key for key in ("task", "preset") if key in own_settings]
    if fixed:
        raise UserError(f"{path}: {fixed[0]} is that of its base, {name}: leave it out")
    file = path.parent / f"{name}.toml"
    values = read_toml(file, FORM)
    blocks = values["train"] if isinstance(values.get("train"), list) else [values.get("train")]
    if any(isinstance(each, Mapping) and "base" in each for each in blocks):
        raise UserError(f"{path}: base = {name!r} has a base itself: name that one")
    base = spec_of(values, str(file)).train
    if len(base) != 1:
        raise UserError(f"{path}: base = {name!r}: a base has one [[train]], that one has {len(base)}")
    with naming_file(str(path)):
        settings = flattened(own_settings.get("set", {}))
    if isinstance(settings, Mapping):
        settings = {**base[0].settings, **settings}
    return {**own_settings, "task": base[0].task, "preset": base[0].preset, "set": settings}


def spec_of(values: Mapping[str, Any], name: str = "grid") -> Spec:
    """Returns a grid from a dict of the same shape.

    Raises:
        UserError: in one line, naming what is wrong.
    """
    try:
        spec = Spec(**values)
    except ValidationError as error:
        raise UserError(f"{name}: {one_line(error, 'grid', Spec.model_fields, KEYS)}") from None
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
    if not spec.train and not spec.runs:
        raise UserError(f'{name}: no runs: write [[train]] with a task, or runs = ["zoo:..."]')
    return spec
