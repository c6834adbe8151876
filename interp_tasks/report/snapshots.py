"""Measures each checkpoint for a report: metrics, effects of heads, attention maps, a circuit if asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.head_edits import HeadEdit, by_layer
from interp_tasks.measurement.runner import run_sweep
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, Progress, subjects

if TYPE_CHECKING:
    import pandas

    from interp_tasks.experiments._circuit.search import FoundCircuit
    from interp_tasks.measurement.embeddings import Array
    from interp_tasks.report.source import Source
    from tasks import Task

#: What is done to heads: the edit the matrix-completion paper describes, the one its code makes, and none left.
MODES = ("uniform", "mean_pattern", "zero")
#: The edit that stands for a head's removal.
REMOVED = "zero"
#: Metrics that are shown; the tables of the experiments have all.
MAX_METRICS = 3
#: Examples at most of which half find a circuit and half test it: that takes dozens of forward passes.
CIRCUIT_SAMPLES = 128
#: What the effect of all heads is called.
ALL = "all"


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint.

    Attributes:
        unedited: a row per metric, with its interval.
        effects: tidy rows: each head alone, each layer's heads, all heads, under each of ``MODES``.
        maps: mean attention ``[layer head query key]``.
        circuit: its smallest faithful circuit; ``None`` where that was not asked for.
    """

    step: int
    unedited: pandas.DataFrame
    effects: pandas.DataFrame
    maps: Array
    circuit: FoundCircuit | None = None


@dataclass(frozen=True)
class Strongest:
    """The two single heads whose removal moves a metric most at a checkpoint, and whether they are told apart.

    Attributes:
        mode: what is done to a head.
        rows: of the table of effects, the larger effect first.
        p_value: of a paired sign-flip test of their sizes; ``None`` without a task.
    """

    mode: str
    rows: tuple[Mapping[str, Any], Mapping[str, Any]]
    p_value: float | None


@dataclass
class View:
    """A run's checkpoints on one task (of a mixture on one part of it, named), in the order of their steps.

    Attributes:
        metrics: those shown, the task's own drop metric first where it is among them.
        strongest: the two single heads that move the first metric most; ``None`` of one head.
    """

    source: Source
    part: str
    task: Task | None
    model: Any = None
    metrics: tuple[str, ...] = ()
    snapshots: list[Snapshot] = field(default_factory=list)
    strongest: Strongest | None = None

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
    """Returns the examples that effects are over, with their number where there are effects."""
    counts = sorted({int(row) for view in views for row in view.effects()["n"].dropna()})
    if not counts:
        return "examples"
    return f"{' to '.join(f'{n:,}' for n in dict.fromkeys((counts[0], counts[-1])))} examples"


def measured_views(
    source: Source, options: Options, progress: Progress | None = None, *, circuit: bool = False
) -> list[View]:
    """Measures every checkpoint of a source on the same examples; one view, or one for each part of a mixture.

    Args:
        circuit: whether the smallest faithful circuit of each is found too.
    """
    views: dict[str, View] = {}
    latest: dict[str, LoadedCheckpoint] = {}
    for subject in subjects(source.refs, replace(Examples.of(options), progress=progress)):
        part = str(subject.labels["ref"]).removeprefix(subject.stored.label).strip(" ()")
        view = views.setdefault(part, View(source, part, subject.task))
        view.snapshots.append(snapshot(subject, view, circuit=circuit))
        view.model = subject.model.cfg
        latest[part] = subject
    for part, view in views.items():
        view.strongest = strongest_of(latest[part], view)
    return list(views.values())


def strongest_of(subject: LoadedCheckpoint, view: View) -> Strongest | None:
    """Returns the two heads of a view's last checkpoint whose removal moves its first metric most, and tests them."""
    effects = view.snapshots[-1].effects
    of_heads = (
        effects["head"].notna()
        & (effects["intervention"] == REMOVED)
        & (effects["metric"] == view.metrics[0])
    )
    alone = effects[of_heads & effects["effect"].notna()]
    if len(alone) < 2:
        return None
    ranked = alone.loc[alone["effect"].abs().sort_values(ascending=False, kind="stable").index]
    first, second = ranked.head(2).to_dict("records")
    p_value = None if subject.task is None else p_value_of_difference(subject, view.metrics[0], first, second)
    return Strongest(REMOVED, (first, second), p_value)


def p_value_of_difference(
    subject: LoadedCheckpoint, metric: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> float:
    """Returns the p-value of a paired test that two heads, removed, change a metric equally far, up or down."""
    import numpy as np

    from circuits import ablate
    from circuits.statistics import sign_flip
    from interp_tasks.measurement.paired import DRAWS

    plain, counts = pairs(subject, metric)
    values = []
    for row in (second, first):
        edited, _ = pairs(subject, metric, ablate.zero(str(row["variant"])))
        # A fall is turned into an equal rise.
        values.append(edited if row["effect"] > 0 else 2 * plain - edited)
    return float(sign_flip(np.stack(values), np.stack([counts, counts]), subject.seed, DRAWS)[1])


def pairs(subject: LoadedCheckpoint, metric: str, *edits: Any) -> tuple[Array, Array]:
    """Returns a metric's sum and count of each example, under edits."""
    import numpy as np

    from circuits import run
    from interp_tasks.measurement.activations import TOKENS_PER_PASS
    from interp_tasks.measurement.paired import read

    assert subject.task is not None
    assert subject.batch is not None
    step = max(1, TOKENS_PER_PASS // subject.tokens.shape[1])
    parts = []
    for start in range(0, len(subject.tokens), step):
        rows = slice(start, start + step)
        output = run(subject.model, subject.tokens[rows], *edits)
        parts.append(read(subject.task.metrics(output, subject.batch[rows])[metric]))
    sums, counts = zip(*parts, strict=True)
    return np.concatenate(sums), np.concatenate(counts)


def snapshot(subject: LoadedCheckpoint, view: View, *, circuit: bool = False) -> Snapshot:
    """Measures one checkpoint for the report: metrics, effects of heads, patterns, a circuit."""
    import pandas

    from circuits import patterns
    from interp_tasks.experiments._curve import at_checkpoint

    rows = list(at_checkpoint(view.source.name, subject)) if subject.task is not None else []
    if view.part:
        rows = [{**row, "metric": str(row["metric"]).removesuffix(f" ({view.part})")} for row in rows]
    effects = effects_of(subject, view, [str(row["metric"]) for row in rows])
    return Snapshot(
        subject.checkpoint.step,
        pandas.DataFrame(rows or unedited_distances(effects)),
        effects,
        patterns.attention(subject.model, subject.tokens).mean.numpy(),
        circuit_of(subject) if circuit else None,
    )


def circuit_of(subject: LoadedCheckpoint) -> FoundCircuit:
    """Returns the circuit of one checkpoint, on its first examples; faithfulness over sizes is left out."""
    from interp_tasks.experiments._circuit.search import Search, find_circuit

    batch = None if subject.batch is None else subject.batch[:CIRCUIT_SAMPLES]
    few = replace(subject, tokens=subject.tokens[:CIRCUIT_SAMPLES], batch=batch)
    return find_circuit(few, Search(curve=False))


def effects_of(subject: LoadedCheckpoint, view: View, measured: Sequence[str]) -> pandas.DataFrame:
    """Returns every edit of every choice of heads, in one sweep."""
    from circuits import heads

    every = heads("all", subject.model)
    chosen = {str(head): (head,) for head in every} | by_layer(every) | {ALL: every}
    variants: dict[str, Any] = {}
    called: dict[str, tuple[str, str]] = {}
    for mode in MODES:
        for label, edit in HeadEdit.parse(mode).on(subject, chosen).items():
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

    frame = run_sweep(
        subject, variants, {name: mode for name, (mode, _) in called.items()}, metric, subject.batch
    ).frame
    view.metrics = view.metrics or shown_metrics(frame["metric"], "")
    labels = frame["variant"].map({name: label for name, (_, label) in called.items()})
    return frame.assign(variant=labels, step=subject.checkpoint.step)


def named_metrics(task: Task, subject: LoadedCheckpoint) -> set[str]:
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
