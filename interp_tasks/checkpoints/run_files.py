"""Where things lie in a run folder, and how its JSON is read. Knows no torch.

RUN/run.json                   config, seeds, versions, hardware, git state, drop metric
RUN/metrics.jsonl              one line per logged step
RUN/checkpoints/00004000/      model.safetensors + meta.json (+ training_state.safetensors in a few)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
META_FILE = "meta.json"
WEIGHTS_FILE = "model.safetensors"
TRAINING_STATE_FILE = "training_state.safetensors"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` updates lies; the name sorts as the step does."""
    return run / CHECKPOINTS_FOLDER / f"{step:08d}"


def is_checkpoint(path: Path) -> bool:
    return (path / META_FILE).is_file()


def is_run(path: Path) -> bool:
    """True for a trainer's run, and for any folder whose ``checkpoints/`` holds numbered checkpoints."""
    return (path / RUN_FILE).is_file() or bool(stored_steps(path))


def stored_steps(run: str | Path) -> list[int]:
    """The steps that a run has checkpoints of, ascending; empty for what is no run folder."""
    folder = Path(run) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if is_checkpoint(entry)]
    return sorted(
        int(name) for name in names if name.isdecimal() and name.isascii() and name == f"{int(name):08d}"
    )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: in one line, if the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: it would hold {what}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        complaint = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not valid JSON ({complaint}): it should hold {what}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, not an object: it should hold {what}")
    return content


def read_run(path: str | Path) -> dict[str, Any]:
    """A run's ``run.json``.

    Raises:
        UserError: if the folder has none, or it is mangled.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no run folder {folder}")
    return read_json(folder / RUN_FILE, "the config that made the run")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The logged lines of a run, in order; a last line that a killed writer left unfinished is dropped.

    Raises:
        UserError: if there is no log, or an earlier line is not a JSON object with a step.
    """
    file = Path(path) / METRICS_FILE
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file} is missing: the run has logged nothing") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    # What follows the last newline was never finished, even where it happens to parse ("12" of "1234").
    return [
        parse_metrics_line(line, file, number) for number, line in enumerate(raw.split(b"\n")[:-1], start=1)
    ]


def parse_metrics_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        raise UserError(f"{file} is mangled: line {number} is not valid JSON") from None
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        raise UserError(f"{file} is mangled: line {number} is not an object with an integer step")
    return content
