"""Reads the recipes of shipped runs: grid files beside the zoo, each saying which of its runs ship under which name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.refs import check_selector, closest, zoo_folder
from interp_tasks.errors import UserError
from interp_tasks.recipes.spec import Shipment, Spec, Training, naming_file, read_spec
from interp_tasks.training.config import list_keys

RECIPES = "recipes"


def recipe_names() -> list[str]:
    """Lists the recipes that ship with the package."""
    return sorted(file.stem for file in (zoo_folder() / RECIPES).glob("*.toml"))


def recipe_file(given: str | Path) -> Path:
    """Returns a grid file: the given path where it exists, else the recipe of that name.

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


@dataclass(frozen=True)
class Ordered:
    """A run that a recipe is to train and ship, as the file says it.

    Attributes:
        name: in the zoo.
        block: of the file.
        index: of its unit among the block's.
        settings: those of the file, by key; of the seed nothing.
    """

    name: str
    block: Training
    index: int
    seed: int
    settings: Mapping[str, Any]
    shipment: Shipment


def ordered_runs(recipe: str | Path) -> list[Ordered]:
    """Lists the runs that a recipe ships, in the order of its file. Imports no torch.

    Raises:
        UserError: for a recipe that is none, ships a seed that it does not train, or two runs under one name.
    """
    file = recipe_file(recipe)
    with naming_file(str(file)):
        return orders_of(read_spec(file))


def orders_of(spec: Spec) -> list[Ordered]:
    """Lists the runs that a grid ships."""
    runs = [run for block in spec.train for run in _of_block(block)]
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two runs ship as {twice}: write {{seed}} or a setting into the name")
    return runs


def _of_block(block: Training) -> Iterator[Ordered]:
    # In the order of its units.
    trained = [(values, seed) for values in block.combinations(list_keys(block.task)) for seed in block.seeds]
    for shipment in block.ship:
        for selector in (each for mark in shipment.at for each in str(mark).split(",")):
            check_selector(selector.strip(), f"ship {shipment.name}, at")
        unknown = set(shipment.seeds or ()) - set(block.seeds)
        if unknown:
            raise UserError(f"ship {shipment.name}: seed {min(unknown)} is not trained")
        for index, (values, seed) in enumerate(trained):
            if shipment.seeds is None or seed in shipment.seeds:
                yield Ordered(name_of(shipment, seed, values), block, index, seed, values, shipment)


def name_of(shipment: Shipment, seed: int, settings: Mapping[str, Any]) -> str:
    """Returns the name of a run in the zoo, its seed and settings filled in.

    Raises:
        UserError: for braces around what the block does not set, or a name that no wheel can hold.
    """
    known = {"seed": seed, **settings}

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
