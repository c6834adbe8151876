"""Token embeddings as tables: singular values and vectors, and frequencies where the rows stand in an order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.embeddings import Table

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings import Array
    from interp_tasks.papers.miiii.singular import Relabelled, Singular

#: The share of the untrained models that their range holds.
RANGE = 0.95
#: How ``intervention`` begins where the row is of the untrained models.
BESIDE = "untrained: "
#: Of a row: variant, intervention, metric.
Key = tuple[str, str, str]
#: Random orders of the digits: of the checkpoint's table, and of each untrained one's.
ORDERS, UNTRAINED_ORDERS = 999, 199
#: Singular vectors that have a row of their own, at most.
VECTORS = 8
#: What ``intervention`` says of a row.
VALUES, LEADING, SPECTRUM = "singular values", "leading singular vectors", "spectrum"
PERIODIC, BEST = "periodic share", "share at the best frequency"
ABOVE_MEAN, ABOVE_RELABELLED = "frequencies above mean + 1 sd", "frequencies above relabelled digits"
NINETY, GINI, NORM = "frequencies for 90% of the variance", "Gini coefficient of the components", "norm"


@dataclass(frozen=True)
class TableView:
    """The contents of the figure of one table of a checkpoint.

    Attributes:
        label, axis: of the table.
        singular, beside: the checkpoint's, and the mean singular values of untrained models.
        frequencies: the checkpoint's, where rows stand in an order.
        above_mean: the published threshold of the norm of each; ``norms_beside`` the mean norms of untrained models.
    """

    label: str
    axis: str | None
    singular: Singular
    beside: Array | None
    frequencies: Relabelled | None = None
    above_mean: Array | None = None
    norms_beside: Array | None = None


@dataclass(frozen=True)
class MeasuredTable:
    """The measures of one table: numbers by key, and the vectors and frequencies they come from."""

    numbers: dict[Key, float]
    singular: Singular
    vectors: dict[str, tuple[int, float]]
    frequencies: Relabelled | None
    above_mean: Array | None
    published: frozenset[int]


def measured(table: Table, orders: int, seed: int) -> MeasuredTable:
    """Returns every number of one table."""

    from interp_tasks.papers.miiii.singular import Singular, periodicity, relabelled

    singular = Singular.of(table.rows)
    numbers: dict[Key, float] = {}
    for sum_of, power in (("S", 1), ("S²", 2)):
        for share in (0.5, 0.9):
            metric = f"vectors for {share:.0%} of {sum_of}"
            numbers[table.label, VALUES, metric] = float(singular.needed(share, power))
    numbers[table.label, VALUES, "effective rank"] = singular.effective_rank
    if table.axis is None:
        return MeasuredTable(numbers, singular, {}, None, None, frozenset())
    leading = singular.vectors[:, : max(1, singular.needed(0.5))]
    period = periodicity(leading)
    numbers[table.label, LEADING, PERIODIC] = float(period.periodic.mean())
    numbers[table.label, LEADING, BEST] = float(period.share.mean())
    vectors = {
        f"vector {k + 1}": (int(period.frequency[k]), float(period.share[k]))
        for k in range(min(VECTORS, len(period.share)))
    }
    frequencies = relabelled(table.rows, orders, seed)
    of_spectrum, bound, published = spectral_numbers(table.rows)
    numbers |= {(table.label, SPECTRUM, metric): value for metric, value in of_spectrum.items()}
    numbers[table.label, SPECTRUM, ABOVE_RELABELLED] = float(frequencies.significant.sum())
    return MeasuredTable(numbers, singular, vectors, frequencies, bound, published)


def spectral_numbers(rows: Array) -> tuple[dict[str, float], Array, frozenset[int]]:
    """Returns metrics of a table's spectrum, the published bound of each norm, and the frequencies above it."""
    import numpy as np

    from circuits.fourier import AboveMean, gini, key_frequencies, spectrum, transform

    spectra = spectrum(rows, {"digit": len(rows)})
    published = frozenset(int(key) for key in key_frequencies(spectra, AboveMean(1)).keys)  # type: ignore[arg-type]  # of one coordinate frequencies are numbers
    norms = np.sqrt(spectra.total().power.numpy() * len(rows))
    power = np.sort(norms[1:] ** 2)[::-1]
    grown = np.cumsum(power)
    dimensions = int((grown < 0.9 * grown[-1] * (1 - 1e-9)).sum()) + 1 if grown[-1] else 0
    numbers = {
        ABOVE_MEAN: float(len(published)),
        NINETY: float(dimensions),
        GINI: gini(transform(rows).norm(dim=1)),
    }
    # As the rule has it: in the transform a frequency of one function, 0 and half an even period, counts √2-fold beside
    # cos and sin together.
    k = np.arange(len(norms))
    times = np.where((k == 0) | (2 * k == len(rows)), np.sqrt(2), 1.0)
    sizes = norms * times
    return numbers, (sizes.mean() + sizes.std()) / times[1:], published


def of_tables(
    tables: Sequence[Table], others: Sequence[Sequence[Table]], seed: int, every: bool
) -> tuple[list[dict[str, Any]], list[TableView]]:
    """Returns rows of token tables, each beside the same table of other models, and what figures show of them."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    shown = []
    for index, table in enumerate(tables):
        table_measures = measured(table, ORDERS, seed)
        control_measures = [measured(each[index], UNTRAINED_ORDERS, seed) for each in others]
        common = {"site": "embed", "n": len(table.rows)}
        for key, value in table_measures.numbers.items():
            rows += rows_with_untrained(key, value, [each.numbers[key] for each in control_measures], common)
            if key[1:] == (LEADING, BEST):
                rows += vector_rows(table, table_measures, control_measures, common)
        sizes = np.mean([each.singular.values for each in control_measures], 0) if control_measures else None
        seen = TableView(table.label, table.axis, table_measures.singular, sizes)
        if table_measures.frequencies is not None:
            norms = [each.frequencies.norms for each in control_measures if each.frequencies is not None]
            rows += frequency_rows(table, table_measures, norms, common, every)
            seen = replace(
                seen,
                frequencies=table_measures.frequencies,
                above_mean=table_measures.above_mean,
                norms_beside=np.mean(norms, 0) if norms else None,
            )
        shown.append(seen)
    return rows, shown


def vector_rows(
    table: Table,
    table_measures: MeasuredTable,
    control_measures: Sequence[MeasuredTable],
    common: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each of the first leading singular vectors."""
    for name, (frequency, share) in table_measures.vectors.items():
        others = [each.vectors[name][1] for each in control_measures if name in each.vectors]
        yield from rows_with_untrained(
            (name, f"{table.label}, frequency {frequency}", BEST), share, others, common, False
        )


def frequency_rows(
    table: Table,
    table_measures: MeasuredTable,
    control_norms: Sequence[Array],
    common: Mapping[str, Any],
    every: bool,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each frequency, unless ``every`` only for those above either bound."""
    frequencies = table_measures.frequencies
    assert frequencies is not None
    for index, norm in enumerate(frequencies.norms):
        bounds = [
            name
            for name, above in (
                ("relabelled digits", bool(frequencies.significant[index])),
                ("mean + 1 sd", index + 1 in table_measures.published),
            )
            if above
        ]
        if bounds or every:
            about = (
                f"{table.label}, above {' and '.join(bounds)}" if bounds else f"{table.label}, above neither"
            )
            more = {**common, "p_adjusted": float(frequencies.p_values[index])}
            key = (f"frequency {index + 1}", about, NORM)
            yield from rows_with_untrained(
                key, float(norm), [float(each[index]) for each in control_norms], more, False
            )


def rows_with_untrained(
    key: Key, value: float, baseline: Sequence[float], more: Mapping[str, Any], own_row: bool = True
) -> list[dict[str, Any]]:
    """Returns a row, and below it one of the untrained models (but not where ``own_row`` is false)."""
    import numpy as np

    variant, about, metric = key
    row: dict[str, Any] = {"variant": variant, "intervention": about, "metric": metric, "value": value}
    row |= {"engine": "exact", **more}
    if not baseline:
        return [row]
    middle = float(np.mean(baseline))
    row |= {"baseline": middle, "effect": value - middle}
    if not own_row:
        return [row]
    low, high = np.quantile(baseline, [(1 - RANGE) / 2, (1 + RANGE) / 2])
    other = {"variant": variant, "intervention": BESIDE + about, "metric": metric, "value": middle}
    other |= {
        "site": row["site"],
        "value_ci_low": float(low),
        "value_ci_high": float(high),
        "n": len(baseline),
    }
    return [row, {**other, "engine": "exact"}]
