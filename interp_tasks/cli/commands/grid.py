"""``interp-run grid``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.cli.command import CommonOptions
from interp_tasks.cli.options import FORMAT, RATE, check_rate
from interp_tasks.cli.output import FORMATS, print_as, write_and_show
from interp_tasks.cli.tables import console, print_rows, print_sentences
from interp_tasks.cli.terminal import note, progress_line
from interp_tasks.devices import check_written_device
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import check_writable_folder
from interp_tasks.settings import EXECUTORS, MANY_RUNS, import_file
from interp_tasks.texts import counted, duration, flop, one_line, size

if TYPE_CHECKING:
    from interp_tasks.grids import Grid
    from interp_tasks.recipes.spec import Spec
    from interp_tasks.training.config import Resolved


@dataclass(frozen=True, kw_only=True)
class WorkOptions(CommonOptions):
    """Who does the units of a grid, and which."""

    executor: Annotated[str, typer.Option("--executor", help=f"Who does the work: {EXECUTORS}.")] = (
        "processes"
    )
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Units at a time.", show_default="as many as cores carry"),
    ] = None
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed.")] = False
    yes: Annotated[bool, typer.Option("--yes", help=f"Of more than {MANY_RUNS:,} runs, too.")] = False
    import_paths: Annotated[
        list[Path],
        typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks. Repeatable."),
    ] = field(default_factory=list)

    def run(self, file: Path, folder: Path) -> Grid:
        """Does what is left of a grid."""
        from interp_tasks.grids import grid

        with progress_line(self.quiet) as progress:
            return grid(
                file,
                folder,
                executor=self.executor,
                jobs=self.jobs,
                device=self.device,
                retry=self.retry,
                yes=self.yes,
                imports=self.import_paths,
                progress=progress,
            )


def grid(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.toml", help="What to train and to measure: a file, or the name of a recipe."
        ),
    ],
    work: WorkOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The grid's folder.", show_default="grids/SPEC"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configurations and their cost; in JSON and CSV, units.")
    ] = False,
    rate: RATE = None,
    format: FORMAT = "table",
) -> None:
    """Train many models, and run experiments on all of them: one file, one table.

    SPEC.toml names tasks, settings, seeds and experiments. The same command goes on where it was stopped, does what
    was added to the file, and leaves alone what is done; what fails stops nothing else, and is tried again with
    --retry.
    """
    from interp_tasks.grids.plan import check
    from interp_tasks.grids.run import slots_of
    from interp_tasks.recipes.recipe import recipe_file
    from interp_tasks.recipes.spec import naming_file, read_spec

    check_choice("--format", format, FORMATS)
    check_written_device(work.device)
    if rate is not None and not dry_run:
        raise UserError("--rate is for --dry-run: a grid that runs takes the time it takes")
    check_rate(rate)
    for path in work.import_paths:
        import_file(path)
    file = recipe_file(spec)
    asked, folder = read_spec(file), out or Path("grids") / file.stem
    slots_of(work.executor, work.jobs, asked.threads)
    check_free(folder, "grid")
    check_writable_folder(folder)
    with naming_file(str(file)):
        check(asked, yes=work.yes)
        if dry_run:
            show_plan(asked, folder, rate, format, work.quiet)
            return
    show_done(work.run(file, folder), format, work.quiet)


def show_done(done: Grid, format: str, quiet: bool) -> None:
    """Writes and prints what a grid has found, and says what failed.

    Raises:
        UserError: if a unit did.
    """
    from interp_tasks.grids.table import drops_of, result_of, write

    result, drops = result_of(done), drops_of(done)

    def show() -> None:
        if format != "table":
            print_as(result, format)
            return
        if drops is not None:
            print_as(drops, "table")
        print_sentences(list(result.notes))

    write_and_show(lambda: write(done, result, drops), show, quiet)
    for record in done.failed:
        note(one_line(f"{record.what}: {record.error}"), quiet=False)
    if done.failed:
        raise UserError(
            f"{len(done.failed)} of {counted(len(done.plan.units), 'unit')} failed, see above; the rest is done. "
            "--retry tries them again"
        )


def show_plan(spec: Spec, folder: Path, rate: float | None, format: str, quiet: bool) -> None:
    """Prints each configuration, its state and what it would take; for programs every unit."""
    from interp_tasks.grids.plan import TrainUnit, plan
    from interp_tasks.grids.run import settled_records

    planned = plan(spec)
    records = settled_records(planned, folder.resolve())
    costs: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    with progress_line(quiet) as progress:
        for unit in planned.units:
            status = records[unit.key].status if unit.key in records else "to do"
            row: dict[str, Any] = {"unit": unit.what, "key": unit.key, "settings": {}, "seed": None}
            row |= {"status": status, "flop": None, "bytes": None, "seconds": None}
            if isinstance(unit, TrainUnit):
                family = str(Path(unit.folder).parent)
                costs[family] = costs.get(family) or cost_of(unit.resolved, rate)
                row |= {"settings": dict(unit.varied), "seed": unit.resolved.train.seed, **costs[family]}
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(planned.units), unit.what)
    if format != "table":
        print_rows(rows, format, [])
        return
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["unit"].rpartition("/seed-")[0] or row["unit"], []).append(row)
    columns = ["unit", "seeds", "status", "flop", "disk", *["time"] * (rate is not None)]
    print_rows([line(name, members) for name, members in families.items()], "table", columns)
    left = [row for row in rows if row["status"] != "done"]
    total = line("", left) if left else {}
    sums = ", ".join(total[name] for name in ("flop", "disk", "time") if total.get(name))
    console().print(f"\n{len(left)} of {counted(len(rows), 'unit')} to do{': ' * bool(sums)}{sums}")


def cost_of(resolved: Resolved, rate: float | None) -> dict[str, Any]:
    """Returns what a run takes; the same for all seeds of a configuration."""
    from interp_tasks.training.cost import cost
    from tasks import get

    task = get(resolved.task_name, **resolved.task)
    known = cost(task, settings=resolved.model, config=resolved.train, gflop_per_second=rate or 1.0)
    return {"flop": known.run_flop, "bytes": known.disk_bytes, "seconds": known.seconds if rate else None}


def line(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns the line of a table about the seeds of one configuration, or about one experiment."""
    total = {key: sum(row[key] or 0 for row in rows) for key in ("flop", "bytes", "seconds")}
    status = Counter(row["status"] for row in rows)
    return {
        "unit": name.removeprefix("train runs/"),
        "seeds": spans([row["seed"] for row in rows if row["seed"] is not None]),
        "status": ", ".join(f"{count} {word}" if len(status) > 1 else word for word, count in status.items()),
        "flop": flop(total["flop"]) if total["flop"] else "",
        "disk": size(total["bytes"]) if total["bytes"] else "",
        "time": duration(total["seconds"]) if total["seconds"] else "",
    }


def spans(seeds: Sequence[int]) -> str:
    """Formats seeds as ``0-2, 5``."""
    found: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if found and seed == found[-1][1] + 1:
            found[-1][1] = seed
        else:
            found.append([seed, seed])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
