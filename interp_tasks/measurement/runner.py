"""Goes over checkpoints, measures variants beside the unedited model, and makes one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    Refs,
    named_if_several,
    resolve_refs,
    sizes_of,
    subjects,
)
from interp_tasks.measurement.table import RATIO, holm_note, tidy

if TYPE_CHECKING:
    import pandas

INTERVALS = "Intervals: 95%, bootstrap over examples; effects are paired with the unedited model."


@dataclass(frozen=True)
class Measured:
    """The rows that were measured at one checkpoint.

    Attributes:
        frame: rows of ``circuits``' table, with the column ``intervention`` as people read it.
        interventions: what each variant did, JSON.
    """

    frame: pandas.DataFrame
    interventions: Mapping[str, Any]


def measure(
    experiment: str,
    refs: Refs,
    options: Options,
    measure_checkpoint: Callable[[LoadedCheckpoint], Measured],
    *,
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    check_sizes: Callable[[Any, str], object] | None = None,
    check: Callable[[LoadedCheckpoint], object] | None = None,
) -> Result:
    """Measures one checkpoint after the other on the same examples.

    Args:
        config: is recorded with the rows.
        check_sizes: refuses what a model of these sizes, called so, lacks, before anything slow is imported.
        check: refuses what cannot be done with a checkpoint's examples; called on all before the first is loaded.
    """
    examples = Examples.of(options)
    found = resolve_refs(refs, examples)
    if check_sizes is not None:
        for each in found:
            with named_if_several(each.label, len(found)):
                check_sizes(sizes_of(each), each.ref)

    import pandas

    from circuits.statistics import holm

    frames: list[pandas.DataFrame] = []
    done: list[dict[str, Any]] = []
    own_metrics: dict[str, None] = {}
    for subject in subjects(found, examples, check):
        if subject.task is not None:
            own_metrics.setdefault(subject.task.drop_metric.name)
        measured = measure_checkpoint(subject)
        frames.append(measured.frame.assign(experiment=experiment, n_runs=1, **subject.labels))
        same = [group for group in done if group["interventions"] == measured.interventions]
        if not same:
            same = [{"refs": [], "interventions": measured.interventions}]
            done += same
        same[0]["refs"].append(subject.labels["ref"])
    recorded = {
        "refs": [each.label for each in found],
        "checkpoints": [each.ref for each in found],
        **config,
        **examples.describe(),
        "metrics of the tasks": list(own_metrics),
        "done": done,
    }
    table = pandas.concat(frames, ignore_index=True)
    tested = []
    if "p_value" in table:
        # The table is one family: whoever reads it may pick the best row of any checkpoint and metric.
        table["p_adjusted"] = holm(table["p_value"].to_numpy(dtype=float))
        tested = [holm_note(table)]
    return Result(experiment, tidy(table), recorded, (INTERVALS, *tested, *notes))


def run_sweep(
    subject: LoadedCheckpoint,
    variants: Mapping[str, Any],
    names: str | Mapping[str, str],
    metric: Callable[..., Any] | None = None,
    batch: Any = None,
    ratios: bool = False,
) -> Measured:
    """Returns a sweep over variants of one checkpoint, judged by its task's metrics.

    Args:
        names: what the table calls the interventions, or each variant's.
        metric, batch: judge by this instead, as ``circuits.sweep`` takes them.
        ratios: after each row one of value / baseline, paired; its metric is called ``NAME ratio``.
    """
    from circuits import sweep

    task = subject.task
    if metric is None and task is not None:
        metric, batch = task.metrics, subject.batch
    result = sweep(
        subject.model,
        subject.tokens,
        variants,
        metric=metric,
        batch=batch,
        positions=None if task is None else task.read_positions,
        seed=subject.seed,
    )
    called = names if isinstance(names, str) else result.frame["variant"].map(dict(names))
    frame = result.frame.assign(intervention=called)
    return Measured(with_ratios(frame) if ratios else frame, result.interventions)


def with_ratios(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Adds below each row its value in multiples of the baseline, which is then 1; it is not tested again."""
    import pandas

    low, high = frame["ratio_ci_low"], frame["ratio_ci_high"]
    of_ratios = frame.assign(
        metric=frame["metric"] + RATIO,
        value=frame["ratio"],
        value_ci_low=low,
        value_ci_high=high,
        baseline=1.0,
        effect=frame["ratio"] - 1,
        effect_ci_low=low - 1,
        effect_ci_high=high - 1,
        p_value=float("nan"),
        p_adjusted=float("nan"),
    )
    return pandas.concat([frame, of_ratios]).sort_index(kind="stable").reset_index(drop=True)
