"""Files that appear whole or not at all, and the check, before slow work, that they can appear."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from interp_tasks.errors import UserError


def check_writable_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to; makes nothing.

    Raises:
        UserError: naming the folder and the reason.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"cannot write to {folder}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: no permission in {existing}; choose another with --out")


def check_writable_file(path: Path) -> None:
    """Refuse a file that could not be written or replaced; makes nothing.

    Raises:
        UserError: naming the file and the reason.
    """
    if path.is_dir():
        raise UserError(
            f"cannot write to {path}: it is a folder; name a file in it, such as {path / 'page.html'}"
        )
    check_writable_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one.

    Raises:
        UserError: if the file system refuses.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes private files; a result is as readable as any other file of the user's.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return path
