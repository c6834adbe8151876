"""One unit done, wherever: its outcome is on disk before anyone hears of it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.atomic import digest, replace_file, writing
from interp_tasks.checkpoints.meta import is_whole
from interp_tasks.checkpoints.run_files import checkpoint_folder, read_json, stored_steps
from interp_tasks.errors import UserError
from interp_tasks.files import read_file
from interp_tasks.grids.units import MeasureUnit, TrainUnit, Unit
from interp_tasks.measurement.table import OLD_NAMES

if TYPE_CHECKING:
    import pandas

UNITS = "units"


@dataclass(frozen=True)
class Record:
    """The record of a unit: its status, error and output.

    Attributes:
        status: ``"done"`` or ``"failed"``.
        error: one line; ``trace``: where it was raised.
        sha256: of the rows that it measured.
    """

    key: str
    what: str
    status: str
    seconds: float
    error: str = ""
    trace: str = ""
    sha256: str = ""


def perform(unit: Unit, root: str, device: str, imports: Sequence[str] = ()) -> Record:
    """Does one unit and records what came of it; an error in it is recorded as its outcome.

    Args:
        root: the grid's folder, absolute, and the same for all who work on it.
        imports: files that register tasks.
    """
    start = time.perf_counter()
    error = trace = ""
    try:
        import_all(imports)
        if isinstance(unit, TrainUnit):
            train_unit(unit, Path(root), device)
        else:
            measure_unit(unit, Path(root), device)
    except Exception as failure:
        error, trace = one_line(failure), traceback.format_exc()
    result_digest = "" if error else result_sha256(Path(root), unit.key)
    record = Record(
        unit.key,
        unit.what,
        "failed" if error else "done",
        time.perf_counter() - start,
        error,
        trace,
        result_digest,
    )
    write_record(Path(root), record)
    return record


def import_all(files: Sequence[str]) -> None:
    from interp_tasks.settings import import_file

    for file in files:
        import_file(Path(file))


def one_line(failure: Exception) -> str:
    """Returns a user's mistake in its own words, anything else with its kind."""
    from circuits import CircuitsError
    from tasks.errors import TaskError

    expected = isinstance(failure, (UserError, TaskError, CircuitsError))
    text = " ".join(str(failure).split())
    return text if expected and text else f"{type(failure).__name__}: {text}"


def train_unit(unit: TrainUnit, root: Path, device: str) -> None:
    from interp_tasks.training.trainer import train_resolved

    train_resolved(unit.resolved, root / unit.folder, device=device)


def measure_unit(unit: MeasureUnit, root: Path, device: str) -> None:
    """Measures one unit of a grid, in a worker, and writes its result."""
    import warnings

    import torch

    from interp_tasks import experiments
    from interp_tasks.grids.units import option_parameters

    call = getattr(experiments, unit.asked.name)
    takes_device = any(parameter.name == "device" for parameter in option_parameters())
    settings = dict(unit.asked.settings)
    if takes_device and device != "cpu" and accepts_options(call):
        settings.setdefault("device", device)
    threads = torch.get_num_threads()
    torch.set_num_threads(unit.threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(unit.refs(lambda run: place_of(run, root)), **settings)
    finally:
        torch.set_num_threads(threads)
    result = replace(result, frame=relative(result.frame, f"{root}/"))
    write_unit(result_file(root, unit.key), result.parquet())


def relative(rows: pandas.DataFrame, root: str) -> pandas.DataFrame:
    """Runs of the grid by their folders under it: the same wherever the grid lies, and after it was moved."""
    return rows.assign(
        **{
            name: rows[name].map(lambda text: text.replace(root, "") if isinstance(text, str) else text)
            for name in ("run", "ref")
        }
    )


def accepts_options(call: Any) -> bool:
    import inspect

    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(call).parameters.values())


def place_of(run: str, root: Path) -> str:
    """Returns the path of a run: the grid's own runs lie in its folder, others keep their path."""
    return str(root / run) if run.startswith("runs/") and (root / run).is_dir() else run


def result_file(root: Path, key: str) -> Path:
    return root / UNITS / f"{key}.parquet"


def record_file(root: Path, key: str) -> Path:
    return root / UNITS / f"{key}.json"


def write_record(root: Path, record: Record) -> None:
    write_unit(record_file(root, record.key), (json.dumps(asdict(record), indent=1) + "\n").encode())


def write_unit(file: Path, content: bytes) -> None:
    """Writes a file of a unit.

    Raises:
        UserError: naming it, if the file system refuses.
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def read_record(root: Path, unit: Unit) -> Record | None:
    """Reads the record of a unit if its output still exists; a damaged record counts as none."""
    try:
        record = Record(**read_json(record_file(root, unit.key), "what became of a unit"))
    except (UserError, TypeError):
        return None
    texts = (record.what, record.error, record.trace, record.sha256)
    if not all(isinstance(each, str) for each in texts) or not isinstance(record.seconds, (int, float)):
        return None
    if record.key != unit.key or record.status not in ("done", "failed"):
        return None
    if record.status == "done" and not is_made(root, unit, record):
        return None
    return record


def is_made(root: Path, unit: Unit, record: Record) -> bool:
    if isinstance(unit, TrainUnit):
        return is_trained(root, unit)
    if record.sha256 and record.sha256 != result_sha256(root, unit.key):
        return False
    return read_result(root, unit.key) is not None


def is_trained(root: Path, unit: TrainUnit) -> bool:
    """Tells whether the run is stored to its last step."""
    run = root / unit.folder
    steps = stored_steps(run)
    return (
        bool(steps) and steps[-1] >= unit.resolved.train.steps and is_whole(checkpoint_folder(run, steps[-1]))
    )


def result_sha256(root: Path, key: str) -> str:
    """Returns the sha256 of a unit's rows; empty where there are none."""
    try:
        return str(digest(read_file(result_file(root, key), "the rows of a unit"))["sha256"])
    except UserError:
        return ""


def read_result(root: Path, key: str) -> pandas.DataFrame | None:
    """Returns a unit's rows; ``None`` where they cannot be read."""
    import io

    import pandas

    try:
        stored = io.BytesIO(read_file(result_file(root, key), "the rows of a unit"))
        return pandas.read_parquet(stored).rename(columns=OLD_NAMES)
    # A mangled file makes Arrow and pandas raise whatever their code runs into first.
    except Exception:
        return None
