"""Files that appear whole or not at all, and the check, before slow work, that they can appear."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from interp_tasks.errors import UserError


def check_writable_folder(folder: Path) -> None:
    """Refuses a folder that cannot be made or written to; makes nothing.

    Raises:
        UserError: naming the folder and the reason.
    """
    existing = folder
    while not (existing.exists() or existing.is_symlink()) and existing != existing.parent:
        existing = existing.parent
    if existing.is_symlink() and not existing.exists():
        raise UserError(f"cannot write to {folder}: {existing} is a link to nothing")
    if not existing.is_dir():
        raise UserError(f"cannot write to {folder}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: no permission in {existing}; choose another with --out")


def check_writable_file(path: Path) -> None:
    """Refuses a file that could not be written or replaced; makes nothing.

    Raises:
        UserError: naming the file and the reason.
    """
    if path.is_dir():
        raise UserError(
            f"cannot write to {path}: it is a folder; name a file in it, such as {path / 'page.html'}"
        )
    check_writable_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Writes beside the target, then renames: a reader sees the old file or the new one, never half of one.

    Raises:
        UserError: if the file system refuses.
    """
    return write_together({path: content})[0]


def write_together(files: Mapping[Path, str | bytes], stale: Collection[Path] = ()) -> list[Path]:
    """Writes files that belong together; where one of them cannot be written, none is, and the old ones stay.

    Args:
        stale: files of an earlier writing that would disagree with these; they are removed.

    Raises:
        UserError: if the file system refuses.
    """
    temporary: dict[Path, str] = {}
    path = Path()
    try:
        for path, content in files.items():
            if path.is_dir():
                raise UserError(f"cannot write {path}: it is a folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            # mkstemp makes private files; a result is as readable as any other file of the user's.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary[path], 0o666 & ~mask)
        for path in stale:
            path.unlink(missing_ok=True)
        for path in files:
            os.replace(temporary[path], path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        for name in temporary.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return list(files)
