"""The error that says what is wrong with a task, a model or a batch."""

from __future__ import annotations


class TaskError(ValueError):
    """A task, model or batch that cannot be; the message is one line that says what would be right."""
