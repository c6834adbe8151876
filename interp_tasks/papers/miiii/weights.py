"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models.

``variant`` says of what, ``intervention`` which part of it. The spectrum is left out for a task that has no grid of
inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, spectrum
from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import (
    WEIGHTS,
    Table,
    Tables,
    interval,
    resamples,
    tables_of,
)
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    check_has_task,
    resolve_refs,
    run_of,
)
from interp_tasks.measurement.table import Row, filled, numbers, value_text
from interp_tasks.measurement.untrained import untrained as untrained_model
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings import Array
    from interp_tasks.papers.miiii.singular import Relabelled, Singular
    from tasks import Task

#: How many untrained models stand beside a checkpoint.
MODELS = 20
#: Random orders of the digits: of the checkpoint's table, and of each untrained one's.
ORDERS, UNTRAINED_ORDERS = 999, 199
#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
PEARSON, COSINE = "Pearson correlation", "cosine similarity"
#: What ``intervention`` says of a row.
VALUES, LEADING, SPECTRUM = "singular values", "leading singular vectors", "spectrum"
PERIODIC = "periodic share"
ABOVE_MEAN, ABOVE_RELABELLED = "frequencies above mean + 1 sd", "frequencies above relabelled digits"
CONTROL = typer.Option(
    "--control", metavar="REF", help="A model to compare with, such as one of shuffled answers. Repeat."
)
UNTRAINED = typer.Option("--untrained/--no-untrained", help="Compare with untrained models.")


@experiment("modular")
def weights(
    refs: str | Sequence[str],
    control: Annotated[str | Sequence[str], CONTROL, list[str]] = (),
    *,
    untrained: Annotated[bool, UNTRAINED] = True,
    **options: Unpack[Options],
) -> Result:
    """See embeddings as tables: similar positions, singular values and vectors, frequencies over the digits.

    Beside each number stands that of untrained models.

    Syrkis & Søgaard 2024 (MIIII), figures 7 to 13; the spectrum also Nanda et al. 2023, figure 3. Examples play no
    part.

    Args:
        refs: one or several REFs.
        control: REFs of models to compare them with, such as one trained on shuffled answers: rows of their own.
        untrained: compare with ``MODELS`` untrained models of the architecture: ``baseline`` is their mean.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples, random
            orders and untrained models.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    check_has_task("weights", options)
    examples = Examples.of(options)
    examined = resolve_refs(refs, examples)
    controls = resolve_refs(control, examples) if control else []
    for each in controls:
        if each.path in {one.path for one in examined}:
            raise UserError(f"--control {each.label} is a checkpoint of --ckpt too: give another model")
    measures = Measures(untrained)
    config = {"control": [one.label for one in controls], "untrained": untrained}
    result = measure("weights", [*examined, *controls], options, measures.measured, config=config)
    has_order = bool((result.frame["intervention"] == SPECTRUM).any())
    note_texts = tuple(notes([one.label for one in controls], untrained, has_order))
    return replace(result, notes=note_texts, data={"panels": measures.panels})


@dataclass(frozen=True)
class MeasuredTable:
    """The measures of one token table: its singular values, and its frequencies where the rows stand in an order."""

    table: Table
    numbers: Mapping[tuple[str, str, str], float]
    singular: Singular
    frequencies: Relabelled | None = None

    @classmethod
    def of(cls, table: Table, orders: int, seed: int) -> MeasuredTable:
        from circuits import fourier
        from circuits.fourier import AboveMean, key_frequencies
        from interp_tasks.papers.miiii.singular import Singular, periodic, relabelled

        singular = Singular.of(table.rows)
        numbers: dict[tuple[str, str, str], float] = {
            (table.label, VALUES, f"vectors for {share:.0%} of S"): float(singular.needed(share))
            for share in (0.5, 0.9)
        }
        if table.axis is None:
            return cls(table, numbers, singular)
        leading = periodic(singular.vectors[:, : max(1, singular.needed(0.5))])
        numbers[table.label, LEADING, PERIODIC] = float(leading.mean())
        frequencies = relabelled(table.rows, orders, seed)
        published = key_frequencies(fourier.spectrum(table.rows, {"digit": len(table.rows)}), AboveMean(1))
        numbers[table.label, SPECTRUM, ABOVE_MEAN] = float(len(published.keys))
        numbers[table.label, SPECTRUM, ABOVE_RELABELLED] = float(frequencies.significant.sum())
        return cls(table, numbers, singular, frequencies)


@dataclass
class Measures:
    """Measures each checkpoint beside untrained models, and keeps the panels of the figures by REF."""

    untrained: bool
    panels: dict[str, list[Panel]] = field(default_factory=dict)
    controls: dict[Any, list[Tables]] = field(default_factory=dict)

    def measured(self, subject: LoadedCheckpoint) -> list[Row]:
        """Measures the embedding tables of one checkpoint, beside those of untrained models."""
        task, tables = subject.task, Tables.of(subject.model)
        assert task is not None
        others = self.others(subject) if self.untrained else []
        beside = [tables_of(task, one) for one in others]
        rows, panels = list(position_rows(task, tables, others, subject.seed)), list[Panel]()
        for index, table in enumerate(tables_of(task, tables)):
            own = MeasuredTable.of(table, ORDERS, subject.seed)
            untrained = [MeasuredTable.of(each[index], UNTRAINED_ORDERS, subject.seed) for each in beside]
            common = {"site": "embed", "n": len(table.rows)}
            for (variant, about, metric), value in own.numbers.items():
                baseline = mean_of(each.numbers[variant, about, metric] for each in untrained)
                row = {"variant": variant, "intervention": about, "metric": metric}
                rows.append({**row, **common, **numbers(value, baseline=baseline)})
            panels += table_panels(own, untrained)
        self.panels[str(subject.labels["ref"])] = panels
        return [{"split": WEIGHTS, "engine": "exact", **row} for row in rows]

    def others(self, subject: LoadedCheckpoint) -> list[Tables]:
        """Returns the tables of untrained models, the same for all checkpoints of a run and architecture."""
        key = (run_of(subject), subject.task, *(tuple(one.shape) for one in subject.model.parameters()))
        if key not in self.controls:
            self.controls[key] = [Tables.of(untrained_model(subject, draw)) for draw in range(MODELS)]
        return self.controls[key]


def notes(controls: Sequence[str], untrained: bool, ordered: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    if controls:
        yield f"Controls: {', '.join(controls)}."
    yield (
        "Similarity of positions: of the rows of W_pos, over dimensions; intervals: 95%, bootstrap over dimensions. "
        f"{PUBLISHED_DIMENSIONS} dimensions are what the published number was computed over."
    )
    yield "Vectors for a share: the fewest leading singular values that reach it, of ΣS; not centred."
    if ordered:
        yield (
            f"{LEADING}: those for 50% of ΣS. periodic: a larger share of their variance at one frequency than white "
            "noise has at its best one with probability 0.05."
        )
        yield (
            f"{ABOVE_RELABELLED}: a norm that no frequency of the same rows in random order reaches with probability "
            f"0.95 ({ORDERS} orders). {ABOVE_MEAN}: the published rule, over all frequencies with 0; about a sixth of "
            "any noise is above it."
        )
    else:
        yield "No spectrum: the task has no grid of inputs (grid_axes) whose values would put tokens in an order."
    if untrained:
        yield f"untrained: mean of {MODELS} untrained models of the architecture."


def position_rows(task: Task, tables: Tables, others: Sequence[Tables], seed: int) -> Iterator[Row]:
    """Yields rows of the similarity of W_pos at the grid's coordinates, else at the first two positions."""
    import numpy as np

    table = tables.positions
    if table is None:
        return
    controls = [each.positions for each in others if each.positions is not None]
    places = sorted({axis.position for axis in task.grid_axes() if axis.position is not None}) or [0, 1]
    for pair in itertools.combinations([place for place in places if place < len(table)], 2):
        for dimensions in dict.fromkeys([table.shape[1], PUBLISHED_DIMENSIONS]):
            if dimensions > table.shape[1]:
                continue
            about = "all dimensions" if dimensions == table.shape[1] else f"first {dimensions} dimensions"
            plain = np.ones((1, dimensions))
            untrained = [similarities(each, pair, dimensions, plain) for each in controls]
            for metric, values in similarities(table, pair, dimensions, resamples(dimensions, seed)).items():
                row = {
                    "variant": f"positions {pair[0]} and {pair[1]}",
                    "intervention": about,
                    "metric": metric,
                }
                baseline = mean_of(float(each[metric][0]) for each in untrained)
                of_value = numbers(values[0], interval(values[1:]), baseline)
                yield {**row, "site": "pos_embed", "n": dimensions, **of_value}


def mean_of(values: Iterable[float]) -> float | None:
    """Returns the mean; ``None`` of no values."""
    several = list(values)
    return math.fsum(several) / len(several) if several else None


def similarities(table: Array, pair: tuple[int, int], dimensions: int, weights: Array) -> dict[str, Array]:
    """Returns Pearson and cosine of two rows over their first dimensions, weighted ``[draws dimension]``."""
    import numpy as np

    from interp_tasks.measurement.embeddings import correlation

    one, other = (table[position, :dimensions] for position in pair)
    products = weights @ (one * other)
    scale = np.sqrt((weights @ one**2) * (weights @ other**2))
    cosine = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return {PEARSON: correlation(one, other, weights), COSINE: cosine}


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see."""
    untrained = [Column("untrained", "baseline", filled("baseline", number))]
    return [
        Column("of", "variant"),
        Column("part", "intervention"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
        *(untrained if frame["baseline"].notna().any() else []),
    ]


def table_panels(own: MeasuredTable, untrained: Sequence[MeasuredTable]) -> Iterator[Panel]:
    """Yields the singular values of a table beside those of untrained models; then its spectrum."""
    import numpy as np

    sizes = {"singular values": own.singular.values}
    if untrained:
        sizes["untrained, mean"] = np.mean([each.singular.values for each in untrained], 0)
    series = {name: Series(list(range(1, len(of) + 1)), of.tolist()) for name, of in sizes.items()}
    title = f"singular values of {own.table.label}"
    yield curve(series, title, x="number of the singular value", y="size")
    if own.frequencies is not None:
        norms = own.frequencies.norms
        significant = (own.frequencies.significant.nonzero()[0] + 1).tolist()
        title = f"Fourier norms of {own.table.label}"
        yield spectrum(
            list(range(1, len(norms) + 1)), norms.tolist(), significant, title, y="norm of cos and sin"
        )


def figures(result: Result) -> list[Figure]:
    """Returns of every checkpoint singular values and spectrum."""
    caption = "Spectrum: norms by frequency, in the second colour above those of relabelled digits."
    return [
        Figure(draw(panels, barmode="overlay"), f"Embeddings, {ref}", caption)
        for ref, panels in result.data["panels"].items()
    ]
