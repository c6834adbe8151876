"""A run folder as its readers see it: paths, JSON, logs, digests. Imports no torch.

RUN/run.json                   config, seeds, versions, hardware, git state, drop metric
RUN/metrics.jsonl              one line per logged step
RUN/clock.jsonl                seconds of training by logged step
                               (both with .xz, compressed, in runs that ship)
RUN/checkpoints/00004000/      model.safetensors + meta.json (+ training_state.safetensors in a few)
RUN/stopped/                   the same, where a run was asked to stop between two checkpoints
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.file_io import read_file_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps = NDArray[np.int64]
    Values = NDArray[np.float64]

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CLOCK_FILE = "clock.jsonl"
#: Added to the name of a log that is compressed.
COMPRESSED = ".xz"
CHECKPOINTS_FOLDER = "checkpoints"
#: Not among the checkpoints: the run has the same ones whether it was stopped or not.
STOPPED_FOLDER = "stopped"
META_FILE = "meta.json"
#: Bytes of a log whose columns are read at once.
BLOCK = 2**23
#: What the log is said to hold.
LOGGED = "what the run has logged"
#: What lies in a folder of something else than runs, by what it is the folder of.
OTHERS = {"search": "search.json", "grid": "units"}
#: Fields of ``run.json`` that have another reader than a person, by their kind.
NUMBERS = ("peak_memory", "plateau_levels", "loss_shares", "published_drop")
KINDS = {"preset": str, "resumed": list, "drop_metric": dict, **dict.fromkeys(NUMBERS, dict)}
WEIGHTS_FILE = "model.safetensors"
TRAINING_STATE_FILE = "training_state.safetensors"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after ``step`` updates; the name sorts as the step does."""
    return run / CHECKPOINTS_FOLDER / f"{step:08d}"


def is_checkpoint_folder(path: Path) -> bool:
    return (path / META_FILE).is_file()


def is_run_folder(path: Path) -> bool:
    """Tells whether a folder is a trainer's run, or its ``checkpoints/`` holds numbered checkpoints."""
    return (path / RUN_FILE).is_file() or bool(stored_steps(path))


def check_no_run(folder: Path) -> None:
    """Refuses the folder of a run where runs are to lie: there would be runs in a run."""
    if is_run_folder(folder):
        raise UserError(f"{folder} is the folder of a run: choose another --out")


def check_run_target(run: Path) -> None:
    """Refuses a folder that lies in a run's, at any depth, or whose run no REF could name."""
    for folder in run.resolve().parents:
        check_no_run(folder)
    if "@" in run.name or str(run).startswith("zoo:"):
        raise UserError(
            f"--out {run}: RUN@STEP and zoo:NAME name checkpoints; choose a name without @ and zoo:"
        )


def check_folder_kind(folder: Path, kind: str) -> None:
    """Refuses the folder of a run, or of a search or grid that is not of this kind."""
    check_no_run(folder)
    for other, entry in OTHERS.items():
        if other != kind and (folder / entry).exists():
            raise UserError(f"{folder} is the folder of a {other}: choose another --out")


def stored_steps(run: str | Path) -> list[int]:
    """Returns the steps of a run's checkpoints, ascending; empty for a folder that is no run."""
    folder = Path(run) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if is_checkpoint_folder(entry)]
    return sorted(
        int(name) for name in names if name.isdecimal() and name.isascii() and name == f"{int(name):08d}"
    )


def parse_json(content: bytes) -> Any:
    """Parses JSON; a ``ValueError`` for anything else, NaN and nesting without end included."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(content.decode(), parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_step_number(value: Any) -> bool:
    """Returns whether it can be a number of updates."""
    return type(value) is int and 0 <= value < 2**53


def read_json(path: Path, description: str) -> dict[str, Any]:
    """Returns a JSON object from a file."""
    raw = read_file_bytes(path, description)
    try:
        content = parse_json(raw)
    except ValueError as error:
        complaint = str(error).splitlines()[0]
        raise UserError(f"{path} is not valid JSON ({complaint}): it should hold {description}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path} holds a JSON {type(content).__name__}, not an object: it should hold {description}"
        )
    return content


def read_run(path: str | Path) -> dict[str, Any]:
    """Returns a run's ``run.json``."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no run folder {folder}")
    content = read_json(folder / RUN_FILE, "the config that made the run")
    for name, kind in KINDS.items():
        value = content.get(name)
        parts = value if isinstance(value, dict) else {}
        fits = isinstance(value, kind) and all(
            type(each) in (int, float) and abs(each) < math.inf
            if name in NUMBERS or key == "plateau"
            else isinstance(each, str)
            for key, each in parts.items()
            if each is not None
        )
        if value is not None and not fits:
            raise UserError(f"{folder / RUN_FILE} is mangled: {name!r} is of the wrong kind")
    return content


def log_file(run: Path, name: str) -> Path:
    """Returns the file of a log, ``metrics.jsonl`` or ``clock.jsonl``: the compressed one where that alone is there."""
    plain, compressed = run / name, run / (name + COMPRESSED)
    return compressed if compressed.is_file() and not plain.exists() else plain


def read_decompressed_log(file: Path) -> bytes:
    """Returns the bytes of a log, decompressed."""
    raw = read_file_bytes(file, LOGGED)
    if file.suffix != COMPRESSED:
        return raw
    try:
        return lzma.decompress(raw)
    except lzma.LZMAError:
        raise UserError(f"{file} is mangled: it cannot be decompressed") from None


def iterate_log_entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a log, in order; a last line that a killed writer left unfinished is dropped."""
    for number, line in enumerate(io.BytesIO(read_decompressed_log(file)), start=1):
        # What follows the last newline was never finished, even where it happens to parse ("12" of "1234").
        if line.endswith(b"\n"):
            yield parse_metrics_line(line, file, number)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the logged lines of a run, as :func:`iterate_log_entries`."""
    return list(iterate_log_entries(log_file(Path(path), METRICS_FILE)))


def read_clock(path: str | Path) -> dict[int, float]:
    """Returns step -> seconds of training until then; empty for a run without a clock that can be read."""
    try:
        lines = list(iterate_log_entries(log_file(Path(path), CLOCK_FILE)))
        return {line["step"]: float(line["seconds"]) for line in lines}
    except (UserError, KeyError, TypeError, ValueError):
        # A clock is no part of what a run is.
        return {}


def parse_metrics_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        content = parse_json(line)
    except ValueError:
        raise UserError(f"{file} is mangled: line {number} is not valid JSON") from None
    if not isinstance(content, dict) or not is_step_number(content.get("step")):
        raise UserError(f"{file} is mangled: line {number} is not an object with an integer step")
    return content


def read_metric_series_and_last_step(
    path: Path,
) -> tuple[dict[tuple[str, str], tuple[Steps, Values]], int | None]:
    """Reads the metrics of a log, one column each, and the last step; a last line that is unfinished is left out."""
    import numpy as np
    import pyarrow as arrow
    import pyarrow.json

    file = log_file(path, METRICS_FILE)
    parts: dict[tuple[str, str], list[tuple[Steps, Values]]] = {}
    last, lines = -1, 0
    # What follows the last newline was never finished.
    log = io.BytesIO(read_decompressed_log(file).rpartition(b"\n")[0])
    while block := b"".join(log.readlines(BLOCK)):
        try:
            table = pyarrow.json.read_json(arrow.BufferReader(block))
        except arrow.ArrowInvalid as error:
            raise UserError(f"{file} is mangled after line {lines}: {str(error).splitlines()[0]}") from None
        if "step" not in table.column_names or not arrow.types.is_integer(table["step"].type):
            raise UserError(
                f"{file} is mangled after line {lines}: a line is not an object with an integer step"
            )
        steps = table["step"].to_numpy()
        wrong = np.flatnonzero(np.diff(steps, prepend=last) <= 0)
        if len(wrong) or table["step"].null_count:
            line = lines + 1 + (int(wrong[0]) if len(wrong) else 0)
            raise UserError(f"{file} is mangled: line {line} has no later step than the one before it")
        last, lines = int(steps[-1]), lines + len(steps)
        for split in {"train", "validation"} & {*table.column_names}:
            column = table[split]
            if arrow.types.is_null(column.type):
                continue
            if not arrow.types.is_struct(column.type):
                raise UserError(f"{file} is mangled: a line has {split} metrics that are not an object")
            has = column.is_valid()
            of_split = steps[has.to_numpy()]
            for name, values in zip(column.type.names, column.filter(has).flatten(), strict=True):
                if values.type in (arrow.int64(), arrow.float64(), arrow.null()):
                    numbers = np.asarray(values.cast(arrow.float64()).to_numpy(), dtype=np.float64)
                    parts.setdefault((split, name), []).append((of_split, numbers))
    columns = {
        key: (np.concatenate([one for one, _ in several]), np.concatenate([one for _, one in several]))
        for key, several in parts.items()
    }
    return columns, last if lines else None


def to_plain_json(value: Any, where: str = "value") -> Any:
    """Returns plain JSON of nested mappings, sequences and numbers (numpy's and torch's scalars too).

    NaN and infinities become ``None``: JSON has no word for them.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain_json(part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [to_plain_json(part, f"{where}[{index}]") for index, part in enumerate(parts)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
        if isinstance(value, (str, bool)):
            return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def json_bytes(value: Any) -> bytes:
    """Returns readable JSON with one trailing newline; half a character, of a name that is no text, as an escape."""
    text = json.dumps(to_plain_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def size_and_sha256(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


#: Version of the format of ``run.json`` and ``meta.json``.
FORMAT = 1


def with_own_sha256(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta data with a sha256 over all of it: a changed byte is noticed here as in the weights."""
    unsigned = {name: value for name, value in meta.items() if name != "sha256"}
    return {**meta, "sha256": hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()}


def read_checkpoint_meta(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's ``meta.json``, which is as it was written: its digest says so."""
    file = folder / META_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no checkpoint: it has no {META_FILE}")
    meta = read_json(file, "a checkpoint's description")
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{file} has format version {meta.get('format')!r}, this interp-tasks reads {FORMAT}: "
            "use the version that wrote it, or save the model again"
        )
    if meta.get("sha256") != with_own_sha256(meta)["sha256"]:
        raise UserError(
            f"{file} has been altered: its sha256 does not match its content; restore it from a copy"
        )
    return meta


def is_complete_checkpoint(folder: Path) -> bool:
    """Tells whether a checkpoint's description is valid and its weights have the size stated there."""
    try:
        return (folder / WEIGHTS_FILE).stat().st_size == read_checkpoint_meta(folder)["weights"]["bytes"]
    except (UserError, OSError):
        return False


def checkpoints_and_stop_by_step(run: Path) -> list[tuple[int, Path]]:
    """Returns the steps and folders of a run's checkpoints, and of a stop between two of them, by step."""
    points = [(step, checkpoint_folder(run, step)) for step in stored_steps(run)]
    with contextlib.suppress(UserError):
        points.append((read_checkpoint_meta(run / STOPPED_FOLDER)["step"], run / STOPPED_FOLDER))
    return sorted(points)


#: What may stand in the place of a task, by the option.
INSTEAD = {
    "prompts": "--prompts FILE with texts and answers",
    "tokens": "--tokens FILE.npy with an int array (batch, pos)",
}


def check_names_task(meta: Mapping[str, Any], ref: str, without: Collection[str] = ()) -> None:
    """Refuses a checkpoint that names no task, or one that is not registered here; names no option ``without``."""
    import tasks

    named = meta["task"]
    if named is None:
        ways = ["--task NAME", *(way for option, way in INSTEAD.items() if option not in without)]
        raise UserError(f"{ref} names no task: say {' or '.join(ways)}")
    if named["name"] not in tasks.list():
        raise UserError(
            f"{ref} is of task {named['name']!r}, which is not registered here: "
            f"import it (--import FILE.py), or give --task NAME; tasks are {', '.join(tasks.list())}"
        )
