"""Finds the unit of a grid, with its whole configuration, behind each shipped run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from interp_tasks.errors import UserError
from interp_tasks.grids.plan import TrainUnit, train_units
from interp_tasks.recipes.recipe import orders_of, recipe_file, recipe_names
from interp_tasks.recipes.spec import Shipment, naming_file, read_spec


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


def shipped_runs(recipe: str | Path) -> list[ShippedRun]:
    """Lists the runs that a recipe ships. Imports torch: tasks fill in their defaults.

    Raises:
        UserError: as :func:`ordered_runs`.
    """
    file = recipe_file(recipe)
    spec = read_spec(file)
    with naming_file(str(file)):
        ordered = orders_of(spec)
        units = {id(block): each for block, each in zip(spec.train, train_units(spec), strict=True)}
    return [ShippedRun(run.name, file.stem, units[id(run.block)][run.index], run.shipment) for run in ordered]


def recipe_of(name: str) -> ShippedRun:
    """Returns the recipe's run behind a shipped model.

    Raises:
        UserError: if no recipe ships it.
    """
    for recipe in recipe_names():
        for run in shipped_runs(recipe):
            if run.name == name:
                return run
    raise UserError(f"no recipe ships {name}: interp-run runs zoo lists what ships")
