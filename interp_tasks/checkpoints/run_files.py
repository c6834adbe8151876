"""Paths in a run folder, readers of its JSON, and digests of its files. Imports no torch.

RUN/run.json                   config, seeds, versions, hardware, git state, drop metric
RUN/metrics.jsonl              one line per logged step
RUN/clock.jsonl                seconds of training by logged step
                               (both with .xz, compressed, in runs that ship)
RUN/checkpoints/00004000/      model.safetensors + meta.json (+ training_state.safetensors in a few)
RUN/stopped/                   the same, where a run was asked to stop between two checkpoints
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.files import MAX_JSON, read_file

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CLOCK_FILE = "clock.jsonl"
#: Added to the name of a log that is compressed.
COMPRESSED = ".xz"
CHECKPOINTS_FOLDER = "checkpoints"
#: Not among the checkpoints: the run has the same ones whether it was stopped or not.
STOPPED_FOLDER = "stopped"
META_FILE = "meta.json"
#: Bytes of a log that is decompressed, and of memory to do so.
MAX_LOG, MAX_DECOMPRESSING = 256 << 20, 256 << 20
WEIGHTS_FILE = "model.safetensors"
TRAINING_STATE_FILE = "training_state.safetensors"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after ``step`` updates; the name sorts as the step does."""
    return run / CHECKPOINTS_FOLDER / f"{step:08d}"


def is_checkpoint(path: Path) -> bool:
    return (path / META_FILE).is_file()


def is_run(path: Path) -> bool:
    """Tells whether a folder is a trainer's run, or its ``checkpoints/`` holds numbered checkpoints."""
    return (path / RUN_FILE).is_file() or bool(stored_steps(path))


def check_no_run(folder: Path) -> None:
    """Refuses the folder of a run where runs are to lie: there would be runs in a run.

    Raises:
        UserError: in one line.
    """
    if is_run(folder):
        raise UserError(f"{folder} is the folder of a run: choose another --out")


def check_run_name(run: Path) -> None:
    """Refuses a folder whose run no REF could name.

    Raises:
        UserError: in one line.
    """
    if "@" in run.name or str(run).startswith("zoo:"):
        raise UserError(
            f"--out {run}: RUN@STEP and zoo:NAME name checkpoints; choose a name without @ and zoo:"
        )


#: What lies in a folder of something else than runs, by what it is the folder of.
OTHERS = {"search": "search.json", "grid": "units"}


def check_free(folder: Path, kind: str) -> None:
    """Refuses the folder of a run, or of a search or grid that is not of this kind.

    Raises:
        UserError: in one line.
    """
    check_no_run(folder)
    for other, entry in OTHERS.items():
        if other != kind and (folder / entry).exists():
            raise UserError(f"{folder} is the folder of a {other}: choose another --out")


def stored_steps(run: str | Path) -> list[int]:
    """Returns the steps of a run's checkpoints, ascending; empty for a folder that is no run."""
    folder = Path(run) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if is_checkpoint(entry)]
    return sorted(
        int(name) for name in names if name.isdecimal() and name.isascii() and name == f"{int(name):08d}"
    )


def parse_json(content: bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: for anything else, NaN and nesting without end included.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(content.decode(), parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_step(value: Any) -> bool:
    """Returns whether it can be a number of updates."""
    return type(value) is int and 0 <= value < 2**53


def read_json(path: Path, description: str) -> dict[str, Any]:
    """Returns a JSON object from a file.

    Raises:
        UserError: in one line, if the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        content = parse_json(read_file(path, description, MAX_JSON))
    except UserError:
        raise
    except ValueError as error:
        complaint = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not valid JSON ({complaint}): it should hold {description}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path} holds a JSON {type(content).__name__}, not an object: it should hold {description}"
        )
    return content


def read_run(path: str | Path) -> dict[str, Any]:
    """Returns a run's ``run.json``.

    Raises:
        UserError: if the folder has none, or it is mangled.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no run folder {folder}")
    content = read_json(folder / RUN_FILE, "the config that made the run")
    for name, fits in _RUN_FORM.items():
        if content.get(name) is not None and not fits(content[name]):
            raise UserError(f"{folder / RUN_FILE} is mangled: {name!r} is of the wrong kind")
    return content


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) in (int, float) for each in value.values())


def _drop_metric(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    plateau = value.get("plateau")
    named = all(isinstance(each, str) for name, each in value.items() if name != "plateau")
    return named and (plateau is None or (type(plateau) in (int, float) and math.isfinite(plateau)))


#: What has another reader than a person, where it is there at all.
_RUN_FORM: dict[str, Callable[[Any], bool]] = {
    "preset": lambda value: isinstance(value, str),
    "drop_metric": _drop_metric,
    "published_drop": lambda value: isinstance(value, dict) and all(map(is_step, value.values())),
    "resumed": lambda value: isinstance(value, list),
    "peak_memory": _numbers,
    "plateau_levels": _numbers,
    "loss_shares": _numbers,
}


def log_file(run: Path, name: str) -> Path:
    """Returns the file of a log, ``metrics.jsonl`` or ``clock.jsonl``: the compressed one where that alone is there."""
    plain, compressed = run / name, run / (name + COMPRESSED)
    return compressed if compressed.is_file() and not plain.exists() else plain


def read_log(file: Path, what: str) -> bytes:
    """Returns the bytes of a log, decompressed.

    Raises:
        UserError: for a file that cannot be read or decompressed.
    """
    raw = read_file(file, what)
    if file.suffix != COMPRESSED:
        return raw
    reader = lzma.LZMADecompressor(memlimit=MAX_DECOMPRESSING)
    try:
        content = reader.decompress(raw, MAX_LOG)
    except (lzma.LZMAError, EOFError, MemoryError):
        content = b""
    if not reader.eof:
        too_long = f"holds more than {MAX_LOG >> 20} MiB of text"
        raise UserError(
            f"{file} {too_long if len(content) >= MAX_LOG else 'is mangled: it cannot be decompressed'}"
        )
    return content


def iterate_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the logged lines of a run, in order; a last line that a killed writer left unfinished is dropped.

    Raises:
        UserError: if there is no log, or an earlier line is not a JSON object with a step.
    """
    file = log_file(Path(path), METRICS_FILE)
    if not file.exists():
        raise UserError(f"{file} is missing: the run has logged nothing")
    for number, line in enumerate(io.BytesIO(read_log(file, "what the run has logged")), start=1):
        # What follows the last newline was never finished, even where it happens to parse ("12" of "1234").
        if line.endswith(b"\n"):
            yield parse_metrics_line(line, file, number)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns all lines of :func:`iterate_metrics`."""
    return list(iterate_metrics(path))


def read_clock(path: str | Path) -> dict[int, float]:
    """Returns step -> seconds of training until then; empty for a run without a clock.

    A clock is no part of what a run is: what cannot be read of it is left out.
    """
    file = log_file(Path(path), CLOCK_FILE)
    try:
        raw = read_log(file, "the seconds of training")
    except UserError:
        return {}
    times = {}
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        try:
            content = parse_metrics_line(line, file, number)
        except UserError:
            continue
        seconds = content.get("seconds")
        if isinstance(seconds, (int, float)) and seconds >= 0:
            times[content["step"]] = float(seconds)
    return times


def parse_metrics_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        content = parse_json(line)
    except ValueError:
        raise UserError(f"{file} is mangled: line {number} is not valid JSON") from None
    if not isinstance(content, dict) or not is_step(content.get("step")):
        raise UserError(f"{file} is mangled: line {number} is not an object with an integer step")
    return content


def to_json(value: Any, where: str = "value") -> Any:
    """Returns plain JSON of nested mappings, sequences and numbers (numpy's and torch's scalars too).

    NaN and infinities become ``None``: JSON has no word for them.

    Raises:
        TypeError: naming the first value that JSON cannot hold.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [to_json(part, f"{where}[{index}]") for index, part in enumerate(parts)]
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
    """Returns readable JSON with one trailing newline."""
    plain = to_json(value)
    try:
        return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:
        # Half a character, of a name that is no text: only as an escape.
        return (json.dumps(plain, indent=2, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check_digest(file: Path, content: bytes, expected: Any) -> None:
    """Refuses content that differs from what ``meta.json`` recorded.

    Raises:
        UserError: naming the file, and both sizes where they differ.
    """
    if not isinstance(expected, dict) or not {"bytes", "sha256"} <= set(expected):
        raise UserError(f"{file.parent / META_FILE} records no bytes and sha256 of {file.name}")
    found = digest(content)
    if found != {name: expected[name] for name in found}:
        size = f"{len(content)} bytes where {META_FILE} says {expected['bytes']}"
        what = size if len(content) != expected["bytes"] else f"its sha256 is not the one in {META_FILE}"
        raise UserError(f"{file} has been altered: {what}; restore it from a copy")
