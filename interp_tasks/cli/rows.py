"""Small listings (checkpoints, tasks) as a table, JSON or CSV, without pandas."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from interp_tasks.cli.streams import write_data


def print_rows(
    rows: Sequence[Mapping[str, Any]], format: str, shown: Sequence[str], heading: Sequence[str] = ()
) -> None:
    """Prints dicts with the same keys: for people the columns ``shown``, for programs all of them.

    Args:
        heading: parts of the line above what people see; what all rows have in common comes after them.
    """
    if format == "json":
        write_data(json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n")
    elif format == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: plain(value) for key, value in row.items()} for row in rows)
        write_data(text.getvalue())
    else:
        from interp_tasks.cli.sheets import sheet_of
        from interp_tasks.cli.tables import print_sheet

        texts = [[plain(row[name]) for name in shown] for row in rows]
        right = [all(isinstance(row[name], (int, float)) for row in rows) for name in shown]
        print_sheet(sheet_of(shown, texts, right), [[list(heading)]])


def plain(value: Any) -> str:
    """Returns the text of a cell: lists joined, mappings as ``key value`` pairs, empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
