"""Measures each checkpoint for a report: metrics, effects of heads, attention maps, embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.heads.edits import HeadEdit, by_layer
from interp_tasks.measurement.runner import swept
from interp_tasks.measurement.subjects import Examples, Options, Progress, Subject, subjects

if TYPE_CHECKING:
    import pandas

    from interp_tasks.measurement.embeddings.geometry import Array
    from interp_tasks.measurement.embeddings.tables import Table
    from interp_tasks.report.source import Source
    from tasks import Task

#: What is done to heads: the edit the matrix-completion paper describes, the one its code makes, and none left.
MODES = ("uniform", "mean_pattern", "zero")
#: Metrics that are shown; the tables of the experiments have all.
MAX_METRICS = 3
#: What the effect of all heads is called.
ALL = "all"


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint.

    Attributes:
        unedited: a row per metric, with its interval.
        effects: tidy rows: each head alone, each layer's heads, all heads, under each of ``MODES``.
        maps: mean attention ``[layer head query key]``.
        tables: embeddings of tokens that the task uses.
        positions: ``[position d]``, those in use; ``None`` without a table.
    """

    step: int
    unedited: pandas.DataFrame
    effects: pandas.DataFrame
    maps: Array
    tables: Sequence[Table]
    positions: Array | None


@dataclass
class View:
    """A run's checkpoints on one task (of a mixture on one part of it, named), in the order of their steps.

    Attributes:
        at: of each step of the slider, the index of the checkpoint shown.
        metrics: those shown, the task's own drop metric first where it is among them.
    """

    source: Source
    part: str
    task: Task | None
    model: Any = None
    metrics: tuple[str, ...] = ()
    snapshots: list[Snapshot] = field(default_factory=list)
    at: Sequence[int] = ()
    beside: bool = False

    @property
    def name(self) -> str:
        return f"{self.source.name} ({self.part})" if self.part else self.source.name

    @property
    def steps(self) -> list[int]:
        return [snapshot.step for snapshot in self.snapshots]

    def effects(self) -> pandas.DataFrame:
        """Returns the rows of all checkpoints."""
        import pandas

        return pandas.concat([snapshot.effects for snapshot in self.snapshots], ignore_index=True)

    def unedited(self) -> pandas.DataFrame:
        import pandas

        return pandas.concat([snapshot.unedited for snapshot in self.snapshots], ignore_index=True)


def look(source: Source, options: Options, progress: Progress | None = None) -> list[View]:
    """Measures every checkpoint of a source on the same examples; one view, or one for each part of a mixture."""
    views: dict[str, View] = {}
    examples = Examples.of(options)
    for subject in subjects(source.refs, examples, options.get("device", "cpu"), progress):
        part = str(subject.labels["ref"]).removeprefix(subject.checkpoint.ref).strip(" ()")
        view = views.setdefault(part, View(source, part, subject.task))
        view.snapshots.append(snapshot(subject, view))
        view.model = subject.model.cfg
    return list(views.values())


def snapshot(subject: Subject, view: View) -> Snapshot:
    import pandas

    from circuits import patterns
    from interp_tasks.experiments.curve.measure import at_checkpoint
    from interp_tasks.measurement.embeddings.tables import Table, Tables, tables_of

    rows = list(at_checkpoint(view.source.name, subject)) if subject.task is not None else []
    if view.part:
        rows = [{**row, "metric": str(row["metric"]).removesuffix(f" ({view.part})")} for row in rows]
    effects = effects_of(subject, view, [str(row["metric"]) for row in rows])
    tables = Tables.of(subject.model)
    positions = None if tables.positions is None else tables.positions[: subject.tokens.shape[1]]
    return Snapshot(
        subject.checkpoint.step,
        pandas.DataFrame(rows or unedited_distances(effects)),
        effects,
        patterns.attention(subject.model, subject.tokens).mean.numpy(),
        [Table("W_E", tables.tokens, None)] if subject.task is None else tables_of(subject.task, tables),
        positions,
    )


def effects_of(subject: Subject, view: View, measured: Sequence[str]) -> pandas.DataFrame:
    """Returns every edit of every choice of heads, in one sweep."""
    from circuits import heads

    every = heads("all", subject.model)
    chosen = {str(head): (head,) for head in every} | by_layer(every) | {ALL: every}
    variants: dict[str, Any] = {}
    called: dict[str, tuple[str, str]] = {}
    for mode in MODES:
        for label, edit in HeadEdit.read(mode, None, "all").on(subject, chosen).items():
            variants[f"{mode} {label}"] = edit
            called[f"{mode} {label}"] = (mode, label)
    task, metric = subject.task, None
    if task is not None:
        known = named_metrics(task, subject)
        view.metrics = view.metrics or shown_metrics(
            [name for name in measured if name in known], task.drop_metric.name
        )

        def metric(output: Any, batch: Any) -> Mapping[str, Any]:
            metrics = task.metrics(output, batch)
            return {name: metrics[name] for name in view.metrics}

    frame = swept(
        subject, variants, {name: mode for name, (mode, _) in called.items()}, metric, subject.batch
    ).frame
    view.metrics = view.metrics or shown_metrics(frame["metric"], "")
    labels = frame["variant"].map({name: label for name, (_, label) in called.items()})
    return frame.assign(variant=labels, step=subject.checkpoint.step)


def named_metrics(task: Task, subject: Subject) -> set[str]:
    """Returns the metrics that a task has of an output, without its exact accuracies."""
    import torch

    assert subject.batch is not None
    with torch.no_grad():
        return set(task.metrics(subject.model(subject.tokens[:1]), subject.batch[:1]))


def shown_metrics(names: Iterable[str], first: str) -> tuple[str, ...]:
    """Returns at most ``MAX_METRICS`` metrics, ``first`` first, without those of parts of others (``loss_7``)."""
    every = list(dict.fromkeys(map(str, names)))
    wholes = [name for name in every if not any(is_part(name, of) for of in every)]
    return tuple(sorted(wholes, key=lambda name: name != first)[:MAX_METRICS])


def is_part(name: str, of: str) -> bool:
    return name.startswith((f"{of}_", f"{of} ("))


def unedited_distances(effects: pandas.DataFrame) -> list[dict[str, Any]]:
    """Returns the unedited output's distance from itself, at which lines begin where there is no task."""
    return [
        {"step": effects["step"].iloc[0], "metric": metric, "value": float(part["baseline"].iloc[0])}
        for metric, part in effects.groupby("metric", sort=False)
    ]
