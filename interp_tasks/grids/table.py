"""The tidy table of a grid: every unit's rows, the settings that vary, and rows that pool seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.grids.unit import read_result
from interp_tasks.measurement.intervals import interval_over_runs
from interp_tasks.measurement.run_logs import family
from interp_tasks.measurement.table import COLUMNS, tidy

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
#: What the seeds of a configuration are pooled in.
POOLED = (("value", "value_ci_low", "value_ci_high"), ("effect", "effect_ci_low", "effect_ci_high"))


def table(grid: Grid) -> pandas.DataFrame:
    """Returns every row of every finished unit, with a column for each setting that varies; then pooled seeds.

    A row of several seeds is the mean over those that have the number, its ``run`` is ``RUN/seed-*``, its ``n_runs``
    how many have it of ``n_seeds``, its interval Student's t over runs, of three at least. What an
    experiment pools itself stays so.
    """
    import pandas

    root = grid.folder.resolve()
    frames = []
    for unit in grid.plan.measure:
        record = grid.records.get(unit.key)
        rows = read_result(root, unit.key) if record is not None and record.status == "done" else None
        if rows is not None:
            frames.append(rows)
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
        frame[key] = [shown(varied.get(str(run), {}), key) for run in frame["run"]]
    return frame


def partial(frame: pandas.DataFrame) -> Any:
    """Tells of each row whether it is a mean over some of its seeds, others of which lack the number."""
    # A table without a row, and some that are laid out for readers, have no types.
    have, of = (frame[name].astype("Int64") for name in ("n_runs", SEEDS))
    return ((have > 0) & (have < of)).fillna(False)


def shown(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def pooled(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns means over the seeds of a configuration, for each row that two of them share."""
    import pandas

    if frame.empty:
        # Without a row there is no list of flags to choose by: pandas takes an empty one for no columns.
        return frame
    single_runs = frame[frame["n_runs"].isna() | (frame["n_runs"] <= 1)]
    single_runs = single_runs.assign(family=[family(str(run)) or "" for run in single_runs["run"]])
    # Not what an experiment pools itself.
    known = set(zip(frame["experiment"], frame["run"], strict=True))
    pairs = zip(single_runs["experiment"], single_runs["family"], strict=True)
    single_runs = single_runs[[name != "" and (experiment, name) not in known for experiment, name in pairs]]
    marks = [str(ref).rpartition("@")[2] if "@" in str(ref) else "" for ref in single_runs["ref"]]
    # The steps of a mark differ between seeds; without one, it is the step that rows have in common.
    single_runs = single_runs.assign(
        mark=marks, moment=[mark or str(step) for mark, step in zip(marks, single_runs["step"], strict=True)]
    )
    rows = []
    for _, same in single_runs.groupby(["family", "moment", *IDENTITY], dropna=False, sort=False):
        if same["run"].nunique() < 2 or same["run"].duplicated().any():
            continue
        first = same.iloc[0]
        name = first["family"]
        row = {
            **{column: first[column] for column in IDENTITY},
            "run": name,
            "ref": f"{name}@{first['mark']}" if first["mark"] else name,
            "step": first["step"] if same["step"].nunique() == 1 else pandas.NA,
            "seed": pandas.NA,
            "n_runs": int(same["value"].notna().sum()),
            "n": first["n"] if same["n"].nunique() == 1 else pandas.NA,
            "baseline": same["baseline"].mean(),
            "engine": None,
            "null_effect": None,
        }
        for value, low, high in POOLED:
            numbers = same[value].to_numpy(dtype=float)
            numbers = numbers[~pandas.isna(numbers)]
            row[value] = float(numbers.mean()) if len(numbers) else math.nan
            row[low], row[high] = interval_over_runs(numbers.tolist())
        rows.append(row)
    return tidy(pandas.DataFrame(rows))
