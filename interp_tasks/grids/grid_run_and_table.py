"""Runs a grid, a loop over units that skips what is done and goes on where one fails; and makes its table."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_reader import (
    check_folder_kind,
    checkpoint_folder,
    is_complete_checkpoint,
    read_json,
    size_and_sha256,
    stored_steps,
)
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.file_io import acquire_folder_lock, atomic_write, explain_write_errors, read_file_bytes
from interp_tasks.grid_spec import Spec, name_file_in_errors, parse_grid_spec, read_grid_spec
from interp_tasks.grids.work_units import (
    GridPlan,
    MeasureUnit,
    TrainUnit,
    Unit,
    check_grid_spec,
    experiment_signature_parameters,
    list_work_units,
)
from interp_tasks.measurement.confidence_intervals import interval_over_runs
from interp_tasks.measurement.logged_runs import glob_of_seeds
from interp_tasks.measurement.options_and_examples import Progress
from interp_tasks.measurement.result import COLUMNS, OLD_NAMES, Result, tidy_frame
from interp_tasks.setting_and_seed_parsing import EXECUTORS, import_file
from interp_tasks.text_formatting import pluralise
from interp_tasks.worker_pool import SerialExecutor, worker_pool

if TYPE_CHECKING:
    import pandas

UNITS = "units"
#: Dask on this machine, or at an address: a name, IPv4, or IPv6 in brackets, and a port.
DASK = re.compile(r"dask(?:://(?:[\w.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class UnitRecord:
    """What became of a unit, as ``units/KEY.json`` has it.

    Attributes:
        status: ``"done"`` or ``"failed"``.
        error: one line; ``trace``: where it was raised.
        sha256: of the rows that it measured.
    """

    key: str
    what: str
    status: str
    error: str = ""
    trace: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class GridRun:
    """A grid that was run: its plan, and the record of each unit.

    Attributes:
        folder: where it is.
        records: of each unit, by key; units that wait for one that failed have none.
        done_before: how many were done when it began.
    """

    folder: Path
    spec: Spec
    plan: GridPlan = field(repr=False)
    records: Mapping[str, UnitRecord] = field(repr=False)
    done_before: int = 0

    @property
    def failed(self) -> tuple[UnitRecord, ...]:
        return tuple(record for record in self.records.values() if record.status == "failed")

    @property
    def not_tried(self) -> tuple[MeasureUnit, ...]:
        """Units that were not tried, because a unit that they need failed."""
        return tuple(unit for unit in self.plan.measure if unit.key not in self.records)


def grid(
    spec: Spec | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    executor: str = "processes",
    jobs: int | None = None,
    device: str = "cpu",
    retry: bool = False,
    yes: bool = False,
    imports: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> GridRun:
    """Trains and measures what a grid asks for, but for what is done already; units that failed are in the result.

    Args:
        spec: a file, its content as a dict, or a :class:`Spec`.
        out: the grid's folder. With workers on other machines: on a file system that all share.
        executor: ``"serial"``, ``"processes"``, ``"dask"`` or ``"dask://HOST:PORT"``.
        jobs: units at a time on this machine (default: as many as its cores carry).
        retry: try units again that failed.
        yes: more than 1,000 runs are meant.
        imports: files that register tasks.

    Raises:
        UserError: for a grid that cannot be, another one at work in the folder, an executor that is not there.
    """
    root = Path(out).resolve()
    check_folder_kind(root, "grid")
    name = str(spec) if isinstance(spec, (str, Path)) else "grid"
    if not isinstance(spec, Spec):
        spec = parse_grid_spec(spec) if isinstance(spec, Mapping) else read_grid_spec(spec)
    files = [Path(file).resolve() for file in imports]
    for file in files:
        import_file(file)
    with name_file_in_errors(name):
        check_grid_spec(spec, yes=yes)
        planned = list_work_units(spec)
    slots = count_executor_slots(executor, jobs, spec.threads)
    records = settled_records(planned, root, retry)
    if len(records) < len(planned.units) and executor in ("serial", "processes", "dask"):
        check_device(device)
    before = sum(record.status == "done" for record in records.values())
    held = False
    while not held:
        # Where the executor is not there, nothing is left behind.
        with open_executor(executor, slots) as pool:
            with explain_write_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                lock = acquire_folder_lock(root)
            try:
                held = run_units(planned, pool, slots, (root, device, files), records, progress)
            finally:
                lock.release()
        if not held and executor != "processes":
            raise UserError(
                "the executor broke down; what is done is kept: the same command goes on from there"
            )
    return GridRun(Path(out), spec, planned, records, before)


def run_units(
    planned: GridPlan,
    pool: Executor,
    slots: int | None,
    arguments: tuple[Path, str, Sequence[Path]],
    records: dict[str, UnitRecord],
    progress: Progress | None,
) -> bool:
    """Runs the units without a record, each when those that it needs are done, and adds their records.

    Returns:
        Whether the pool held until none could begin. Units that ran in a process pool as it broke have failed.
    """
    waiting: list[Unit] = [unit for unit in planned.units if unit.key not in records]
    running: dict[Future[UnitRecord], Unit] = {}
    while True:
        done = {key for key, record in records.items() if record.status == "done"}
        ready = [unit for unit in waiting if isinstance(unit, TrainUnit) or done.issuperset(unit.needs)]
        with contextlib.suppress(BrokenExecutor):
            for unit in ready[: None if slots is None else slots - len(running)]:
                running[pool.submit(perform_unit, unit, *arguments)] = unit
                waiting.remove(unit)
        if not running:
            return not ready
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            unit = running.pop(future)
            if future.cancelled():
                return False
            if (error := future.exception()) is None:
                record = future.result()
            else:
                died = "its process died, or one beside it: killed, or out of memory; --retry tries it again"
                record = failure_record(unit, error, died if isinstance(error, BrokenExecutor) else "")
                write_record(arguments[0], record)
            records[unit.key] = record
            if progress is not None:
                progress(len(records), len(planned.units), f"{record.status}: {record.what}")


# ---- Who does the work


def count_executor_slots(executor: str, jobs: int | None, threads: int) -> int | None:
    """Returns how many units an executor gets at a time; ``None``: as many as there are."""
    if executor not in ("serial", "processes"):
        dask = DASK.fullmatch(executor)
        if dask is None or int(dask[1] or 0) > 65535:
            # What follows may hold a password.
            raise UserError(f"--executor {executor.partition('://')[0]!r}: write {EXECUTORS}")
    if executor not in ("processes", "dask"):
        if jobs is not None:
            raise UserError(f"--jobs is for executors on this machine, processes and dask, not {executor}")
        return 1 if executor == "serial" else None
    fit = max(1, (os.cpu_count() or 1) // threads)
    if jobs is not None and not 1 <= jobs <= fit:
        raise UserError(f"--jobs {jobs}: with {threads} thread(s) each, from 1 to {fit} fit on this machine")
    return jobs or fit


@contextlib.contextmanager
def open_executor(executor: str, slots: int | None) -> Iterator[Executor]:
    """Yields the executor of a name; whatever it started ends with it."""
    if executor == "serial":
        yield SerialExecutor()
    elif executor == "processes":
        # A process for each unit would import torch each time.
        with worker_pool(slots or 1) as pool:
            yield pool
    else:
        with dask_client(executor, slots) as client:
            # A unit is not a pure function: it writes.
            yield client.get_executor(pure=False)


@contextlib.contextmanager
def dask_client(name: str, workers: int | None) -> Iterator[Any]:
    """Yields a client of the scheduler at the address in a name, or of a cluster of this machine."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UserError(f"--executor {name} needs Dask: pip install 'interp-tasks[cluster]'") from None
    with contextlib.ExitStack() as stack:
        place: Any = f"tcp://{name.removeprefix('dask://')}"
        if name == "dask":
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            place = stack.enter_context(cluster)
        try:
            client = Client(place, timeout=10)
        except (OSError, ValueError) as error:
            said = type(error).__name__
            raise UserError(f"--executor {name}: no scheduler answers there ({said})") from None
        yield stack.enter_context(client)


# ---- One unit, wherever; its outcome is on disk before anyone hears of it


def perform_unit(unit: Unit, root: Path, device: str, imports: Sequence[Path] = ()) -> UnitRecord:
    """Does one unit and records what came of it; an error in it is recorded as its outcome.

    Args:
        root: the grid's folder, absolute, and the same for all who work on it.
    """
    record = UnitRecord(unit.key, unit.description, "done")
    try:
        for file in imports:
            import_file(file)
        if isinstance(unit, TrainUnit):
            from interp_tasks.training.train import train_resolved

            train_resolved(unit.resolved, root / unit.folder, device=device)
        else:
            rows = measure_as_parquet(unit, root, device)
            atomic_write(result_file(root, unit.key), rows)
            record = replace(record, sha256=size_and_sha256(rows)["sha256"])
    except Exception as error:
        record = failure_record(unit, error)
    write_record(root, record)
    return record


def measure_as_parquet(unit: MeasureUnit, root: Path, device: str) -> bytes:
    """Returns the rows of an experiment as parquet, its runs named by their folders under the grid's."""
    import torch

    from interp_tasks import experiments

    call, parameters = getattr(experiments, unit.asked.name), experiment_signature_parameters(unit.asked)
    settings = dict(unit.asked.settings)
    takes_options = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if device != "cpu" and (takes_options or "device" in parameters):
        settings.setdefault("device", device)
    threads = torch.get_num_threads()
    torch.set_num_threads(unit.threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(unit.refs(root), **settings)
    finally:
        torch.set_num_threads(threads)

    def strip_root(name: Any) -> Any:
        return name.replace(f"{root}/", "") if isinstance(name, str) else name

    # The same wherever the grid lies.
    frame = result.frame.assign(**{column: result.frame[column].map(strip_root) for column in ("run", "ref")})
    parquet: bytes = replace(result, frame=frame).parquet()
    return parquet


def failure_record(unit: Unit, error: BaseException, message: str = "") -> UnitRecord:
    """Returns the record of a unit that failed: a user's mistake in its own words, anything else with its kind."""
    from circuits import CircuitsError
    from tasks.errors import TaskError

    text = " ".join(str(error).split())
    if not text or not isinstance(error, (UserError, TaskError, CircuitsError)):
        text = f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    return UnitRecord(unit.key, unit.description, "failed", message or text, trace)


# ---- What is kept of a unit


def result_file(root: Path, key: str) -> Path:
    return root / UNITS / f"{key}.parquet"


def record_file(root: Path, key: str) -> Path:
    return root / UNITS / f"{key}.json"


def write_record(root: Path, record: UnitRecord) -> None:
    atomic_write(record_file(root, record.key), json.dumps(asdict(record), indent=1) + "\n")


def settled_records(planned: GridPlan, root: Path, retry: bool = False) -> dict[str, UnitRecord]:
    """Returns the records of units that need not be done, by key."""
    found = {unit.key: read_record(root, unit) for unit in planned.units}
    return {
        key: record for key, record in found.items() if record and not (retry and record.status == "failed")
    }


def read_record(root: Path, unit: Unit) -> UnitRecord | None:
    """Returns the record of a unit whose output is still there; a damaged record counts as none."""
    try:
        known = read_json(record_file(root, unit.key), "what became of a unit")
        known.pop("seconds", None)  # up to 0.2
        record = UnitRecord(**known)
        if record.key != unit.key or record.status not in ("done", "failed"):
            return None
        if record.status == "done" and isinstance(unit, TrainUnit):
            return record if is_trained(root, unit) else None
        if record.status == "done":
            rows = read_file_bytes(result_file(root, unit.key), "the rows of a unit")
            return record if record.sha256 == size_and_sha256(rows)["sha256"] else None
    except (UserError, TypeError):
        return None
    return record


def is_trained(root: Path, unit: TrainUnit) -> bool:
    """Returns whether a run is stored to its last step."""
    run = root / unit.folder
    last = max(stored_steps(run), default=-1)
    return last >= unit.resolved.train.steps and is_complete_checkpoint(checkpoint_folder(run, last))


#: What tells one row from another, but for the run it is of.
IDENTITY = (
    *("experiment", "split", "draw", "variant", "intervention", "site", "layer", "head", "position"),
    "metric",
)
#: Of a row that pools seeds: how many the grid has of them, with the number or without.
SEEDS = "n_seeds"


def tabulate_grid(grid: GridRun) -> pandas.DataFrame:
    """Returns every row of every finished unit, with a column for each setting that varies; then pooled seeds.

    A row of several seeds is the mean over those that have the number, its ``run`` is ``RUN/seed-*``, its ``n_runs``
    how many have it of ``n_seeds``, its interval Student's t over runs, of three at least. What an experiment pools
    itself stays so.
    """
    import pandas

    frames = []
    for unit in grid.plan.measure:
        if unit.key in grid.records and grid.records[unit.key].status == "done":
            stored = read_file_bytes(result_file(grid.folder, unit.key), "the rows of a unit")
            frames.append(pandas.read_parquet(io.BytesIO(stored)).rename(columns=OLD_NAMES))
    frame = pandas.concat(frames, ignore_index=True) if frames else tidy_frame([])
    together = pool_over_seeds(frame)
    frame = pandas.concat([frame, together], ignore_index=True)[list(COLUMNS)]
    runs = {*(unit.folder for unit in grid.plan.train), *map(str, frame["run"])}
    seeds = Counter(name for run in runs if (name := glob_of_seeds(run)) is not None)
    counts = [pandas.NA] * (len(frame) - len(together)) + [seeds[run] for run in together["run"]]
    frame[SEEDS] = pandas.array(counts, dtype="Int64")
    varied = {unit.folder: unit.varied for unit in grid.plan.train}
    varied |= {
        name: values for folder, values in varied.items() if (name := glob_of_seeds(folder)) is not None
    }
    for key in dict.fromkeys(key for values in varied.values() for key in values):
        cells = [varied.get(str(run), {}).get(key) for run in frame["run"]]
        frame[key] = [", ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells]
    return frame


def pool_over_seeds(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns means over the seeds of a configuration, for each row that two of them share."""
    import pandas

    if frame.empty:
        return frame
    single = frame[frame["n_runs"].isna() | (frame["n_runs"] <= 1)]
    single = single.assign(family=[glob_of_seeds(str(run)) or "" for run in single["run"]])
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
    return tidy_frame(rows)


def grid_result(grid: GridRun) -> Result:
    """Returns the table of a grid as a result, whose notes say what was done."""
    rows, records = tabulate_grid(grid), list(grid.records.values())
    done = sum(record.status == "done" for record in records)
    notes = [
        f"{pluralise(len(grid.plan.units), 'unit')}: {pluralise(len(grid.plan.train), 'run')} to train, "
        f"{pluralise(len(grid.plan.measure), 'experiment')}.",
        f"{done} done, {grid.done_before} of them before.",
    ]
    if grid.failed:
        notes.append(
            f"{len(grid.failed)} failed; {len(grid.not_tried)} not tried, because they need one that failed."
        )
    means = rows[rows[SEEDS].notna()]
    if some := int(((means["n_runs"] > 0) & (means["n_runs"] < means[SEEDS])).sum()):
        notes.append(
            f"{some} of {len(means)} means over seeds are over those that have the number (n_runs of n_seeds in the "
            "table): a mean of steps is too early where other seeds did not get there."
        )
    return Result("grid", rows, grid.spec.model_dump(mode="json", by_alias=True), tuple(notes))
