"""Compares decoding from a model's own answers with predictions from the true ones.

Rows of ``greedy``, whose ``baseline`` is ``teacher forcing``, and of that by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORCED, GREEDY = "teacher forcing", "greedy"


@experiment("matrix", judged_by_task=True)
def decoding(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """See what a language model of a task answers when it goes on from its own answers (greedy decoding).

    Beside the same with the true tokens before each answer (teacher forcing).

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that decodes nothing.
    """
    check_has_task("decoding", options)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint with the right entries before each answer, and with its own answers before it."""
        import numpy as np
        import torch

        from circuits.statistics import summarise
        from interp_tasks.measurement.paired import read

        task, batch = subject.task, subject.batch
        assert task is not None
        decode = getattr(task, "decoded", None)
        if decode is None:
            raise UserError(f"task {task.name!r} decodes nothing: it has no method decoded(model, batch)")
        with torch.no_grad():
            forced = task.metrics(subject.model(subject.tokens), batch)  # type: ignore[arg-type]
        greedy = decode(subject.model, batch)
        rows: list[Row] = []
        for name, metric in forced.items():
            pairs = [read(metric), *([read(greedy[name])] if name in greedy else [])]
            sums, counts = (np.stack([one[part] for one in pairs]) for part in (0, 1))
            summary = summarise(sums, counts, subject.seed, 1000, 1000, 0.95)
            for index, variant in enumerate((FORCED, GREEDY)[: len(pairs)]):
                row: Row = {"variant": variant, "intervention": variant, "metric": name, "engine": "naive"}
                ends, gap = (
                    (low[index], high[index])
                    for low, high in (
                        (summary.value_ci_low, summary.value_ci_high),
                        (summary.effect_ci_low, summary.effect_ci_high),
                    )
                )
                values = numbers(summary.value[index], ends, *((summary.value[0], gap) if index else ()))
                rows.append({**row, **values, "n": len(batch)})  # type: ignore[arg-type]
        return rows

    notes = (
        "Intervals: 95%, bootstrap over examples; effects are paired.",
        "baseline: of greedy decoding the same with the true tokens before each answer.",
    )
    return replace(measure("decoding", refs, options, measure_checkpoint, config={}), notes=notes)
