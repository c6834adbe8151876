"""Divides the examples of a checkpoint into the half that finds a circuit and the half that tests it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import LoadedCheckpoint, PendingCheckpoint

if TYPE_CHECKING:
    from tasks import Batch

#: The source that a task declares for this where it can: other values, all else alike.
VALUES = "values"
#: Another example of the batch.
RESAMPLE = "resample"


@dataclass(frozen=True)
class Half:
    """Half of the examples, each with its source.

    Attributes:
        base, source: ``[n pos]``.
        batch: the task's examples of ``base``.
    """

    base: Any
    source: Any
    batch: Batch | None


def halves(subject: LoadedCheckpoint, source: str | None) -> tuple[Half, Half]:
    """Returns the half that finds and the half that tests, each with a source of its own examples."""
    n = len(subject.tokens) // 2
    lent = sources(subject, source)
    found = []
    for at, rows in enumerate((slice(0, n), slice(n, len(subject.tokens)))):
        batch = None if subject.batch is None else subject.batch[rows]
        tokens = subject.tokens[rows]
        if lent is None:
            from circuits.interventions.replacements import derangement

            given = tokens[derangement(len(tokens), subject.seed + at).to(tokens.device)]
        else:
            given = lent.tokens[rows]
        found.append(Half(tokens, given, batch))
    return found[0], found[1]


def sources(subject: LoadedCheckpoint | PendingCheckpoint, source: str | None) -> Batch | None:
    """Returns the inputs that edges outside a circuit hear, row by row; ``None`` for another example of the batch.

    Args:
        source: ``"resample"``, a name that the task declares in ``attention_moves(batch, seed)`` or
            ``patch_sources(batch)``; ``None``: ``"values"`` where it declares that, else ``"resample"``.

    Raises:
        UserError: for a name that it does not declare.
    """
    if source == RESAMPLE or (source is None and subject.task is None):
        return None
    task: Any = subject.task
    declared: dict[str, Batch] = {}
    if hasattr(task, "attention_moves"):
        declared |= task.attention_moves(subject.batch, subject.seed)
    if hasattr(task, "patch_sources"):
        declared |= task.patch_sources(subject.batch)
    name = VALUES if source is None else source
    if name in declared:
        return declared[name].to(str(subject.tokens.device))
    if source is None:
        return None
    if task is None:
        raise UserError(f"--source {source}: tokens of your own have no task to name it; write {RESAMPLE}")
    has = f"declares {', '.join(declared)}" if declared else "declares none"
    raise UserError(
        f"--source {source}: no such source of task {task.name}, which {has}; write one of those or {RESAMPLE}"
    )
