"""Files and folders that appear whole or not at all, and survive a power cut once they have appeared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError

# Hidden, so that neither a glob nor the listing of checkpoints takes a half-written one for real.
_TEMPORARY = re.compile(r"^\..*\.tmp-[0-9a-f]{32}$")


def folder_of(out: Any) -> Path:
    """Returns the folder that a caller gives to write to.

    Raises:
        UserError: for what is no path, or none that the operating system could take.
    """
    try:
        path = Path(out)
        path.exists()
    except TypeError:
        raise UserError(
            f"out is the path of a folder, text or Path, not of type {type(out).__name__}"
        ) from None
    except OSError as error:
        raise UserError(f"out cannot be {str(path)[:60]!r}...: {error.strerror or error}") from None
    return path


def is_temporary(path: Path) -> bool:
    """Tells whether a name is one that a killed writer may leave behind."""
    return _TEMPORARY.match(path.name) is not None


def temporary_beside(path: Path) -> Path:
    """Returns a name that nothing else has, in the same folder (a rename across file systems is not atomic)."""
    return path.parent / f".{path.name}.tmp-{uuid.uuid4().hex}"


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Creates or overwrites a file: a reader sees the old content or the new, never a part."""
    temporary = temporary_beside(path)
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill the folder given; on a normal exit it is renamed to ``path``, on an exception it is gone.

    Raises:
        UserError: if ``path`` exists, or cannot be made.
    """
    refuse_existing(path)
    temporary = temporary_beside(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        with writing(path):
            yield temporary
            sync_folder(temporary)
            refuse_existing(path)  # a rename would silently replace an empty folder
            os.rename(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already and is not overwritten: name another folder, or remove it")


def remove_folder(path: Path) -> None:
    """Removes a folder so that no part of it is ever seen under its own name."""
    doomed = temporary_beside(path)
    os.rename(path, doomed)
    sync_folder(path.parent)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a refusal of the operating system into a `UserError` of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; name a folder you can write to"
        ) from error


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
        UserError: naming the file and both sizes, or that bytes in it have changed.
    """
    if not isinstance(expected, dict) or not {"bytes", "sha256"} <= set(expected):
        raise UserError(f"{file.parent / 'meta.json'} records no bytes and sha256 of {file.name}")
    if type(expected["bytes"]) is not int or len(content) != expected["bytes"]:
        longer = type(expected["bytes"]) is int and len(content) > expected["bytes"]
        fault = "is too long" if longer else "is truncated"
        raise UserError(
            f"{file} {fault}: {len(content)} bytes where meta.json says {expected['bytes']}; "
            "restore it from a copy"
        )
    if digest(content)["sha256"] != expected["sha256"]:
        raise UserError(
            f"{file} has been altered: its sha256 is not the one in meta.json; restore it from a copy"
        )
