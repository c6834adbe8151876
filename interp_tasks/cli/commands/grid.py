"""``interp-run grid``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.cli.base import Command
from interp_tasks.cli.commands.cost import FASTEST, duration, flop, size
from interp_tasks.cli.output import FORMATS, write_and_show
from interp_tasks.cli.progress import note, progress_line
from interp_tasks.cli.rows import print_rows
from interp_tasks.devices import check_written_device
from interp_tasks.errors import UserError
from interp_tasks.files import check_file
from interp_tasks.measurement.options import check_choice
from interp_tasks.pages import check_writable_folder
from interp_tasks.settings import EXECUTORS, import_file
from interp_tasks.texts import counted, one_line

if TYPE_CHECKING:
    from interp_tasks.grids.page import Findings
    from interp_tasks.grids.words import Told


@dataclass(kw_only=True)
class GridCommand(Command):
    """Train many models, and run experiments on all of them: one file, one table, one page.

    SPEC.toml names tasks, settings, seeds and experiments. The same command goes on where it was stopped, does what
    was added to the file, and leaves alone what is done; what fails stops nothing else, and is tried again with
    --retry.
    """

    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.toml", help="What to train and to measure: a file, or the name of a recipe."
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The grid's folder.", show_default="grids/SPEC"),
    ] = None
    executor: Annotated[str, typer.Option("--executor", help=f"Who does the work: {EXECUTORS}.")] = (
        "processes"
    )
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Units at a time.", show_default="as many as cores carry"),
    ] = None
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configurations and their cost; in JSON and CSV, units.")
    ] = False
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="GFLOPS", help="With --dry-run: the time at so many GFLOP per second."
        ),
    ] = None
    import_paths: Annotated[
        list[Path],
        typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks. Repeatable."),
    ] = field(default_factory=list)
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        """Refuses options that do not go together, a recipe that cannot be read, and a folder that is no grid's."""
        from interp_tasks.grids.executors import check_executor
        from interp_tasks.grids.units import check
        from interp_tasks.recipes.recipe import recipe_file
        from interp_tasks.recipes.spec import naming_file, read_spec

        check_choice("--format", self.format, FORMATS)
        check_written_device(self.device)
        if self.rate is not None and not self.dry_run:
            raise UserError("--rate is for --dry-run: a grid that runs takes the time it takes")
        if self.rate is not None and not 0 < self.rate < FASTEST:
            raise UserError(
                f"--rate {self.rate:g}: give GFLOP per second, more than 0 and below {FASTEST:g}, such as 20"
            )
        for path in self.import_paths:
            check_file(path, "--import")
        self.spec = recipe_file(self.spec)
        spec = read_spec(self.spec)
        check_executor(self.executor, self.jobs, spec.threads)
        if not self.import_paths:
            with naming_file(str(self.spec)):
                check(spec)
        check_free(self.folder(), "grid")
        check_writable_folder(self.folder())

    def folder(self) -> Path:
        return self.out or Path("grids") / self.spec.stem

    def execute(self) -> None:
        """Runs the grid, or with ``--dry-run`` shows its plan, and prints and writes the findings."""
        if self.dry_run:
            for path in self.import_paths:
                import_file(path)
            self.show_plan()
            return
        from interp_tasks.grids import grid
        from interp_tasks.grids.page import Findings, failures

        with progress_line(self.quiet) as progress:
            done = grid(
                self.spec,
                self.folder(),
                executor=self.executor,
                jobs=self.jobs,
                device=self.device,
                retry=self.retry,
                imports=self.import_paths,
                progress=progress,
            )
        findings = Findings.of(done)
        write_and_show(findings.write, lambda: self.show(findings), self.quiet)
        for unit, error in failures(done):
            note(one_line(f"{unit}: {error}"), quiet=False)
        if done.failed:
            raise UserError(
                f"{len(done.failed)} of {counted(len(done.plan), 'unit')} failed, see above; the rest is done. "
                "--retry tries them again"
            )

    def show(self, findings: Findings) -> None:
        from interp_tasks.cli.output import print_as
        from interp_tasks.cli.tables import print_sentences
        from interp_tasks.grids.page import sentences
        from interp_tasks.measurement.result import Result

        if self.format != "table":
            print_as(Result("grid", findings.rows), self.format)
            return
        if findings.drops is not None:
            print_as(findings.drops, "table")
        print_sentences(sentences(findings))

    def show_plan(self) -> None:
        """Prints what each configuration changes, its state, and what it would take; for programs every unit."""
        from interp_tasks.cli.tables import console
        from interp_tasks.grids.run import check_devices
        from interp_tasks.grids.unit import read_record
        from interp_tasks.grids.units import MeasureUnit, plan
        from interp_tasks.grids.words import told_apart
        from interp_tasks.measurement.run_logs import shared_folder
        from interp_tasks.recipes.spec import naming_file, read_spec

        spec, root, name = read_spec(self.spec), self.folder().resolve(), str(self.spec)
        with naming_file(name):
            planned = plan(spec)
        check_devices(planned, root, self.executor, self.device, self.retry, name)
        told, usual = told_apart(spec, planned)
        costs: dict[str, dict[str, Any]] = {}
        rows: list[dict[str, Any]] = []
        for unit in planned.units:
            record = read_record(root, unit)
            cost = self.cost_of(unit, costs)
            rows.append(
                {
                    "unit": unit.what,
                    "settings": told[unit.key].settings,
                    "ships": told[unit.key].ships,
                    "at": list(unit.marks) if isinstance(unit, MeasureUnit) else None,
                    "key": unit.key,
                    "status": record.status if record else "to do",
                    "flop": cost.get("run_flop"),
                    "bytes": cost.get("disk_bytes"),
                    "seconds": cost.get("seconds"),
                }
            )
        if self.format != "table":
            print_rows(rows, self.format, [])
            return
        left = [row for row in rows if row["status"] != "done"]
        same: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            same.setdefault(told[row["key"]].configuration, []).append(row)
        ships = [row["ships"] for row in rows if row["ships"]]
        zoo, most = shared_folder(ships), common_folder(ships)
        columns = ["run", "seeds", "ships as", "status", "flop", "disk", *(["time"] if self.rate else [])]
        head = [f"ships in {zoo}"] * bool(zoo) or [f"… stands for {most}"] * bool(most)
        head += [f"where not said: {usual}"] * bool(usual)
        lines = [line(each, told, zoo or most, "" if zoo else "…/") for each in same.values()]
        trained = [each for each in lines if each["flop"]]
        if trained:
            print_rows(trained, "table", columns, head)
        measured = [{**each, "experiment": each["run"]} for each in lines if not each["flop"]]
        if measured:
            if trained:
                console().print()
            said = [name for name in ("seeds", "at") if any(each[name] for each in measured)]
            print_rows(measured, "table", ["experiment", *said, "status"])
        total = f"{len(left)} of {counted(len(rows), 'unit')} to do"
        if any(row["flop"] for row in left):
            total += f": {flop(sum(row['flop'] or 0 for row in left))} of training, "
            total += f"{size(sum(row['bytes'] or 0 for row in left))} on disk"
            if self.rate:
                total += f", {duration(sum(row['seconds'] or 0 for row in left))} one after the other"
        console().print(f"\n{total}" + "\nThe folder of each run: --format json" * bool(trained))

    def cost_of(self, unit: Any, costs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Returns the cost of a run; the same for all its seeds."""
        from interp_tasks.grids.units import TrainUnit
        from interp_tasks.training.cost import cost
        from tasks import get

        if not isinstance(unit, TrainUnit):
            return {}
        same = str(Path(unit.folder).parent)
        if same not in costs:
            resolved = unit.resolved
            estimate = cost(
                get(resolved.task_name, **resolved.task),
                settings=resolved.model,
                config=resolved.train,
                gflop_per_second=self.rate or 1.0,
            ).to_dict()
            costs[same] = estimate if self.rate else {**estimate, "seconds": None}
        return costs[same]


def common_folder(names: Sequence[str]) -> str:
    """Returns the folder in the zoo that most names lie in, two at least; nothing where there is none."""
    found = Counter(folder for name in names if (folder := name.partition("/")[0]) != name).most_common(1)
    return found[0][0] if found and found[0][1] > 1 else ""


def line(rows: Sequence[Mapping[str, Any]], told: Mapping[str, Told], zoo: str, short: str) -> dict[str, str]:
    """Returns the line of a table about the units of one configuration, each of which is a row with its seed.

    Args:
        zoo: a folder that runs ship in; ``short`` stands for it.
    """
    from interp_tasks.measurement.run_logs import family

    names = [row["ships"] for row in rows if row["ships"]]
    if len(names) > 1:
        names = [family(name) or name for name in names]
    status = Counter(row["status"] for row in rows)
    total = {name: sum(row[name] or 0 for row in rows) for name in ("flop", "bytes", "seconds")}
    return {
        "run": told[rows[0]["key"]].words,
        "seeds": spans(seed for row in rows for seed in told[row["key"]].seeds),
        "at": ", ".join(rows[0]["at"] or ()),
        "ships as": ", ".join(
            dict.fromkeys(
                short + name.removeprefix(f"{zoo}/") if zoo and name.startswith(f"{zoo}/") else name
                for name in names
            )
        ),
        "status": ", ".join(f"{count} {word}" if len(status) > 1 else word for word, count in status.items()),
        "flop": flop(total["flop"]) if total["flop"] else "",
        "disk": size(total["bytes"]) if total["bytes"] else "",
        "time": duration(total["seconds"]) if total["seconds"] else "",
    }


def spans(seeds: Iterable[int]) -> str:
    """Formats seeds as ``0-2, 5``."""
    found: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if found and seed == found[-1][1] + 1:
            found[-1][1] = seed
        else:
            found.append([seed, seed])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
