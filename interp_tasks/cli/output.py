"""Where a result goes: a table, JSON or CSV on stdout, files under ``--out``, a page with ``--plot``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interp_tasks.cli.progress import note
from interp_tasks.reporting import check_writable_file, check_writable_folder

if TYPE_CHECKING:
    from interp_tasks.experiments import Result

FORMATS = ("table", "json", "csv")


def page_path(name: str, out: Path | None) -> Path:
    return (out or Path()) / f"{name}.html"


def check_targets(name: str, out: Path | None, plot: bool) -> None:
    """Refuse, before slow work, what could not be written after it."""
    if out is not None:
        check_writable_folder(out)
    if plot:
        check_writable_file(page_path(name, out))


def print_as(result: Result, format: str) -> None:
    if format == "json":
        sys.stdout.write(result.to_json())
    elif format == "csv":
        sys.stdout.write(result.to_csv())
    else:
        from interp_tasks.cli.tables import print_result
        from interp_tasks.experiments.columns import shown_columns, shown_rows

        rows = shown_rows(result.frame)
        print_result(rows, shown_columns(rows), result.notes)


def emit(result: Result, format: str, out: Path | None, plot: bool, quiet: bool) -> None:
    """Files first, so that a closed pipe cannot lose them; then stdout."""
    written: list[Path] = []
    if out is not None:
        written += result.write(out)
    if plot:
        written.append(result.page().write(page_path(result.experiment, out)))
    print_as(result, format)
    if written:
        sys.stdout.flush()
        note(f"wrote {', '.join(map(str, written))}", quiet)
