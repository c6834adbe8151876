"""The recipes of shipped runs: grid files beside the zoo, and which run of which file became which model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.refs import closest, zoo_folder
from interp_tasks.errors import UserError
from interp_tasks.grids.spec import Shipment, Spec, axis, read_spec
from interp_tasks.training.config import list_keys

if TYPE_CHECKING:
    from interp_tasks.grids.units import TrainUnit

RECIPES = "recipes"


@dataclass(frozen=True)
class ShippedRun:
    """A run that a recipe trains and ships.

    Attributes:
        name: in the zoo.
        recipe: the name of the file that trains it.
        unit: its whole configuration, and its folder below the grid's.
        shipment: which of its checkpoints ship.
    """

    name: str
    recipe: str
    unit: TrainUnit
    shipment: Shipment


def recipe_names() -> list[str]:
    """List the recipes that ship with the package."""
    return sorted(file.stem for file in (zoo_folder() / RECIPES).glob("*.toml"))


def recipe_file(given: str | Path) -> Path:
    """Return a grid file: the one given where it is there, else the recipe of that name.

    Raises:
        UserError: if there is neither, naming the closest recipes.
    """
    path = Path(given)
    # Whatever lies there is the user's own, even where it cannot be read.
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    if str(given) in recipe_names():
        return zoo_folder() / RECIPES / f"{given}.toml"
    raise UserError(f"{given}: no such file and no recipe of that name{closest(str(given), recipe_names())}")


def shipped_runs(recipe: str | Path) -> list[ShippedRun]:
    """List the runs that a recipe ships. Knows torch: tasks fill in their defaults.

    Raises:
        UserError: for a recipe that is none, ships a seed that it does not train, or two runs under one name.
    """
    file = recipe_file(recipe)
    found = list(_shipped(read_spec(file), file.stem))
    names = [run.name for run in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file.stem} ships two runs as {twice}: write {{seed}} or a setting into the name")
    return found


def _shipped(spec: Spec, recipe: str) -> Iterator[ShippedRun]:
    from interp_tasks.grids.units import units_of

    folders: dict[str, Any] = {}
    for block in spec.train:
        units = units_of(block, spec.threads, folders)
        lists = list_keys(block.task)
        first = {key: axis(value, key in lists)[0] for key, value in block.settings.items()}
        for shipment in block.ship:
            unknown = set(shipment.seeds or ()) - set(block.seeds)
            if unknown:
                raise UserError(
                    f"{recipe} ships seed {min(unknown)} as {shipment.name}, which it does not train"
                )
            for unit in units:
                if shipment.seeds is None or unit.resolved.train.seed in shipment.seeds:
                    settings = {**first, **unit.varied}
                    yield ShippedRun(name_of(shipment, unit, settings), recipe, unit, shipment)


def name_of(shipment: Shipment, unit: TrainUnit, settings: Mapping[str, Any]) -> str:
    """Return the name of a run in the zoo, its seed and settings filled in.

    Raises:
        UserError: for braces around what the block does not set, or a name that no wheel can hold.
    """
    known = {"seed": unit.resolved.train.seed, **settings}

    def value(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UserError(f"ship {shipment.name}: {match[0]} is none of {', '.join(known)}")
        return re.sub(r"[^A-Za-z0-9-]+", "_", str(known[match[1]]))

    name = re.sub(r"\{([^{}]*)\}", value, shipment.name)
    if not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", name):
        raise UserError(
            f"ship {name}: a name in the zoo is of letters, digits, - and _, with / between folders; 5e-1 for 0.5"
        )
    return name


def recipe_of(name: str) -> ShippedRun:
    """Return the recipe's run behind a shipped model.

    Raises:
        UserError: if no recipe ships it.
    """
    for recipe in recipe_names():
        for run in shipped_runs(recipe):
            if run.name == name:
                return run
    raise UserError(f"no recipe ships {name}: interp-run runs zoo lists what ships")
