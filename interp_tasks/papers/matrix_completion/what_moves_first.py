"""Finds the quantity that moves first: the step at which each has reached a share of its total change.

For each quantity (the ``variant``) its value at every checkpoint, and at the last one's REF the steps at which it has
made 10%, 50% and 90% of its way for good, interpolated; ``baseline`` is that step of the drop metric, ``effect``
their difference: negative is before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import (
    DRAWS,
    ones_and_bootstrap_weights,
    percentile_interval,
    sums_and_counts,
)
from interp_tasks.measurement.loaded_checkpoints import (
    LoadedCheckpoint,
    checkpoints_by_run,
    path_of_run,
    resolve_refs,
)
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns
from interp_tasks.measurement.token_and_position_embeddings import Embeddings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.measurement.token_and_position_embeddings import Array

SHARES = (0.1, 0.5, 0.9)
VALUE, STEP = "value", "step at "
#: Quantity -> step -> ``[1 + draws]``: the value, then its resamples; ``[1]`` where there are none.
Curves = dict[str, dict[int, "Array"]]
NOTES = (
    "step at 50%: of the way from the plateau to the last checkpoint, made for good, interpolated between stored "
    "steps.",
    "baseline: that step of the drop metric. effect: value − baseline; negative is before the drop.",
    "Intervals: 95%, bootstrap over examples (of embeddings over values), the same resamples at all checkpoints; "
    "silhouettes have none. What other runs would give is not in them.",
)


@experiment(without=("tokens",))
def order(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """See which quantity moves first over the checkpoints of a run, and how long before the drop.

    Metrics, effect of ablation, embeddings, positions: the step at which each has made 10%, 50% and 90% of its way,
    from the plateau (the checkpoint nearest to the run's ``@pre``) to the last checkpoint.

    The metrics of the task; by how much uniform attention in all heads changes its drop metric; alignment of the token
    embeddings with the last checkpoint's (see ``embeddings``); silhouettes of position embeddings.

    Args:
        refs: REFs of checkpoints of one or several runs, such as ``RUN@all``; at least four of each.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.
    """
    from interp_tasks.checkpoints.checkpoint import load_model

    found = resolve_refs(refs, Examples.of(options))
    runs = checkpoints_by_run(found)
    for several in runs.values():
        if len(several) < 4:
            run = several[0].run_name or several[0].label
            raise UserError(f"{run}: {len(several)} checkpoints; order needs at least 4, such as {run}@all")
    plateaus = {run: step_nearest_to_pre(run, named) for run, named in runs.items()}
    # Of a mixture each part by itself.
    curves: dict[tuple[str, str], Curves] = {}
    ends: dict[str, Embeddings] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        run, part = path_of_run(subject), str(subject.labels["ref"]).removeprefix(subject.stored.label)
        own, last = curves.setdefault((run, part), {}), runs[run][-1]
        if run not in ends:
            ends[run] = Embeddings.of(load_model(last, options.get("device", "cpu")))
        rows = []
        for name, (kind, values) in quantities_with_resamples(subject, ends[run]).items():
            own.setdefault(name, {})[subject.stored.step] = values
            row = {"variant": name, "intervention": kind, "metric": VALUE, "engine": "naive"}
            rows.append({**row, **number_columns(values[0], percentile_interval(values[1:]))})
        if subject.stored.path == last.path:
            assert subject.task is not None
            rows += share_reached_rows(own, plateaus[run], subject.task.drop_metric.name)
        return [{**row, "n": len(subject.tokens)} for row in rows]

    config = {"refs": [one.label for one in found]}
    ordered = [one for several in runs.values() for one in several]
    result = measure("order", ordered, options, measure_checkpoint, config=config)
    return replace(result, notes=NOTES)


def step_nearest_to_pre(run: str, checkpoints: Sequence[ResolvedCheckpoint]) -> int:
    """Returns the chosen step that is nearest to the run's ``@pre``."""
    from interp_tasks.checkpoints.steps_around_drop import find_marks

    pre = find_marks(run, checkpoints[0].run_name)["pre"]
    return min((one.step for one in checkpoints), key=lambda step: abs(step - pre))


def quantities_with_resamples(subject: LoadedCheckpoint, last: Embeddings) -> dict[str, tuple[str, Array]]:
    """Returns by name the kind of each quantity and its ``[1 + draws]``.

    Args:
        last: the embeddings of the run's last checkpoint.
    """
    import numpy as np

    from circuits import ablate, heads
    from interp_tasks.papers.matrix_completion import embedding_geometry

    task = subject.task
    assert task is not None
    drop, metrics = task.drop_metric.name, metrics_with_resamples(subject)
    values = {name: ("metrics", each) for name, each in metrics.items()}
    edited = metrics_with_resamples(subject, ablate.uniform(heads("all", subject.model)))[drop]
    values[f"effect of ablation on {drop}"] = "ablation", edited - metrics[drop]
    tables, tokens = Embeddings.of(subject.model), task.token_values()
    axes = embedding_geometry.grid_sizes(task)
    if len(tokens) >= 4:
        weights = ones_and_bootstrap_weights(len(tokens), subject.seed)
        aligned = embedding_geometry.alignment_with_last(
            tables.rows_of_tokens(tokens), last.rows_of_tokens(tokens), weights
        )
        values["embedding alignment"] = "embeddings", aligned
    if axes and tables.positions is not None:
        apart = embedding_geometry.pairwise_distances(tables.positions[: math.prod(axes.values())])
        for axis, labels in embedding_geometry.cluster_labels(axes).items():
            found = np.array([embedding_geometry.silhouette(apart, labels)])
            values[f"silhouette of positions by {axis}"] = "positions", found
    return values


def metrics_with_resamples(subject: LoadedCheckpoint, *edits: Any) -> dict[str, Array]:
    """Returns the task's metrics under edits: Σsum / Σcount, then that of its resamples over examples."""
    import numpy as np

    from circuits import run
    from circuits.statistics import bootstrap_ratios, ratio

    task, batch = subject.task, subject.batch
    assert task is not None
    assert batch is not None
    pooled = {}
    for name, metric in task.metrics(run(subject.model, subject.tokens, *edits), batch).items():
        total, count = (np.asarray(part, dtype=float)[None] for part in sums_and_counts(metric))
        resampled = bootstrap_ratios(total, count, subject.seed, DRAWS)[:, 0]
        pooled[name] = np.concatenate([ratio(total.sum(1), count.sum(1)), resampled])
    return pooled


def share_reached_rows(curves: Curves, plateau: int, drop: str) -> Iterator[Row]:
    """Yields the step at which each quantity has reached a share of its total change, beside the drop metric's."""
    import numpy as np

    from interp_tasks.measurement.level_crossing_steps import lasting_crossing_steps

    of_drop: dict[float, Array] = {}
    for name in sorted(curves, key=lambda name: name != drop):
        at = sorted(curves[name])
        curve = np.stack([curves[name][step] for step in at], 1)
        first = at.index(plateau)
        # A quantity that was past a share on the plateau already has no step after it.
        for share in SHARES:
            crossings = lasting_crossing_steps(
                at[first:], curve[:, first:], share, curve[:, first], curve[:, -1]
            )
            of = of_drop.setdefault(share, crossings)
            gap = percentile_interval((crossings[: len(of)] - of[: len(crossings)])[1:])
            compared = () if name == drop else (of[0], gap)
            row = {"variant": name, "intervention": "of its way", "metric": f"{STEP}{share:.0%}"}
            row["engine"] = "naive"
            yield {**row, **number_columns(crossings[0], percentile_interval(crossings[1:]), *compared)}
