"""Says which metrics of a task a circuit is measured by and ranked by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._circuit.settings import Search, refused_metric
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    from tasks import Metric, Task


def metrics_of(subject: LoadedCheckpoint, search: Search) -> tuple[str | None, str | None]:
    """Returns the metric that faithfulness is of, and one with a gradient that ranks; ``None`` without a task.

    By default the first is the task's own; it also ranks, unless it has no gradient, as an accuracy; then the first
    that has one does. Beside a circuit that is given none ranks.

    Raises:
        UserError: for a metric that the task does not have, or that cannot rank.
    """
    if subject.task is None:
        return None, None
    import torch

    assert subject.batch is not None
    with torch.no_grad():
        output = subject.model(subject.tokens[:2])
    values = subject.task.metrics(output.clone().requires_grad_(), subject.batch[:2])
    own = subject.task.drop_metric.name
    metric = search.metric or (own if own in values else next(iter(values)))
    if metric not in values:
        raise refused_metric("--metric", metric, list(values))
    if search.keep is not None:
        return metric, None
    smooth = [name for name, value in values.items() if has_gradient(value)]
    if search.rank_by is not None and search.rank_by not in values:
        raise refused_metric("--rank-by", search.rank_by, list(values))
    if search.rank_by is not None and search.rank_by not in smooth:
        raise UserError(
            f"--rank-by {search.rank_by}: it has no gradient; of {subject.task.name} there is {', '.join(smooth)}"
        )
    if not smooth:
        raise UserError(f"{subject.name}: no metric of task {subject.task.name} has a gradient to rank by")
    return metric, search.rank_by or (metric if metric in smooth else smooth[0])


def has_gradient(value: Metric) -> bool:
    """Tells whether a metric can rank: effects are estimated from its gradient."""
    return bool((value[0] if isinstance(value, tuple) else value).requires_grad)


def single_metric(task: Task | None, name: str) -> Callable[[Any, Any], dict[str, Metric]]:
    """Returns one metric of a task, as ``circuits`` takes it."""
    assert task is not None

    def metric(output: Any, batch: Any) -> dict[str, Metric]:
        return {name: task.metrics(output, batch)[name]}

    return metric
