"""Grid files: models to train, existing runs, experiments on all; those beside the zoo say what of theirs ships.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from interp_tasks.checkpoints.checkpoint_refs import ZOO_FOLDER, check_selector, closest_names_hint
from interp_tasks.errors import UserError
from interp_tasks.file_io import read_toml
from interp_tasks.setting_and_seed_parsing import parse_seeds
from interp_tasks.training.config import SECTIONS, list_valued_keys
from tasks.errors import TaskError
from tasks.model_settings import validation_error_line

#: What a file should hold.
FORM = "a grid, see docs/grids.md"
RECIPES = "recipes"


class StrictSection(BaseModel):
    """A section of a file: frozen, without unknown keys or infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def parse_seed_numbers(given: Any) -> tuple[int, ...]:
    """Parses different seeds from ``"0:4"``, ``"0,2"`` or a list."""
    return tuple(parse_seeds(",".join(map(str, wrap_single_value(given)))))


def wrap_single_value(given: Any) -> Any:
    """Returns a list of one where one is written without brackets."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def check_plain_values(value: Any, key: str) -> None:
    """Refuses what is neither text, a finite number, true or false, nor lists and tables of those: a date, ``inf``."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_plain_values(each, f"{key}.{name}")
    elif isinstance(value, (list, tuple, range)):
        for each in value:
            check_plain_values(each, key)
    elif not isinstance(value, (str, int, float, NoneType, BaseModel)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise UserError(
            f"{key}: {value} is neither text, a finite number, true or false, nor a list or table of them"
        )


def flatten_sections(settings: Any) -> Any:
    """Flattens sections: ``task.p = 11`` without quotes is a table in TOML, and means ``"task.p" = 11``."""
    if not isinstance(settings, Mapping):
        return settings
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = key in SECTIONS and isinstance(value, Mapping)
        own = {f"{key}.{name}": each for name, each in value.items()} if is_section else {key: value}
        if twice := flat.keys() & own.keys():
            raise UserError(f"{min(twice)} is set twice, with quotes and without: leave one out")
        flat |= own
    return flat


Seeds = Annotated[tuple[int, ...], BeforeValidator(parse_seed_numbers)]
#: Marks or steps.
Steps = Annotated[tuple[StrictStr | StrictInt, ...], BeforeValidator(wrap_single_value)]


def check_step_selectors(selectors: Steps, description: str) -> None:
    """Refuses a mark that there is not."""
    for selector in (each for mark in selectors for each in str(mark).split(",")):
        check_selector(selector.strip(), f"{description}, at")


class Shipment(StrictSection):
    """Says which runs of a block ship with the package, under which name, with which checkpoints.

    Attributes:
        name: the model's name in the zoo, ``NAME`` or ``FOLDER/NAME``; ``{seed}`` and ``{train.dropout}`` stand for the
            seed and for a setting of the run.
        seeds: those of the block that ship; none named: all.
        at: marks or steps of the checkpoints that ship; empty: the log alone.
        exact: whether the last of them keeps its precision; all others are halved to float16.
    """

    name: str
    seeds: Annotated[
        tuple[int, ...] | None, BeforeValidator(lambda given: given and parse_seed_numbers(given))
    ] = None
    at: Steps = ("last",)
    exact: bool = False


class TrainBlock(StrictSection):
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
    settings: Annotated[dict[str, Any], BeforeValidator(flatten_sections)] = Field(
        default_factory=dict, alias="set"
    )
    seeds: Seeds = (0,)
    ship: Annotated[tuple[Shipment, ...], BeforeValidator(wrap_single_value)] = ()

    def values_by_setting(self) -> dict[str, list[Any]]:
        """Returns the values that each setting runs through; axes are those that have several."""
        lists = list_valued_keys(self.task)

        def is_single_value(key: str, value: Any) -> bool:
            is_list = isinstance(value, list)
            return not is_list or (key in lists and not (value and all(isinstance(x, list) for x in value)))

        return {
            key: [value] if is_single_value(key, value) else value for key, value in self.settings.items()
        }

    def count_runs(self) -> int:
        """Returns how many runs these are."""
        return len(self.seeds) * math.prod(map(len, self.values_by_setting().values()))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yields each combination of settings."""
        values = self.values_by_setting()
        for chosen in product(*values.values()):
            yield dict(zip(values, chosen, strict=True))


class ExperimentSpec(StrictSection):
    """An experiment: a function of ``interp_tasks.experiments``.

    Attributes:
        at: marks or steps, ``RUN@mark`` each; none: the experiment takes the run itself, as ``drops`` does.
        over: one call for each run, for all seeds of one configuration, or for all runs.
        settings: its keyword arguments.
    """

    name: str
    at: Steps = ()
    over: Literal["run", "seeds", "all"] = "run"
    settings: dict[str, Any] = Field(default_factory=dict)


class Spec(StrictSection):
    """A grid.

    Attributes:
        train: what is trained.
        runs: runs that are there already, ``zoo:NAME`` or folders.
        experiment: what is measured on each.
        threads: CPU threads of a unit; results depend on it.
    """

    train: Annotated[tuple[TrainBlock, ...], BeforeValidator(wrap_single_value)] = ()
    runs: Annotated[tuple[str, ...], BeforeValidator(wrap_single_value)] = ()
    experiment: Annotated[tuple[ExperimentSpec, ...], BeforeValidator(wrap_single_value)] = ()
    threads: int = Field(1, ge=1, le=1024, strict=True)


#: What may stand below a key of a grid.
KEYS = {
    "train": [field.alias or name for name, field in TrainBlock.model_fields.items()],
    "experiment": list(ExperimentSpec.model_fields),
}


@contextlib.contextmanager
def name_file_in_errors(name: str) -> Iterator[None]:
    """Names a grid's file, once, in an error about what it holds."""
    try:
        yield
    except (UserError, TaskError) as error:
        message = str(error)
        raise UserError(message if message.startswith(name) else f"{name}: {message}") from None


def read_grid_spec(path: str | Path) -> Spec:
    """Returns a grid from a TOML file."""
    values = dict(read_toml(Path(path), FORM))
    if "train" in values:
        values["train"] = [merge_base_grid(block, Path(path)) for block in wrap_single_value(values["train"])]
    return parse_grid_spec(values, str(path))


def merge_base_grid(block: Any, path: Path) -> Any:
    """Returns a block with task, preset and settings of the grid beside its file that it names as its base."""
    if not isinstance(block, Mapping) or "base" not in block:
        return block
    own = dict(block)
    name = own.pop("base")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"{path}: base = {name!r}: name a grid file beside this one, without its .toml")
    if fixed := [key for key in ("task", "preset") if key in own]:
        raise UserError(f"{path}: {fixed[0]} is that of its base, {name}: leave it out")
    file = path.parent / f"{name}.toml"
    bases = parse_grid_spec(read_toml(file, FORM), str(file)).train
    if len(bases) != 1:
        raise UserError(f"{path}: base = {name!r}: a base has one [[train]], that one has {len(bases)}")
    with name_file_in_errors(str(path)):
        settings = flatten_sections(own.get("set", {}))
    if isinstance(settings, Mapping):
        settings = {**bases[0].settings, **settings}
    return {**own, "task": bases[0].task, "preset": bases[0].preset, "set": settings}


def parse_grid_spec(values: Mapping[str, Any], name: str = "grid") -> Spec:
    """Returns a grid from a dict of the same shape."""
    check_plain_values(values, f"{name}: grid")
    try:
        spec = Spec(**values)
    except ValidationError as error:
        raise UserError(f"{name}: {validation_error_line(error, 'grid', Spec.model_fields, KEYS)}") from None
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
    if not spec.train and not spec.runs:
        raise UserError(f'{name}: no runs: write [[train]] with a task, or runs = ["zoo:..."]')
    return spec


# ---- Recipes of shipped runs


def recipe_names() -> list[str]:
    """Lists the recipes that ship with the package."""
    return sorted(file.stem for file in (ZOO_FOLDER / RECIPES).glob("*.toml"))


def recipe_file(given: str | Path) -> Path:
    """Returns a grid file: the given path where it exists, else the recipe of that name."""
    path = Path(given)
    # Whatever lies there is the user's own, even where it cannot be read.
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    if str(given) in recipe_names():
        return ZOO_FOLDER / RECIPES / f"{given}.toml"
    raise UserError(
        f"{given}: no such file and no recipe of that name{closest_names_hint(str(given), recipe_names())}"
    )


@dataclass(frozen=True)
class RunToShip:
    """A run that a recipe is to train and ship, as the file says it.

    Attributes:
        name: in the zoo.
        block: of the file.
        index: of its unit among the block's.
        settings: those of the file, by key; of the seed nothing.
    """

    name: str
    block: TrainBlock
    index: int
    seed: int
    settings: Mapping[str, Any]
    shipment: Shipment


def runs_shipped_by_recipe(recipe: str | Path) -> list[RunToShip]:
    """Lists the runs that a recipe ships, in the order of its file."""
    file = recipe_file(recipe)
    with name_file_in_errors(str(file)):
        return shipped_runs(read_grid_spec(file))


def shipped_runs(spec: Spec) -> list[RunToShip]:
    """Lists the runs that a grid ships."""
    runs: dict[str, RunToShip] = {}
    for block in spec.train:
        trained = list(enumerate(product(block.combinations(), block.seeds))) if block.ship else []
        for shipment in block.ship:
            check_step_selectors(shipment.at, f"ship {shipment.name}")
            if unknown := set(shipment.seeds or ()) - set(block.seeds):
                raise UserError(f"ship {shipment.name}: seed {min(unknown)} is not trained")
            for index, (values, seed) in trained:
                if shipment.seeds is None or seed in shipment.seeds:
                    name = fill_shipped_name(shipment, {"seed": seed, **values})
                    if name in runs:
                        raise UserError(f"two runs ship as {name}: write {{seed}} or a setting into the name")
                    runs[name] = RunToShip(name, block, index, seed, values, shipment)
    return list(runs.values())


def fill_shipped_name(shipment: Shipment, known: Mapping[str, Any]) -> str:
    """Returns the name of a run in the zoo, its seed and settings filled in."""

    def fill_placeholder(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UserError(f"ship {shipment.name}: {match[0]} is none of {', '.join(known)}")
        return re.sub(r"[^A-Za-z0-9-]+", "_", str(known[match[1]]))

    name = re.sub(r"\{([^{}]*)\}", fill_placeholder, shipment.name)
    if not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", name):
        raise UserError(
            f"ship {name}: a name in the zoo is of letters, digits, - and _, with / between folders; 5e-1 for 0.5"
        )
    return name
