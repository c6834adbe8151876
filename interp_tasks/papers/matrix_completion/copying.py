"""Measures whether a model copies what stands at hidden entries, before and after the drop.

A row per checkpoint, input (the ``variant``) and metric. ``value`` takes for the right answer what stands in the
input (0 for MASK): its ``mse_masked`` is L'_mask, the mean over hidden entries of (output − m)². ``baseline`` takes
the matrix itself, so that a negative ``effect`` says that the output is nearer to a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import paired
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import DEFAULT_SAMPLES, LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row
from interp_tasks.papers.matrix_completion.comparison import forward

if TYPE_CHECKING:
    from typing_extensions import Unpack


@experiment("matrix", judged_by_task=True)
def copying(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """Put another token at hidden entries, and see whether the output there copies it.

    Inputs are the task's own matrices, and others of full rank that nobody could complete.

    Gopalani, Lubana, Hu 2024, section 3.1.1 and table 1.

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples (512 in the paper), seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError: in one line; a UserError for a task that declares no ``copying_inputs``.
    """
    check_has_task("copying", options)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint on inputs whose hidden entries hold a token, against token and truth."""
        task = subject.task
        assert task is not None
        declare = getattr(task, "copying_inputs", None)
        if declare is None:
            raise UserError(
                f"task {task.name!r} declares no inputs to copy: give it copying_inputs(n, seed, split)"
            )
        samples = options.get("samples") or DEFAULT_SAMPLES
        rows = []
        for name, (copied, original) in declare(samples, subject.seed, subject.labels["split"]).items():
            output = forward(subject.model, copied.tokens)
            compared = paired(task.metrics(output, copied), task.metrics(output, original), subject.seed)
            rows += [{**row, "variant": name, "intervention": "token at hidden entries"} for row in compared]
        return rows

    result = measure("copying", refs, options, measure_checkpoint, config={})
    notes = (
        "value: the error where a copy of the input is right, 0 in place of MASK. baseline: where the matrix is.",
        "Intervals: 95%, bootstrap over examples; effects are paired.",
    )
    return replace(result, notes=notes)
