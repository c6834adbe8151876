"""What a report is of: checkpoints of a run with its log, each measured: metrics, effects of heads, attention maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import ResolvedCheckpoint, find_marks, resolve
from interp_tasks.checkpoints.run_files import METRICS_FILE, RUN_FILE, is_checkpoint, log_file
from interp_tasks.errors import UserError
from interp_tasks.measurement.head_edits import HeadEdit, by_layer
from interp_tasks.measurement.run_logs import Curve, Run, read_one
from interp_tasks.measurement.runner import run_sweep
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, Progress, subjects

if TYPE_CHECKING:
    import pandas

    from interp_tasks.measurement.embeddings import Array
    from tasks import Task

#: What is done to heads: the edit the matrix-completion paper describes, the one its code makes, and their removal.
MODES = ("uniform", "mean_pattern", "zero")
#: Metrics that are shown; the tables of the experiments have all.
MAX_METRICS = 3
#: What the effect of all heads is called.
ALL = "all"


@dataclass(frozen=True)
class Source:
    """Checkpoints of one run, by ascending step.

    Attributes:
        name: the run as one types it, or the folder of a checkpoint on its own.
        run: its log; ``None`` where it has none, for the reason in ``missing``.
        curve: the logged metric whose drop is the task's.
        marks: pre, onset, end and post of its drop; empty where there is none, for the reason in ``missing``.
        missing: what there is not, in words.
    """

    name: str
    checkpoints: Sequence[ResolvedCheckpoint]
    run: Run | None = None
    curve: Curve | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def refs(self) -> list[str]:
        return [checkpoint.ref for checkpoint in self.checkpoints]


def read_source(ref: str) -> Source:
    """Returns the checkpoints that a run or a REF names: of a run without ``@`` all.

    Raises:
        UserError: if it names none, or checkpoints of several runs; for a mangled log.
    """
    is_whole = "@" not in ref and not is_checkpoint(Path(ref))
    checkpoints = sorted(resolve(f"{ref}@all" if is_whole else ref), key=lambda each: each.step)
    runs = list(dict.fromkeys(str(each.run_path or each.path) for each in checkpoints))
    if len(runs) > 1:
        raise UserError(
            f"{ref} names {len(runs)} runs ({runs[0]} ... {runs[-1]}): a report is of one, and --compare puts "
            "another beside it"
        )
    path = checkpoints[0].run_path
    if path is None:
        return Source(ref, checkpoints, missing=("A checkpoint on its own: no training curve, no drop.",))
    name = checkpoints[0].run_name or path.as_posix()
    for file in (RUN_FILE, METRICS_FILE):
        if not log_file(path, file).is_file():
            return Source(name, checkpoints, missing=(f"No {file}: no training curve, no drop.",))
    run, curve, marks = read_one(name, path), None, {}
    missing: tuple[str, ...] = ()
    try:
        curve = run.curve(run.drop_metric)
        marks = find_marks(path, name)
    except UserError as error:
        missing = (f"No {'training curve' if curve is None else 'marks around a drop'}: {error}.",)
    return Source(name, checkpoints, run, curve, marks, missing)


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint.

    Attributes:
        unedited: a row per metric, with its interval.
        effects: tidy rows: each head alone, each layer's heads, all heads, under each of ``MODES``.
        maps: mean attention ``[layer head query key]``.
    """

    step: int
    unedited: pandas.DataFrame
    effects: pandas.DataFrame
    maps: Array


@dataclass
class View:
    """A run's checkpoints on one task (of a mixture on one part of it, named), in the order of their steps.

    Attributes:
        model: its config.
        metrics: those shown, the task's own drop metric first where it is among them.
    """

    source: Source
    part: str
    task: Task | None
    model: Any = None
    metrics: tuple[str, ...] = ()
    snapshots: list[Snapshot] = field(default_factory=list)

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


def counted(views: Sequence[View]) -> str:
    """Returns the examples that effects are over, with their number where all are over as many."""
    counts = {int(count) for view in views for count in view.effects()["n"].dropna()}
    return f"{min(counts):,} examples" if len(counts) == 1 else "examples"


def measured_views(source: Source, options: Options, progress: Progress | None = None) -> list[View]:
    """Measures every checkpoint of a source on the same examples; one view, or one for each part of a mixture."""
    views: dict[str, View] = {}
    for subject in subjects(source.refs, replace(Examples.of(options), progress=progress)):
        part = str(subject.labels["ref"]).removeprefix(subject.stored.label).strip(" ()")
        view = views.setdefault(part, View(source, part, subject.task, subject.model.cfg))
        view.snapshots.append(snapshot(subject, view))
    return list(views.values())


def snapshot(subject: LoadedCheckpoint, view: View) -> Snapshot:
    """Measures one checkpoint for the report: metrics, effects of heads, patterns."""
    import pandas

    from circuits import patterns
    from interp_tasks.experiments._curve import at_checkpoint

    rows = list(at_checkpoint(view.source.name, subject)) if subject.task is not None else []
    if view.part:
        rows = [{**row, "metric": str(row["metric"]).removesuffix(f" ({view.part})")} for row in rows]
    effects = effects_of(subject, view, [str(row["metric"]) for row in rows])
    # Without a task, lines begin at the unedited output's distance from itself.
    unedited = rows or [
        {"step": subject.checkpoint.step, "metric": metric, "value": float(part["baseline"].iloc[0])}
        for metric, part in effects.groupby("metric", sort=False)
    ]
    maps = patterns.attention(subject.model, subject.tokens).mean.numpy()
    return Snapshot(subject.checkpoint.step, pandas.DataFrame(unedited), effects, maps)


def effects_of(subject: LoadedCheckpoint, view: View, measured: Sequence[str]) -> pandas.DataFrame:
    """Returns every edit of every choice of heads, in one sweep."""
    import torch

    from circuits import heads

    every = heads("all", subject.model)
    chosen = {str(head): (head,) for head in every} | by_layer(every) | {ALL: every}
    variants = {
        (mode, label): edit
        for mode in MODES
        for label, edit in HeadEdit.parse(mode).on(subject, chosen).items()
    }
    task, metric = subject.task, None
    if task is not None:
        assert subject.batch is not None
        with torch.no_grad():  # exact accuracies are no metrics of an output
            known = task.metrics(subject.model(subject.tokens[:1]), subject.batch[:1])
        names = [name for name in measured if name in known]
        view.metrics = view.metrics or shown_metrics(names, task.drop_metric.name)

        def metric(output: Any, batch: Any) -> Mapping[str, Any]:
            metrics = task.metrics(output, batch)
            return {name: metrics[name] for name in view.metrics}

    edits = {f"{mode} {label}": edit for (mode, label), edit in variants.items()}
    modes = {f"{mode} {label}": mode for mode, label in variants}
    frame = run_sweep(subject, edits, modes, metric, subject.batch).frame
    view.metrics = view.metrics or shown_metrics(frame["metric"], "")
    labels = frame["variant"].map({f"{mode} {label}": label for mode, label in variants})
    return frame.assign(variant=labels, step=subject.checkpoint.step)


def shown_metrics(names: Iterable[str], first: str) -> tuple[str, ...]:
    """Returns at most ``MAX_METRICS`` metrics, ``first`` first, without those of parts of others (``loss_7``)."""
    every = list(dict.fromkeys(map(str, names)))
    wholes = [name for name in every if not any(name.startswith((f"{of}_", f"{of} (")) for of in every)]
    return tuple(sorted(wholes, key=lambda name: name != first)[:MAX_METRICS])
