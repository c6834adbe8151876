"""Finds the quantity that moves first: the step at which each has reached a share of its total change.

For each quantity (the ``variant``) its value at every checkpoint, and at the last one's REF the steps at which it has
made 10%, 50% and 90% of its way for good, interpolated; ``baseline`` is that step of the drop metric, ``effect``
their difference: negative is before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import Tables, interval
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice, check_kinds
from interp_tasks.measurement.paired import DRAWS, read
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    by_run,
    check_has_task,
    in_runs,
    resolve_refs,
    run_of,
)
from interp_tasks.measurement.table import Row, effect_text, numbers, value_text
from interp_tasks.pages import Column, Figure
from interp_tasks.papers.matrix_completion.arrangement import (
    ALIGNMENT,
    EmbeddingTargets,
    distances,
    of_tokens,
    silhouette,
)

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.measurement.embeddings import Array

SHARES = (0.1, 0.5, 0.9)
STARTS = ("plateau", "first")
#: Kinds of quantities, in the order of the table.
KINDS = ("metrics", "ablation", "embeddings", "positions")
VALUE, STEP = "value", "step at "
KINDS_OPTION = typer.Option(
    "--kind",
    metavar="NAME",
    help=f"Follow these: {', '.join(KINDS)}; repeat for several.",
    show_default="all",
)
START = typer.Option("--start", help=f"Count ways from: {' or '.join(STARTS)}.")


@experiment("matrix", says={"start": "plateau"})
def order(
    refs: str | Sequence[str],
    kinds: Annotated[str | Sequence[str], KINDS_OPTION, list[str]] = (),
    start: Annotated[str, START] = "plateau",
    **options: Unpack[Options],
) -> Result:
    """See which quantity moves first over the checkpoints of a run, and how long before the drop.

    Metrics, effect of ablation, embeddings, positions: the step at which each has made 10%, 50% and 90% of its way.

    ``metrics`` of the task; ``ablation``: by how much uniform attention in all heads changes the task's drop metric;
    ``embeddings``: alignment of the token embeddings with the last checkpoint's (see ``embeddings``);
    ``positions``: silhouettes of position embeddings.

    Args:
        refs: REFs of checkpoints of one or several runs, such as ``RUN@all``; at least four of each.
        kinds: some of the kinds above; none: all that the task has.
        start: from where ways are counted: ``"plateau"``, the checkpoint nearest to the run's ``@pre``, or
            ``"first"``.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    chosen_kinds = check_kinds([kinds] if isinstance(kinds, str) else kinds, KINDS)
    check_choice("--start", start, STARTS)
    check_has_task("order", options)
    found = resolve_refs(refs, Examples.of(options))
    runs = checked_runs(found)
    plateaus = {run: plateau_step(run, named) if start == "plateau" else None for run, named in runs.items()}
    device = options.get("device", "cpu")
    followed = {run: RunQuantities(named, device) for run, named in runs.items()}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        run = run_of(subject)
        rows = followed[run].add(subject, chosen_kinds)
        if subject.checkpoint.path == followed[run].last.path:
            rows += followed[run].steps(subject, plateaus[run])
        return Measured(pandas.DataFrame(rows), {})

    config = {"kinds": list(chosen_kinds), "start": start}
    result = measure("order", in_runs(runs), options, measure_checkpoint, config=config)
    config = {**result.config, "refs": [one.label for one in found]}
    notes = (
        f"step at 50%: of the way from {'the plateau' if start == 'plateau' else 'the first checkpoint'} to the last "
        "checkpoint, made for good, interpolated between stored steps.",
        "baseline: that step of the drop metric. effect: value − baseline; negative is before the drop.",
        "Intervals: 95%, bootstrap over examples (of embeddings over values), the same resamples at all checkpoints; "
        "silhouettes have none. What other runs would give is not in them.",
    )
    curves = {run: one.made(plateaus[run]) for run, one in followed.items()}
    return replace(result, config=config, notes=notes, data={"curves": curves})


def checked_runs(named: Sequence[ResolvedCheckpoint]) -> dict[str, list[ResolvedCheckpoint]]:
    """Returns the checkpoints of each run, by ascending step.

    Raises:
        UserError: for a checkpoint outside a run, and for too few of one.
    """
    for one in named:
        if one.run_path is None:
            raise UserError(f"{one.label} is in no run, so nothing comes before or after it")
    runs = by_run(named)
    for several in runs.values():
        if len(several) < 4:
            run = several[0].run_name
            raise UserError(f"{run}: {len(several)} checkpoints; order needs at least 4, such as {run}@all")
    return runs


def plateau_step(run: str, named: Sequence[ResolvedCheckpoint]) -> int:
    """Returns the chosen step that is nearest to the run's ``@pre``."""
    from interp_tasks.checkpoints.marks import find_marks

    pre = find_marks(run, named[0].run_name)["pre"]
    return min((one.step for one in named), key=lambda step: abs(step - pre))


@dataclass
class RunQuantities:
    """The quantities of one run over its checkpoints.

    Attributes:
        curves: quantity -> step -> ``[1 + draws]``: the value, then its resamples; ``[1]`` where there are none.
    """

    named: Sequence[ResolvedCheckpoint]
    device: str
    curves: dict[str, dict[int, Array]] = field(default_factory=dict)
    drop: str = ""

    @property
    def last(self) -> ResolvedCheckpoint:
        return self.named[-1]

    @cached_property
    def end(self) -> Tables:
        """The embeddings of the last checkpoint."""
        from interp_tasks.checkpoints.load import load_resolved

        return Tables.of(load_resolved(self.last, self.device).model)

    def add(self, subject: LoadedCheckpoint, kinds: Sequence[str]) -> list[Row]:
        """Measures one checkpoint; its rows."""
        assert subject.task is not None
        self.drop = subject.task.drop_metric.name
        rows = []
        # Everything is compared with the drop metric.
        for kind in dict.fromkeys(["metrics", *kinds]):
            for name, quantity in QUANTITIES[kind](subject, self.end).items():
                if kind == "metrics" and kind not in kinds and name != self.drop:
                    continue
                self.curves.setdefault(name, {})[subject.checkpoint.step] = quantity
                row = {"variant": name, "intervention": kind, "metric": VALUE, "engine": "naive"}
                rows.append({**row, **numbers(quantity[0], interval(quantity[1:])), "n": len(subject.tokens)})
        return rows

    def stacked(self, name: str) -> tuple[list[int], Array]:
        """Returns the steps and the curve ``[1 + draws, step]`` of a quantity."""
        import numpy as np

        steps = sorted(self.curves[name])
        return steps, np.stack([self.curves[name][step] for step in steps], 1)

    def steps(self, subject: LoadedCheckpoint, plateau: int | None) -> list[Row]:
        """Returns rows with the step at which each quantity has reached a share of its total change."""
        from interp_tasks.measurement.crossings import crossing

        rows = []
        of_drop: dict[float, Array] = {}
        for name in sorted(self.curves, key=lambda name: name != self.drop):
            at, curve = self.stacked(name)
            first = 0 if plateau is None else at.index(plateau)
            # A quantity that was past a share on the plateau already has no step after it.
            for share in SHARES:
                crossings = crossing(at[first:], curve[:, first:], share, curve[:, first], curve[:, -1])
                drop = of_drop.setdefault(share, crossings)
                gap = interval((crossings[: len(drop)] - drop[: len(crossings)])[1:])
                compared = () if name == self.drop else (drop[0], gap)
                row = {"variant": name, "intervention": "of its way", "metric": f"{STEP}{share:.0%}"}
                row |= {**numbers(crossings[0], interval(crossings[1:]), *compared), "engine": "naive"}
                rows.append({**row, "n": len(subject.tokens)})
        return rows

    def made(self, plateau: int | None) -> pandas.DataFrame:
        """Returns the share of its total change that each quantity has reached at each step."""
        import pandas

        columns: dict[str, Any] = {}
        for name in self.curves:
            steps, curve = self.stacked(name)
            values = curve[0]
            start = values[0 if plateau is None else steps.index(plateau)]
            distance = values[-1] - start
            columns |= {"step": steps, name: (values - start) / (distance if distance else float("nan"))}
        return pandas.DataFrame(columns)


# Quantities: each a function of a checkpoint that gives, by name, ``[1 + draws]``: the value, then its resamples, of
# the same examples at every checkpoint; ``[1]`` where there are none.


def pooled(sums: Any, counts: Any, seed: int) -> Array:
    """Returns Σsum / Σcount of per-example pairs, then of its resamples over examples."""
    import numpy as np

    from circuits.statistics import bootstrap, ratio

    total, count = (np.asarray(x, dtype=float)[None] for x in (sums, counts))
    value = ratio(total.sum(1), count.sum(1))
    return np.concatenate([value, bootstrap(total, count, seed, DRAWS)[:, 0]])


def judged(subject: LoadedCheckpoint, *edits: Any) -> dict[str, tuple[Array, Array]]:
    """Returns the task's metrics per example, under edits."""
    from circuits import run

    assert subject.task is not None
    output = run(subject.model, subject.tokens, *edits)
    return {name: read(metric) for name, metric in subject.task.metrics(output, subject.batch).items()}  # type: ignore[arg-type]


def metrics(subject: LoadedCheckpoint, last: Tables) -> dict[str, Array]:
    return {name: pooled(*values, subject.seed) for name, values in judged(subject).items()}


def ablation(subject: LoadedCheckpoint, last: Tables) -> dict[str, Array]:
    """Returns the change of the drop metric under uniform attention in all heads."""
    from circuits import ablate, heads

    assert subject.task is not None
    name = subject.task.drop_metric.name
    edited = judged(subject, ablate.uniform(heads("all", subject.model)))[name]
    gap = pooled(*edited, subject.seed) - pooled(*judged(subject)[name], subject.seed)
    return {f"effect of ablation on {name}": gap}


def embeddings(subject: LoadedCheckpoint, last: Tables) -> dict[str, Array]:
    """Returns how far the token embeddings are aligned with those of the run's last checkpoint."""
    assert subject.task is not None
    targets = EmbeddingTargets(subject.task.token_values(), {})
    if len(targets.values) < 4:
        return {}
    return {
        "embedding alignment": of_tokens(targets, Tables.of(subject.model), last, subject.seed)[ALIGNMENT][1]
    }


def positions(subject: LoadedCheckpoint, last: Tables) -> dict[str, Array]:
    """Returns how far the position embeddings form clusters, by each axis of the grid of positions."""
    import numpy as np

    assert subject.task is not None
    axes = {axis.name: len(axis.values) for axis in subject.task.grid_axes() if axis.position is None}
    table, targets = Tables.of(subject.model).positions, EmbeddingTargets({}, axes)
    if not axes or table is None:
        return {}
    apart = distances(table[: int(np.prod(list(axes.values())))])
    return {
        f"silhouette of positions by {axis}": np.array([silhouette(apart, targets.labels(axis))])
        for axis in targets.clustered_axes
    }


QUANTITIES: dict[str, Callable[[LoadedCheckpoint, Tables], dict[str, Array]]] = {
    "metrics": metrics,
    "ablation": ablation,
    "embeddings": embeddings,
    "positions": positions,
}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the steps alone; values are in the files and the figure. Which is first stands first."""
    steps = frame[frame["metric"].str.startswith("step at ")]
    return steps.sort_values(["ref", "metric", "value"], kind="stable", ignore_index=True)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    return [
        Column("", "metric"),
        Column("quantity", "variant"),
        Column("step [95% CI]", "value", value_text),
        Column("before (−) or after the drop metric", "effect", effect_text),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns a panel per run, a line per quantity; what overshoots far is cut, so that 0 to 1 can be read."""
    curves = result.data["curves"]
    names = list(dict.fromkeys(name for table in curves.values() for name in table.columns if name != "step"))
    panels = []
    for run, table in curves.items():
        steps = table["step"].tolist()
        lines = {
            name: Series(steps, table[name].tolist(), look=look)
            for look, name in enumerate(names)
            if name in table
        }
        axes: dict[str, Any] = {"y": "share of its way", "y_axis": {"range": [-0.6, 1.6]}}
        panels.append(curve(lines, run.rsplit("/", 1)[-1], height=420, **axes))
    caption = "0: the value on the plateau (or at the first checkpoint, if asked for). 1: the value at the last one."
    return [Figure(draw(panels), "Share of its way that each quantity has made", caption)]
