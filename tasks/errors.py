"""The error for invalid tasks, models and batches."""

from __future__ import annotations


class TaskError(ValueError):
    """An invalid task, model or batch; the message is one line that says what would be valid."""
