"""``interp-run grid``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.run_reader import check_folder_kind
from interp_tasks.cli.command_building import CommonOptions
from interp_tasks.cli.options import FORMAT, RATE
from interp_tasks.cli.streams_and_exit_codes import print_note, progress_line
from interp_tasks.cli.tables import print_in_format, print_rows, print_wrapped, write_and_show
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_folder
from interp_tasks.measurement.option_parsing import DEVICE
from interp_tasks.setting_and_seed_parsing import EXECUTORS, MANY_RUNS, import_file
from interp_tasks.text_formatting import format_bytes, format_duration, format_flop, one_line, pluralise

if TYPE_CHECKING:
    from interp_tasks.grid_spec import Spec
    from interp_tasks.grids import GridRun
    from interp_tasks.measurement.options_and_examples import Progress


IMPORTS = typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks. Repeatable.")
JOBS = typer.Option("--jobs", metavar="N", help="Units at a time.", show_default="as many as cores carry")
SPEC = typer.Argument(metavar="SPEC.toml", help="What to train and to measure: a file, or a recipe's name.")
OUT = typer.Option("--out", metavar="DIR", help="The grid's folder.", show_default="grids/SPEC")
DRY_RUN = typer.Option("--dry-run", help="Show configurations and their cost; in JSON and CSV, units.")


def grid(
    spec: Annotated[Path, SPEC],
    common: CommonOptions,
    executor: Annotated[
        str, typer.Option("--executor", help=f"Who does the work: {EXECUTORS}.")
    ] = "processes",
    jobs: Annotated[int | None, JOBS] = None,
    device: DEVICE = "cpu",
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help=f"Of more than {MANY_RUNS:,} runs, too.")] = False,
    imports: Annotated[list[Path], IMPORTS] = [],  # noqa: B006  (never changed)
    out: Annotated[Path | None, OUT] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    rate: RATE = None,
    format: FORMAT = "table",
) -> None:
    """Train many models, and run experiments on all of them: one file, one table.

    SPEC.toml names tasks, settings, seeds and experiments. The same command goes on where it was stopped, does what
    was added to the file, and leaves alone what is done; what fails stops nothing else, and is tried again with
    --retry.
    """
    from interp_tasks import grids
    from interp_tasks.grid_spec import name_file_in_errors, read_grid_spec, recipe_file
    from interp_tasks.grids.grid_run_and_table import count_executor_slots
    from interp_tasks.grids.work_units import check_grid_spec

    if rate is not None and not dry_run:
        raise UserError("--rate is for --dry-run: a grid that runs takes the time it takes")
    for path in imports:
        import_file(path)
    file = recipe_file(spec)
    asked, folder = read_grid_spec(file), out or Path("grids") / file.stem
    count_executor_slots(executor, jobs, asked.threads)
    check_folder_kind(folder, "grid")
    check_writable_folder(folder)
    work: dict[str, Any] = {"executor": executor, "jobs": jobs, "device": device, "retry": retry, "yes": yes}
    with name_file_in_errors(str(file)), progress_line(common.quiet) as progress:
        if not dry_run:
            done = grids.grid(file, folder, imports=imports, progress=progress, **work)
        else:
            check_grid_spec(asked, yes=yes)
            rows = status_and_cost_rows(asked, folder, rate, progress)
    if dry_run:
        show_plan(rows, format, is_timed=rate is not None)
    else:
        write_and_show_grid(done, format, common.quiet)


def write_and_show_grid(done: GridRun, format: str, quiet: bool) -> None:
    """Writes and prints what a grid has found, and says what failed."""
    from interp_tasks.grids.grid_run_and_table import grid_result

    result = grid_result(done)

    def show() -> None:
        if format != "table":
            print_in_format(result, format)
            return
        for sentence in result.notes:
            print_wrapped(f"- {sentence}")

    write_and_show(lambda: result.write(done.folder), show, quiet)
    for record in done.failed:
        print_note(one_line(f"{record.what}: {record.error}"), quiet=False)
    if done.failed:
        raise UserError(
            f"{len(done.failed)} of {pluralise(len(done.plan.units), 'unit')} failed, see above; the rest is done. "
            "--retry tries them again"
        )


def status_and_cost_rows(
    spec: Spec, folder: Path, rate: float | None, progress: Progress | None
) -> list[dict[str, Any]]:
    """Returns for every unit its state and what it would take, which is the same for all seeds of a configuration."""
    from interp_tasks.grids.grid_run_and_table import settled_records
    from interp_tasks.grids.work_units import TrainUnit, list_work_units
    from interp_tasks.training.cost import cost

    units = list_work_units(spec)
    records = settled_records(units, folder.resolve())
    costs: dict[Path, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for unit in units.units:
        status = records[unit.key].status if unit.key in records else "to do"
        row: dict[str, Any] = {"unit": unit.description, "key": unit.key, "settings": {}, "seed": None}
        row |= {"status": status, "flop": None, "bytes": None, "seconds": None}
        if isinstance(unit, TrainUnit):
            family, resolved = Path(unit.folder).parent, unit.resolved
            if family not in costs:
                task = resolved.make_task()
                known = cost(task, settings=resolved.model, config=resolved.train, gflop_per_second=rate)
                costs[family] = {"flop": known.run_flop, "bytes": known.disk_bytes, "seconds": known.seconds}
            row |= {"settings": dict(unit.varied), "seed": resolved.train.seed, **costs[family]}
        rows.append(row)
        if progress is not None:
            progress(len(rows), len(units.units), unit.description)
    return rows


def show_plan(rows: Sequence[dict[str, Any]], format: str, *, is_timed: bool) -> None:
    """Prints each configuration, its state and what it would take; for programs every unit."""
    if format != "table":
        print_rows(rows, format, [])
        return
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["unit"].rpartition("/seed-")[0] or row["unit"], []).append(row)
    columns = ["unit", "runs", "status", "flop", "disk", *["time"] * is_timed]
    print_rows([configuration_row(name, members) for name, members in families.items()], "table", columns)
    left = [row for row in rows if row["status"] != "done"]
    sums = ", ".join(filter(None, (configuration_row("", left)[name] for name in columns[3:])))
    print_wrapped(f"\n{len(left)} of {pluralise(len(rows), 'unit')} to do{': ' * bool(sums)}{sums}")


def configuration_row(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line of a table about the seeds of one configuration, or about one experiment."""
    total = {key: sum(row[key] or 0 for row in rows) for key in ("flop", "bytes", "seconds")}
    status = Counter(row["status"] for row in rows)
    return {
        "unit": name.removeprefix("train runs/"),
        "runs": sum(row["seed"] is not None for row in rows) or "",
        "status": ", ".join(f"{count} {word}" if len(status) > 1 else word for word, count in status.items()),
        "flop": format_flop(total["flop"]) if total["flop"] else "",
        "disk": format_bytes(total["bytes"]) if total["bytes"] else "",
        "time": format_duration(total["seconds"]) if total["seconds"] else "",
    }
