"""Makes a grid's page: what was done, when each configuration drops, and the results of its experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.grids.table import SEEDS, partial, table
from interp_tasks.grids.unit import relative
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.table import COLUMNS, shown_columns, shown_rows
from interp_tasks.pages import Column, Figure, Page, Section, Table, Text
from interp_tasks.texts import counted

if TYPE_CHECKING:
    import pandas

    from interp_tasks.experiments import DropsResult
    from interp_tasks.grids.run import Grid

INDEX = "index.html"
#: What a column shows of a row that lacks its value.
NOTHING = ("", "–", "<NA>")


@dataclass(frozen=True)
class Findings:
    """The results of a grid: its table, the drops of its runs, and its page.

    Attributes:
        rows: the table of all its experiments, see :func:`interp_tasks.grids.table.table`.
        drops: when its runs drop; ``None`` where none are trained, or none logged enough to tell.
    """

    grid: Grid = field(repr=False)
    rows: pandas.DataFrame = field(repr=False)
    drops: DropsResult | None = field(repr=False)

    @classmethod
    def of(cls, grid: Grid) -> Findings:
        """Collects the table and the drops of a grid."""
        return cls(grid, table(grid), drops_of(grid))

    def write(self) -> list[Path]:
        """Writes the table (parquet, CSV, JSON), its stamp, the files of ``drops`` and a page into the grid's folder.

        Raises:
            UserError: if the file system refuses.
        """
        config: dict[str, Any] = self.grid.spec.model_dump(mode="json", by_alias=True)
        written = Result("grid", self.rows, config).write(self.grid.folder)
        if self.drops is not None:
            written += self.drops.write(self.grid.folder)
        return [*written, page(self).write(self.grid.folder / INDEX)]


def drops_of(grid: Grid) -> DropsResult | None:
    """Finds when the trained runs of the grid drop; ``None`` where there are none."""
    from dataclasses import replace

    from interp_tasks.experiments import drops

    root = grid.folder.resolve()
    done = [
        str(root / unit.folder)
        for unit in grid.plan.train
        if unit.key in grid.records and grid.records[unit.key].status == "done"
    ]
    if not done:
        return None
    try:
        result = drops(done)
    except UserError:
        return None  # runs whose log is too short to tell
    curves = {
        (name.replace(f"{root}/", ""), metric): curve for (name, metric), curve in result.curves.items()
    }
    return replace(result, frame=relative(result.frame, f"{root}/"), curves=curves)


def sentences(findings: Findings) -> list[str]:
    """Returns sentences on how many units were done, and how, and on which means are not over all seeds."""
    grid, rows = findings.grid, findings.rows
    records = list(grid.records.values())
    done = sum(record.status == "done" for record in records)
    lines = [
        f"{counted(len(grid.plan), 'unit')}: {counted(len(grid.plan.train), 'run')} to train, "
        f"{counted(len(grid.plan.measure), 'experiment')}.",
        f"{done} done, {grid.done_before} of them before.",
    ]
    if grid.failed:
        lines.append(
            f"{len(grid.failed)} failed; {len(grid.waiting)} not tried, because they need one that failed."
        )
    means, some = rows[SEEDS].notna().sum(), partial(rows).sum()
    if some:
        lines.append(
            f"{some} of {means} means over seeds are over those that have the number (n_runs of n_seeds in the table): "
            "a mean of steps is too early where other seeds did not get there."
        )
    return lines


def failures(grid: Grid) -> list[tuple[str, str]]:
    """Returns the units that failed, each with its reason."""
    return [(record.what, record.error) for record in grid.failed]


def page(findings: Findings) -> Page:
    """Returns the page: what was done, the drops, and a table for each experiment."""
    grid, all_rows, dropped = findings.grid, findings.rows, findings.drops
    sections: list[Section] = [Text("\n".join(f"- {line}" for line in sentences(findings)))]
    if grid.failed:
        import pandas

        frame = pandas.DataFrame(failures(grid), columns=["unit", "error"])
        columns = [Column("unit", "unit"), Column("error", "error", sentences=True)]
        sections.append(Table(frame, "What failed", columns=columns, name="failures"))
    if dropped is not None:
        figure = dropped.plot()
        rows = shown_rows(dropped.frame)
        sections += [
            Figure(figure, "When runs drop", dropped.caption()),
            Table(
                rows,
                caption=" ".join(dropped.notes),
                columns=filled_columns(rows, shown_columns(rows)),
                name="drops",
                download=dropped.frame,
            ),
        ]
    axes = [str(name) for name in all_rows.columns[len(COLUMNS) :] if name != SEEDS]
    for name in dict.fromkeys(all_rows["experiment"]):
        experiment_rows = all_rows[all_rows["experiment"] == name]
        several = experiment_rows[experiment_rows["run"].astype(str).str.endswith("seed-*")]
        rows = shown_rows(several if len(several) else experiment_rows)
        shown = shown_columns(rows)
        # An experiment on several runs names them in a column of its own.
        alone = not any(column.header == "run" for column in shown)
        named = [Column("run", "ref")] if alone else []
        # Experiments that pool seeds themselves have medians, with ranges.
        means = len(several) > 0 and several[SEEDS].notna().all()
        about = "Means over seeds, with intervals over runs." if means else ""
        if SEEDS in rows and partial(rows).any():
            shown.append(Column("seeds", "n_runs", lambda row: f"{row['n_runs']} of {row[SEEDS]}"))
        columns = filled_columns(rows, [*named, *(Column(axis, axis) for axis in axes), *shown])
        sections.append(Table(rows, str(name), about, columns, name=str(name), download=experiment_rows))
    return Page(f"Grid {grid.folder.name}", sections, grid.spec.model_dump(mode="json", by_alias=True))


def filled_columns(rows: pandas.DataFrame, columns: Sequence[Column]) -> list[Column]:
    """Returns the columns that say something of at least one row."""
    records: list[Any] = rows.to_dict("records")
    return [column for column in columns if any(column.shown(row) not in NOTHING for row in records)]
