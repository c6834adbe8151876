"""``interp-run runs zoo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp_tasks.cli.command import CommonOptions
from interp_tasks.cli.options import FORMAT
from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.tables import console, print_rows
from interp_tasks.measurement.options import check_choice

#: Below the tables: what three of their columns say.
LEGEND = """\
stored: checkpoints (log: none)
final: the metric's level at the end, of several seeds the median
drop: steps from 10% to 90% of its change, of several seeds from the first on"""


def zoo(common: CommonOptions, format: FORMAT = "table") -> None:
    """List the trained models that ship."""
    from interp_tasks.zoo.catalog import catalog

    check_choice("--format", format, FORMATS)
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
