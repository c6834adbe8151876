"""The tidy table of a grid: every unit's rows, the settings that vary, rows that pool seeds."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import TYPE_CHECKING

from interp_tasks.files import read_file
from interp_tasks.grids.run import result_file
from interp_tasks.measurement.intervals import interval_over_runs
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import family
from interp_tasks.measurement.table import COLUMNS, OLD_NAMES, tidy
from interp_tasks.texts import counted

if TYPE_CHECKING:
    import pandas

    from interp_tasks.grids.run import Grid

#: What tells one row from another, but for the run it is of.
IDENTITY = (
    *("experiment", "split", "draw", "variant", "intervention", "site", "layer", "head", "position"),
    "metric",
)
#: Of a row that pools seeds: how many the grid has of them, with the number or without.
SEEDS = "n_seeds"


def table(grid: Grid) -> pandas.DataFrame:
    """Returns every row of every finished unit, with a column for each setting that varies; then pooled seeds.

    A row of several seeds is the mean over those that have the number, its ``run`` is ``RUN/seed-*``, its ``n_runs``
    how many have it of ``n_seeds``, its interval Student's t over runs, of three at least. What an experiment pools
    itself stays so.
    """
    import pandas

    frames = []
    for unit in grid.plan.measure:
        if unit.key in grid.records and grid.records[unit.key].status == "done":
            stored = read_file(result_file(grid.folder, unit.key), "the rows of a unit")
            frames.append(pandas.read_parquet(io.BytesIO(stored)).rename(columns=OLD_NAMES))
    frame = pandas.concat(frames, ignore_index=True) if frames else tidy(pandas.DataFrame())
    together = pooled(frame)
    frame = pandas.concat([frame, together], ignore_index=True)[list(COLUMNS)]
    runs = {*(unit.folder for unit in grid.plan.train), *map(str, frame["run"])}
    seeds = Counter(name for run in runs if (name := family(run)) is not None)
    counts = [pandas.NA] * (len(frame) - len(together)) + [seeds[run] for run in together["run"]]
    frame[SEEDS] = pandas.array(counts, dtype="Int64")
    varied = {unit.folder: unit.varied for unit in grid.plan.train}
    varied |= {name: values for folder, values in varied.items() if (name := family(folder)) is not None}
    for key in dict.fromkeys(key for values in varied.values() for key in values):
        cells = [varied.get(str(run), {}).get(key) for run in frame["run"]]
        frame[key] = [", ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells]
    return frame


def pooled(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns means over the seeds of a configuration, for each row that two of them share."""
    import pandas

    if frame.empty:
        return frame
    single = frame[frame["n_runs"].isna() | (frame["n_runs"] <= 1)]
    single = single.assign(family=[family(str(run)) or "" for run in single["run"]])
    # Not what an experiment pools itself.
    known = set(zip(frame["experiment"], frame["run"], strict=True))
    pairs = zip(single["experiment"], single["family"], strict=True)
    single = single[[name != "" and (experiment, name) not in known for experiment, name in pairs]]
    marks = [str(ref).rpartition("@")[2] if "@" in str(ref) else "" for ref in single["ref"]]
    # The steps of a mark differ between seeds; without one, it is the step that rows have in common.
    moments = [mark or str(step) for mark, step in zip(marks, single["step"], strict=True)]
    single = single.assign(mark=marks, moment=moments)
    rows = []
    for _, same in single.groupby(["family", "moment", *IDENTITY], dropna=False, sort=False):
        if same["run"].nunique() < 2 or same["run"].duplicated().any():
            continue
        first = same.iloc[0]
        row = {
            **{column: first[column] for column in IDENTITY},
            "run": first["family"],
            "ref": f"{first['family']}@{first['mark']}" if first["mark"] else first["family"],
            "step": first["step"] if same["step"].nunique() == 1 else pandas.NA,
            "n_runs": int(same["value"].notna().sum()),
            "n": first["n"] if same["n"].nunique() == 1 else pandas.NA,
            "baseline": same["baseline"].mean(),
        }
        for value in ("value", "effect"):
            numbers = same[value].dropna().to_numpy(dtype=float)
            row[value] = float(numbers.mean()) if len(numbers) else math.nan
            row[f"{value}_ci_low"], row[f"{value}_ci_high"] = interval_over_runs(numbers.tolist())
        rows.append(row)
    return tidy(pandas.DataFrame(rows))


def result_of(grid: Grid) -> Result:
    """Returns the table of a grid as a result, whose notes say what was done."""
    rows, records = table(grid), list(grid.records.values())
    done = sum(record.status == "done" for record in records)
    notes = [
        f"{counted(len(grid.plan.units), 'unit')}: {counted(len(grid.plan.train), 'run')} to train, "
        f"{counted(len(grid.plan.measure), 'experiment')}.",
        f"{done} done, {grid.done_before} of them before.",
    ]
    if grid.failed:
        notes.append(
            f"{len(grid.failed)} failed; {len(grid.waiting)} not tried, because they need one that failed."
        )
    means = rows[rows[SEEDS].notna()]
    if some := int(((means["n_runs"] > 0) & (means["n_runs"] < means[SEEDS])).sum()):
        notes.append(
            f"{some} of {len(means)} means over seeds are over those that have the number (n_runs of n_seeds in the "
            "table): a mean of steps is too early where other seeds did not get there."
        )
    return Result("grid", rows, grid.spec.model_dump(mode="json", by_alias=True), tuple(notes))
