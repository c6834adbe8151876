"""Files: read with one line about what is wrong; written whole or not at all, by one writer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_file_bytes(file: Path, description: str) -> bytes:
    """Returns the content of a file, which should hold ``description``."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file} is missing: it would hold {description}") from None
    except OSError as error:
        raise UserError(f"cannot read {file}, which should hold {description}: {error.strerror}") from None


def check_regular_file(file: Path, option: str) -> None:
    """Refuses a path that is no regular file, headed by the option that names it."""
    try:
        what = "" if file.is_file() else "it is a folder" if file.is_dir() else "it is no regular file"
        what = what if file.exists() else "no such file"
    except OSError as error:
        what = f"cannot read it: {error.strerror}"
    if what:
        raise UserError(f"{option} {file}: {what}")


def read_toml(file: Path, description: str) -> dict[str, Any]:
    """Returns the content of a TOML file."""
    try:
        return tomllib.loads(read_file_bytes(file, description).decode())
    except UnicodeDecodeError:
        raise UserError(f"{file} is no UTF-8 text: it should hold {description}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not TOML: {error}") from None


LOCK_FILE = ".lock"
#: The kinds of files that commands write, and replace where there is one already.
REPLACED = (".html", ".htm", ".json", ".csv", ".parquet")
# Hidden, so that neither a glob nor the listing of checkpoints takes a half-written one for real.
_TEMPORARY = re.compile(r"^\..*\.tmp-[0-9a-f]{32}$")


def is_temporary_name(path: Path) -> bool:
    """Returns whether a name is one that a killed writer may leave behind."""
    return _TEMPORARY.match(path.name) is not None


def temporary_path_beside(path: Path) -> Path:
    """Returns a name that nothing else has, in the same folder (a rename across file systems is not atomic)."""
    return path.parent / f".{path.name}.tmp-{uuid.uuid4().hex}"


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turns a refusal of the operating system into a `UserError` of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; name a folder you can write to"
        ) from error


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


def atomic_write(path: Path, content: str | bytes) -> Path:
    """Creates or replaces a file: a reader sees the old content or the new, never a part."""
    return write_files_together({path: content})[0]


def write_files_together(files: Mapping[Path, str | bytes]) -> list[Path]:
    """Writes files that belong together; where one of them cannot be written, none is, and the old ones stay."""
    temporary = {path: temporary_path_beside(path) for path in files}
    path = Path()
    try:
        for path, content in files.items():
            if path.is_dir():
                raise UserError(f"cannot write {path}: it is a folder")
            with explain_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_synced(temporary[path], content.encode() if isinstance(content, str) else content)
        for path in files:
            with explain_write_errors(path):
                os.replace(temporary[path], path)
        for folder in {path.parent for path in files}:
            with explain_write_errors(folder):
                sync_folder(folder)
    finally:
        for left in temporary.values():
            with contextlib.suppress(OSError):
                left.unlink()
    return list(files)


@contextlib.contextmanager
def create_folder_atomically(path: Path) -> Iterator[Path]:
    """Fill the folder given; on a normal exit it is renamed to ``path``, on an exception it is gone."""
    check_path_is_free(path)
    temporary = temporary_path_beside(path)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        with explain_write_errors(path):
            yield temporary
            sync_folder(temporary)
            check_path_is_free(path)  # a rename would silently replace an empty folder
            os.rename(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_path_is_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already and is not overwritten: name another folder, or remove it")


def remove_folder(path: Path) -> None:
    """Removes a folder so that no part of it is ever seen under its own name."""
    doomed = temporary_path_beside(path)
    os.rename(path, doomed)
    sync_folder(path.parent)
    shutil.rmtree(doomed)


def acquire_folder_lock(folder: Path) -> BaseFileLock:
    """Returns the lock of a folder, held until its ``release()`` or the end of the process, however that ends."""
    from filelock import FileLock, Timeout

    file = folder / LOCK_FILE
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise UserError(f"{file} is a link or no regular file, and no lock: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = file.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
        raise UserError(
            f"{folder} is being written by another process (pid {holder}): wait for it, or choose another --out"
        ) from None
    file.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return lock


def check_writable_folder(folder: Path) -> None:
    """Refuses a folder that cannot be made or written to; makes nothing."""
    existing = folder
    while not (existing.exists() or existing.is_symlink()) and existing != existing.parent:
        existing = existing.parent
    if not existing.exists():
        raise UserError(f"cannot write to {folder}: {existing} is a link to nothing")
    if not existing.is_dir():
        raise UserError(f"cannot write to {folder}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: no permission in {existing}; choose another with --out")


def check_writable_file(path: Path) -> None:
    """Refuses a file that could not be written, and one of another kind that would be lost; makes nothing."""
    if path.is_dir():
        raise UserError(
            f"cannot write to {path}: it is a folder; name a file in it, such as {path / 'page.html'}"
        )
    if path.is_file() and path.suffix.lower() not in REPLACED:
        raise UserError(
            f"cannot write to {path}: a file that is neither page nor table is not replaced; choose another name"
        )
    check_writable_folder(path.parent)
