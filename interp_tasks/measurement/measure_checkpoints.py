"""Measures checkpoints one after the other, and sweeps over variants of each, into one tidy table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, Refs, subjects
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import RATIO, Result, Row, add_holm_adjustment, tidy_frame

if TYPE_CHECKING:
    import pandas
INTERVALS = "Intervals: 95%, bootstrap over examples; effects are paired with the unedited model."


@dataclass(frozen=True)
class MeasuredRows:
    """The rows of a sweep at one checkpoint.

    Attributes:
        frame: rows of ``circuits``' table, with the column ``intervention`` as people read it.
        interventions: what each variant did, JSON.
    """

    frame: pandas.DataFrame
    interventions: Mapping[str, Any] = field(default_factory=dict)


def measure(
    experiment: str,
    refs: Refs,
    options: Options,
    measure_checkpoint: Callable[[LoadedCheckpoint], MeasuredRows | pandas.DataFrame | Sequence[Row]],
    *,
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    check_sizes: Callable[[Any, str], object] | None = None,
    check: Callable[[LoadedCheckpoint], object] | None = None,
    later: Callable[[], Mapping[str, Sequence[Row]]] | None = None,
) -> Result:
    """Measures one checkpoint after the other on the same examples.

    What a row says of its split or number of runs stands; else these are the checkpoint's.

    Args:
        config: is recorded with the rows.
        check_sizes: refuses what a model of these sizes, called so, lacks, before anything slow is imported.
        check: refuses what cannot be done with a checkpoint's examples; called on all before the first is loaded.
        later: returns by REF rows that take all checkpoints; they stand below the others of that REF.
    """
    examples, found = Examples.of(options), dict[str, str]()
    frames: dict[str, list[pandas.DataFrame]] = {}
    labels: dict[str, Mapping[str, Any]] = {}
    done: list[dict[str, Any]] = []
    own_metrics: dict[str, None] = {}
    for subject in subjects(refs, examples, check, check_sizes):
        found[subject.stored.ref] = subject.stored.label
        if subject.task is not None:
            own_metrics.setdefault(subject.task.drop_metric.name)
        measured = measure_checkpoint(subject)
        rows, interventions = (
            (measured.frame, measured.interventions) if isinstance(measured, MeasuredRows) else (measured, {})
        )
        ref = str(subject.labels["ref"])
        labels[ref] = {"experiment": experiment, "n_runs": 1, **subject.labels}
        frames.setdefault(ref, []).append(tidy_frame(rows, **labels[ref]))
        same = next((group for group in done if group["interventions"] == interventions), None)
        if same is None:
            done.append(same := {"refs": [], "interventions": interventions})
        same["refs"].append(ref)
    for ref, rows in (later() if later is not None else {}).items():
        frames[ref].append(tidy_frame(rows, **labels[ref]))
    import pandas

    named = {"refs": list(found.values()), "checkpoints": list(found)}
    asked = {**named, **config, **examples.describe()}
    recorded = {**asked, "metrics of the tasks": list(own_metrics), "done": done}
    table = pandas.concat([frame for parts in frames.values() for frame in parts], ignore_index=True)
    table, said = add_holm_adjustment(table, (INTERVALS, *notes))
    return Result(experiment, table, recorded, said)


def run_sweep(
    subject: LoadedCheckpoint,
    variants: Mapping[str, Any],
    names: str | Mapping[str, str],
    metric: Callable[..., Any] | None = None,
    batch: Any = None,
    ratios: bool = False,
) -> MeasuredRows:
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
    return MeasuredRows(add_ratio_rows(frame) if ratios else frame, result.interventions)


def add_ratio_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Adds below each row its value in multiples of the baseline, which is then 1; it is not tested again."""
    import pandas

    ends = ("", "_ci_low", "_ci_high")
    values = {f"value{end}": frame[f"ratio{end}"] for end in ends} | {"baseline": 1.0}
    effects = {f"effect{end}": frame[f"ratio{end}"] - 1 for end in ends}
    untested = dict.fromkeys(("p_value", "p_adjusted"), float("nan"))
    ratios = frame.assign(metric=frame["metric"] + RATIO, **values, **effects, **untested)
    return pandas.concat([frame, ratios]).sort_index(kind="stable").reset_index(drop=True)
