"""Lays out for readers which answer has what: a row per tensor or removal and answer, controls in brackets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas

SHARE, UNIQUE, ADJUSTED = "share of variance", "share beyond the other answers", "share less chance"
TOGETHER = "all answers"
SERVING, BEST, SEVERAL, SPREAD, SPREAD_OF_ALL = (
    "neurons serving it",
    "neurons serving it most",
    "neurons serving several",
    "answers per neuron",
    "answers per neuron, of all",
)
DIGIT, DIGITS, ANSWER, OTHER_FORMS, NEURONS = ("digit", "digits", "answer", "other forms", "neurons")
ACCURACY, LOSS = "accuracy of ", "loss of "
OWN, OTHERS, SELECTIVE = "damage to itself", "damage to the others", "damage to itself minus the others"
SIZE = "taken away"
WITHOUT, CONTROL = "without ", "control of "

#: Head of the column by what a row is about (nothing: of any) and its metric; the format of its numbers.
SHOWN: Mapping[tuple[str, str], tuple[str, str]] = {
    (DIGIT, SHARE): ("digits", ".3f"),
    (DIGITS, SHARE): ("digits", ".3f"),
    (ANSWER, SHARE): ("answer", ".3f"),
    (OTHER_FORMS, SHARE): ("other forms", ".3f"),
    ("", UNIQUE): ("beyond", ".3f"),
    ("", SERVING): ("neurons", ".0f"),
    ("", BEST): ("most", ".0f"),
    ("", SEVERAL): ("several", ".0f"),
    ("", SIZE): ("taken", ".0f"),
    ("", OWN): ("itself", ".3f"),
    ("", OTHERS): ("the others", ".3f"),
}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of an answer's measures in one tensor; matrices of accuracies are in the files alone."""
    import pandas

    rows: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for row in frame.to_dict("records"):
        part, divided, tensor = row["intervention"].partition(": ")
        key = (part if divided and part != NEURONS else "", row["metric"])
        head, digits = SHOWN.get(key, SHOWN.get(("", row["metric"]), ("", "")))
        if not head:
            continue
        tensor_name = tensor if divided else shortened(part)
        table_row = rows.setdefault((row["ref"], tensor_name, row["variant"]), {**row, "where": tensor_name})
        control = "" if math.isnan(row["baseline"]) else f" ({row['baseline']:{digits}})"
        table_row[head] = "" if math.isnan(row["value"]) else f"{row['value']:{digits}}{control}"
    return pandas.DataFrame(list(rows.values()))


def shortened(removal: str) -> str:
    """Shortens ``neurons at mlp_post.0`` to ``mlp_post.0 − neurons``."""
    what, _, where = removal.partition(" at ")
    return f"{where} − {what.replace('waves of the ', '')}"


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; only those that some row has."""
    heads = dict.fromkeys(head for head, _ in SHOWN.values())
    columns = [Column("tensor", "where"), Column("q", "variant")]
    return columns + [Column(head, head, text(head)) for head in heads if head in frame]


def text(head: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: row[head] if isinstance(row[head], str) else ""
