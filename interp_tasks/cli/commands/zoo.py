"""``interp-run runs zoo``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.cli.command import CommonOptions
from interp_tasks.cli.options import FORMAT
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.tables import console, print_rows
from interp_tasks.cli.terminal import note
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import check_writable_folder

#: Below the tables: what three of their columns say.
LEGEND = """\
stored: checkpoints (log: none)
final: the metric's level at the end, of several seeds the median
drop: steps from 10% to 90% of its change, of several seeds from the first on"""


def zoo(
    common: CommonOptions,
    pack: Annotated[
        str | None, typer.Option("--pack", metavar="RECIPE", help="Ship a recipe's runs that are trained.")
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(
            "--grid", metavar="DIR", help="With --pack: where they were trained.", show_default="grids/RECIPE"
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="With --pack: another zoo.", show_default="the package's"),
    ] = None,
    format: FORMAT = "table",
) -> None:
    """List the trained models that ship, or ship those of a recipe.

    A recipe is a grid file that trains them: interp-run grid RECIPE trains its runs, interp-run runs zoo --pack RECIPE
    puts them here.
    """
    check_choice("--format", format, FORMATS)
    for option, given in (("--grid", grid), ("--into", into)):
        if given is not None and pack is None:
            raise UserError(f"{option} goes with --pack")
    if pack is None:
        list_shipped(format)
    else:
        ship(pack, grid or Path("grids") / Path(pack).stem, into or zoo_folder(), common.quiet)


def ship(recipe: str, grid: Path, into: Path, quiet: bool) -> None:
    """Packs the runs of a recipe that a grid has trained."""
    from interp_tasks.recipes.recipe import recipe_file
    from interp_tasks.recipes.spec import read_spec

    read_spec(recipe_file(recipe))
    check_writable_folder(into)
    from interp_tasks.zoo.pack import pack_recipe

    pack_recipe(recipe, grid, into, lambda text: note(text, quiet))


def list_shipped(format: str) -> None:
    """Prints what ships, a table for each task and folder."""
    from interp_tasks.zoo.catalog import catalog

    rows = catalog()
    if format != "table":
        print_rows(rows, format, [])
        return
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        # A folder's name stands in the heading.
        folder, slash, name = row["name"].partition("/")
        heading = (row["task"], row["metric"], *([f"in {folder}/"] if slash else []))
        groups.setdefault(heading, []).append({**row, "name": name or folder})
    for place, (heading, members) in enumerate(groups.items()):
        if place:
            console().print()
        columns = ["name", "size", "seeds", "stored", "drop", "final"]
        print_rows([shown(row) for row in members], "table", columns, heading)
    console().print(f"\n{LEGEND}", style="dim")


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the catalog as people read it."""
    seeds, drop = row["seeds"], row["drop"]
    fell = "none" if drop is None else f"{drop[0]:,}-{drop[1]:,}"
    if drop is not None and row["dropped"] < len(seeds):
        fell += f" ({row['dropped']}/{len(seeds)})"
    which = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    stored = (
        f"{row['checkpoints']} steps" if row["checkpoints"] > 1 else "1 step" if row["checkpoints"] else "log"
    )
    return {**row, "seeds": which, "stored": stored, "drop": fell, "final": f"{row['final']:.3g}"}
