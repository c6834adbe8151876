"""Measures how the embeddings of values and positions are arranged, and when they come to be so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings.tables import (
    ALIGNMENT,
    WEIGHTS,
    EmbeddingTargets,
    Tables,
    interval,
    of_tokens,
)
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    PendingCheckpoint,
    by_run,
    check_has_task,
    resolve_refs,
    run_of,
)
from interp_tasks.measurement.untrained import untrained as untrained_model
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings.geometry import Array
    from interp_tasks.measurement.subjects import LabelledRef
    from tasks import Task

HALF_WAY = "half-way step of the alignment"


@dataclass(frozen=True, repr=False)
class EmbeddingsResult(Result):
    """A :class:`Result` with the tables of its figures, by REF.

    Attributes:
        tokens: ``id, value, norm, component 1, component 2``; scores are of the checkpoint's own components.
        positions: ``position, norm, t-SNE 1, t-SNE 2`` and a column for each axis of the grid of positions.
    """

    tokens: Mapping[str, pandas.DataFrame] = field(default_factory=dict)
    positions: Mapping[str, pandas.DataFrame] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Draws one checkpoint (default: the last): components and norms of values, t-SNE and norms of positions."""
        from interp_tasks.experiments._embeddings.figure import arrangement

        ref = list(dict.fromkeys([*self.tokens, *self.positions]))[-1] if ref is None else ref
        figure = arrangement(ref, self.tokens.get(ref), self.positions.get(ref))
        return self.titled(figure, f"Embeddings, {ref}")

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns the arrangement in every checkpoint, and over training where there are several."""
        from interp_tasks.experiments._embeddings.figure import over_training

        refs = list(dict.fromkeys([*self.tokens, *self.positions]))
        figures = [Figure(self.plot(ref), f"Embeddings, {ref}", self.caption()) for ref in refs]
        if len(refs) > 1:
            caption = "Filled: the checkpoint. Open: its baseline."
            figures.append(Figure(over_training(self.frame), "Over training", caption))
        return figures

    def caption(self) -> str:
        return "Values: principal components, coloured by bins half a unit wide. Positions: t-SNE, coloured by column."


def metrics_of_embeddings(task: Task) -> Sequence[str]:
    """Returns the metrics that rows can have: of values by whether there are v and -v, of positions by axis."""
    targets = EmbeddingTargets.of_task(task, None)
    values = set(targets.values.values())
    names: list[str] = []
    if values:
        names = ["variance of two components", ALIGNMENT, HALF_WAY]
        if any(value > 0 and -value in values for value in values):
            names += ["norm asymmetry", "norm symmetry", "sign separability", "magnitude correlation"]
        if any(-value not in values for value in values):
            # Without pairs, or where --largest leaves none.
            names += ["value correlation, component 1", "value correlation, component 2"]
    for prefix in ("", "t-SNE "):
        for axis in targets.clustered_axes:
            names += [f"{prefix}silhouette by {axis}", f"{prefix}silhouette by {axis}: p"]
    if targets.axes:
        names += ["norm variation", f"norm of the middle {next(iter(targets.axes))} / others"]
    return names


@experiment("matrix", says={"largest": None}, metrics=metrics_of_embeddings)
def embeddings(
    refs: str | Sequence[str],
    largest: Annotated[
        float | None,
        typer.Option("--largest", help="Only values up to ± this.", show_default="all the examples can hold"),
    ] = None,
    *,
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")
    ] = True,
    **options: Unpack[Options],
) -> EmbeddingsResult:
    """See how token embeddings follow the values they stand for, and position embeddings the grid.

    Norms of v against -v, sign and size on two principal components, clusters of positions by row and column with a
    permutation test, norms of the middle row. Of several checkpoints of one run also how far each is on the way to the
    last.

    Gopalani, Lubana, Hu 2024, figures 7, 9 and 10. Examples play no part.

    Args:
        refs: one or several REFs. With several checkpoints of one run, also how far each is on the way to the last:
            its embeddings and the last one's, both on the last one's two principal components by plain dot products
            (no centring), as a correlation over values.
        largest: only values up to ±this (1.5 in the paper). Default: all that the task's examples can hold
            (``token_values``).
        untrained: compare with an untrained model of the architecture.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples,
            permutations, t-SNE and the untrained model.

    Returns:
        An :class:`EmbeddingsResult`; ``variant`` is ``tokens`` or ``positions``, ``baseline`` the untrained
        model's, of silhouettes their mean under permuted labels.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that says of neither tokens nor
            positions what they stand for.
    """
    check_largest(largest)
    check_has_task("embeddings", options)
    refs = resolve_refs(refs, Examples.of(options))
    ends = Ends.of(refs.named, options.get("device", "cpu"))
    tokens: dict[str, pandas.DataFrame] = {}
    positions: dict[str, pandas.DataFrame] = {}
    remarks: dict[str, None] = {}
    aligned: dict[str, dict[int, Array]] = {}

    def check(planned: PendingCheckpoint) -> None:
        EmbeddingTargets.of(planned, largest)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures the token and position embeddings of one checkpoint, beside those of an untrained model."""
        import pandas

        ref, task = str(subject.labels["ref"]), subject.task
        assert task is not None
        targets = EmbeddingTargets.of(subject, largest)
        untrained_tables = Tables.of(untrained_model(subject)) if untrained else None
        tables, rows = Tables.of(subject.model), []
        if targets.values:
            end = ends.of_subject(subject)
            new_rows, table = token_rows(targets, tables, untrained_tables, end, subject.seed)
            if end is not None:
                resampled = of_tokens(targets, tables, end, subject.seed)[ALIGNMENT][1]
                aligned.setdefault(run_of(subject), {})[subject.checkpoint.step] = resampled
                if subject.checkpoint.path == ends.last[run_of(subject)].resolved.path:
                    new_rows += half_way(Path(run_of(subject)), aligned[run_of(subject)])
            rows += new_rows
            tokens[ref] = table
        # t-SNE cannot place fewer than four points.
        if targets.axes and tables.positions is not None and math.prod(targets.axes.values()) > 3:
            new_rows, table, note = position_rows(targets, tables, untrained_tables, subject.seed)
            rows += new_rows
            positions[ref] = table
            remarks[note] = None
        return Measured(pandas.DataFrame(rows), {})

    result = measure(
        "embeddings", refs, options, measure_checkpoint, config={"largest": largest}, check=check
    )
    frame = result.frame.assign(split=WEIGHTS)
    return EmbeddingsResult.of(
        result,
        frame=frame,
        notes=(*notes(largest), *remarks),
        tokens=tokens,
        positions=positions,
    )


def notes(largest: float | None) -> tuple[str, ...]:
    which = "that the task's examples can hold" if largest is None else f"up to ±{largest:g}"
    return (
        f"tokens: values {which}; other rows of W_E are left out. Intervals: 95%, bootstrap over values.",
        "sign separability: area under the ROC curve of the sign along that one of two principal components that tells "
        "signs apart better; magnitude correlation: Spearman's of |v| with the other one, without its sign.",
        "baseline: an untrained model of the architecture; of silhouettes their mean under permuted labels, with p "
        "from 999 permutations; of the half-way step the onset of the run's drop.",
    )


def check_largest(largest: float | None) -> None:
    if largest is not None and not 0 < largest < 1e9:
        raise UserError(f"--largest {largest:g}: give a value above 0 and below 1e9")


@dataclass
class Ends:
    """Finds the last chosen checkpoint of each run that has several."""

    last: Mapping[str, LabelledRef]
    device: str
    loaded: dict[str, Tables] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Sequence[LabelledRef], device: str) -> Ends:
        ends = {run: several[-1] for run, several in by_run(named).items() if len(several) > 1}
        return cls(ends, device)

    def of_subject(self, subject: LoadedCheckpoint) -> Tables | None:
        from interp_tasks.checkpoints.load import load_resolved

        run = run_of(subject)
        if run not in self.last:
            return None
        if run not in self.loaded:
            self.loaded = {run: Tables.of(load_resolved(self.last[run].resolved, self.device).model)}
        return self.loaded[run]


def half_way(run: Path, aligned: Mapping[int, Array]) -> list[dict[str, Any]]:
    """Returns a row of the step at which the alignment is half-way, with the drop's onset; needs 3 checkpoints."""
    import numpy as np

    from interp_tasks.measurement.crossings import crossing

    if len(aligned) < 3:
        return []
    steps = sorted(aligned)
    curves = np.stack([aligned[step] for step in steps], 1)
    # The way begins at no alignment at all, whatever checkpoints were asked for.
    steps_half_way = crossing(steps, curves, 0.5, 0 * curves[:, 0], curves[:, -1])
    if curves[0, 0] >= 0.5:
        return []
    low, high = interval(steps_half_way[1:])
    row: dict[str, Any] = {
        "variant": "tokens",
        "intervention": "two components",
        "metric": HALF_WAY,
        "site": "embed",
    }
    row |= {"value": steps_half_way[0], "value_ci_low": low, "value_ci_high": high, "engine": "exact"}
    onset = onset_of(run)
    if onset is not None:
        row |= {"baseline": float(onset), "effect": steps_half_way[0] - onset}
        row |= {"effect_ci_low": low - onset, "effect_ci_high": high - onset}
    return [row]


def onset_of(run: Path) -> int | None:
    """Returns the onset of the drop that a run logged; ``None`` where there is none."""
    from interp_tasks.checkpoints.marks import find_drop
    from interp_tasks.checkpoints.run_files import RUN_FILE, read_run

    if not (run / RUN_FILE).is_file():
        return None
    try:
        return find_drop(run, read_run(run), run.name).onset
    except UserError:
        return None


def token_rows(
    targets: EmbeddingTargets, tables: Tables, untrained_tables: Tables | None, end: Tables | None, seed: int
) -> tuple[list[dict[str, Any]], pandas.DataFrame]:
    """Returns rows of the tidy table, and the table of the figures."""
    import numpy as np
    import pandas

    from interp_tasks.measurement.embeddings.geometry import principal

    measured = of_tokens(targets, tables, end, seed)
    baseline = {} if untrained_tables is None else of_tokens(targets, untrained_tables, end, seed)
    rows = []
    for metric, (about, value) in measured.items():
        low, high = interval(value[1:])
        row: dict[str, Any] = {"variant": "tokens", "intervention": about, "metric": metric, "site": "embed"}
        row |= {
            "value": value[0],
            "value_ci_low": low,
            "value_ci_high": high,
            "n": len(targets.values),
            "engine": "exact",
        }
        if metric in baseline:
            other = float(baseline[metric][1][0])
            row |= {"baseline": other, "effect": value[0] - other}
        rows.append(row)
    points = tables.rows(targets.values)
    components = principal(points)
    table = pandas.DataFrame(
        {
            "id": list(targets.values),
            "value": list(targets.values.values()),
            "norm": np.linalg.norm(points, axis=1),
            "component 1": components.scores[:, 0],
            "component 2": components.scores[:, 1],
        }
    )
    return rows, table


def position_rows(
    targets: EmbeddingTargets, tables: Tables, untrained_tables: Tables | None, seed: int
) -> tuple[list[dict[str, Any]], pandas.DataFrame, str]:
    """Returns rows of the tidy table, the table of the figures, and a note on t-SNE's settings."""
    import numpy as np
    import pandas

    from interp_tasks.measurement.embeddings.geometry import clustered, tsne

    assert tables.positions is not None
    cells = int(np.prod(list(targets.axes.values())))
    points = tables.positions[:cells]
    norms = np.linalg.norm(points, axis=1)
    plane, perplexity = tsne(points, seed)
    common: dict[str, Any] = {"variant": "positions", "site": "pos_embed", "n": cells, "engine": "exact"}
    rows: list[dict[str, Any]] = []
    for prefix, coordinates in (("", points), ("t-SNE ", plane)):
        for axis in targets.clustered_axes:
            clusters = clustered(coordinates, targets.labels(axis), seed)
            about = {**common, "intervention": "against permuted labels"}
            row: dict[str, Any] = {
                "value": clusters.value,
                "baseline": clusters.null,
                "effect": clusters.value - clusters.null,
            }
            rows.append(
                {**about, "metric": f"{prefix}silhouette by {axis}", **row, "p_value": clusters.p_value}
            )
            rows.append({**about, "metric": f"{prefix}silhouette by {axis}: p", "value": clusters.p_value})
    measured = of_norms(targets, norms)
    other = {}
    if untrained_tables is not None and untrained_tables.positions is not None:
        other = of_norms(targets, np.linalg.norm(untrained_tables.positions[:cells], axis=1))
    for metric, value in measured.items():
        row = {**common, "intervention": "norms", "metric": metric, "value": value}
        if metric in other:
            row |= {"baseline": other[metric], "effect": value - other[metric]}
        rows.append(row)
    columns: dict[str, Any] = {"position": range(cells), "norm": norms}
    columns |= {"t-SNE 1": plane[:, 0], "t-SNE 2": plane[:, 1]}
    table = pandas.DataFrame(columns | {axis: targets.labels(axis) for axis in targets.axes})
    return rows, table, f"t-SNE: scikit-learn, perplexity {perplexity:g}, seed {seed}."


def of_norms(targets: EmbeddingTargets, norms: Array) -> dict[str, float]:
    """Measures how norms vary, and the middle of the first axis against the rest: its one or two middle lines."""
    import numpy as np

    axis, size = next(iter(targets.axes.items()))
    quantities = {"norm variation": float(norms.std() / norms.mean())}
    if size > 2:
        middle = np.abs(targets.labels(axis) - (size - 1) / 2) < 1
        quantities[f"norm of the middle {axis} / others"] = float(
            norms[middle].mean() / norms[~middle].mean()
        )
    return quantities
