"""The check, before slow work, that a file can be written."""

from __future__ import annotations

import os
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
