"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.arguments import checked
from interp_tasks.experiments.embedding import WEIGHTS, Tables, interval, resamples, run_of
from interp_tasks.experiments.measuring import Found, measure
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.subjects import Examples, Options, Subject, check_refs
from interp_tasks.experiments.untrained import untrained as untrained_model
from interp_tasks.reporting import Figure, Page

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from interp_tasks.experiments.geometry import Array
    from interp_tasks.experiments.relabelling import Relabelled
    from interp_tasks.experiments.singular import Singular
    from tasks import Task

#: How many untrained models stand beside a checkpoint, and the share of them that their range holds.
MODELS, RANGE = 20, 0.95
#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
#: Random orders of the digits: of the checkpoint's table, and of each untrained one's.
ORDERS, FEWER_ORDERS = 999, 199
#: Singular vectors that have a row of their own, at most.
VECTORS = 8
#: What ``intervention`` says of a row.
POSITIONS, VALUES, LEADING, SPECTRUM = "positions", "singular values", "leading singular vectors", "spectrum"
#: How it begins where the row is of the untrained models.
BESIDE = "untrained: "
PEARSON, COSINE = "Pearson correlation", "cosine similarity"
PERIODIC, BEST = "periodic share", "share at the best frequency"
ABOVE_MEAN, ABOVE_RELABELLED = "frequencies above mean + 1 sd", "frequencies above relabelled digits"
NINETY, GINI, NORM = "frequencies for 90% of the variance", "Gini coefficient of the components", "norm"

#: Of a row: variant, intervention, metric.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Table:
    """A token table ``[row d]``; ``axis`` names the coordinate whose values its rows are in order, if they are."""

    label: str
    rows: Array
    axis: str | None


@dataclass(frozen=True)
class Seen:
    """What figures show of one table of a checkpoint.

    Attributes:
        label, axis: of the table.
        singular, beside: the checkpoint's, and the mean singular values of untrained models.
        frequencies: the checkpoint's, where rows stand in an order.
        above_mean: the published threshold of their norms; ``norms_beside`` the mean norms of untrained models.
    """

    label: str
    axis: str | None
    singular: Singular
    beside: Array | None
    frequencies: Relabelled | None = None
    above_mean: float = 0.0
    norms_beside: Array | None = None


@dataclass(frozen=True)
class Shown:
    """What figures show of one checkpoint: its tables, the compared rows of W_pos by name, and every weight."""

    tables: tuple[Seen, ...]
    positions: Mapping[str, tuple[Array, Array]]
    weights: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class WeightsResult(Result):
    """A :class:`Result` with what its figures show, by REF."""

    shown: Mapping[str, Shown] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Of one checkpoint (default: the first): positions, singular values and vectors, spectrum."""
        from interp_tasks.experiments.weight_plots import overview

        ref = next(iter(self.shown)) if ref is None else ref
        return self.titled(overview(ref, self.shown[ref]), f"Embeddings, {ref}")

    def maps(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Of one checkpoint (default: the first): every weight tensor as a heat map."""
        from interp_tasks.experiments.weight_plots import heatmaps

        ref = next(iter(self.shown)) if ref is None else ref
        if not self.shown[ref].weights:
            raise UserError(f"{ref}: every weight is 0, there is no map to draw")
        return heatmaps(ref, self.shown[ref].weights)

    def page(self, title: str | None = None) -> Page:
        """Both figures of every checkpoint, and the table."""
        page = super().page(title or "weights")
        figures = []
        for ref in self.shown:
            drawn = [(self.plot(ref), f"Embeddings, {ref}", self.caption())]
            if self.shown[ref].weights:
                drawn.append((self.maps(ref), f"Weights, {ref}", MAPS))
            for figure, name, caption in drawn:
                figures.append(Figure(figure, name, caption, height=int(figure.layout.height)))
        return Page(page.title, [*figures, *page.sections[1:]], page.config, page.versions)

    def caption(self) -> str:
        return (
            "Singular values: the marks say how many reach 50% and 90% of their sum. Spectrum: norms by frequency, in "
            "the second colour above those of relabelled digits. Dotted: the mean of untrained models."
        )


MAPS = "Every tensor that is not 0 throughout, in 255 steps from minus to plus its largest entry; heads side by side."


@checked
def weights(
    refs: str | Sequence[str],
    control: str | Sequence[str] = (),
    *,
    untrained: bool = True,
    every: bool = False,
    **options: Unpack[Options],
) -> WeightsResult:
    """Measure the embeddings as tables: similarity of positions, singular values and vectors, Fourier spectrum.

    Syrkis & Søgaard 2024 (MIIII), figures 7 to 13 and 23 to 26; the spectrum also Nanda et al. 2023, figure 3.
    Examples play no part.

    Args:
        refs: one or several REFs.
        control: REFs of models to compare them with, such as one trained on shuffled answers: rows of their own.
        untrained: compare with ``MODELS`` untrained models of the architecture: ``baseline`` is their mean, and a row
            more has it with the range of 95% of them.
        every: a row for every frequency, also where it is not significant.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples, random
            orders and untrained models.

    Returns:
        A :class:`WeightsResult`; ``variant`` says of what, ``intervention`` which part of it. The spectrum is left out
        for a task that has no grid of inputs.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    if options.get("tokens") is not None:
        raise UserError("weights needs a task that says what its tokens stand for: leave --tokens out")
    mine, controls = ([given] if isinstance(given, str) else list(given) for given in (refs, control))
    check_control(mine, controls, Examples.of(options))
    shown: dict[str, Shown] = {}
    beside: dict[Any, list[Tables]] = {}
    ordered: dict[bool, None] = {}

    def look(subject: Subject) -> Found:
        import pandas

        task = subject.task
        assert task is not None
        if untrained:
            key = (run_of(subject), task, *(tuple(one.shape) for one in subject.model.parameters()))
            if key not in beside:
                beside[key] = [Tables.of(untrained_model(subject, draw)) for draw in range(MODELS)]
            others = beside[key]
        else:
            others = []
        own = Tables.of(subject.model)
        tables = tables_of(task, own)
        ordered.update(dict.fromkeys(table.axis is not None for table in tables))
        rows, seen = of_tables(tables, [tables_of(task, one) for one in others], subject.seed, every)
        found, compared = of_positions(task, own, others, subject.seed)
        shown[str(subject.labels["ref"])] = Shown(tuple(seen), compared, raw(subject.model))
        return Found(pandas.DataFrame([*found, *rows]), {})

    config = {"control": controls, "untrained": untrained, "every": every}
    result = measure("weights", [*mine, *controls], options, look, config=config)
    frame = result.frame.assign(split=WEIGHTS)
    # No run trained these.
    frame.loc[frame["intervention"].str.startswith(BESIDE), "n_runs"] = 0
    return WeightsResult(
        **{
            **vars(result),
            "frame": frame,
            "notes": tuple(notes(controls, untrained, every, True in ordered)),
        },
        shown=shown,
    )


def notes(controls: Sequence[str], untrained: bool, every: bool, ordered: bool) -> Iterator[str]:
    if controls:
        yield f"Controls: {', '.join(controls)}."
    yield (
        "Similarity of positions: of the rows of W_pos, over dimensions; intervals: 95%, bootstrap over dimensions. "
        f"{PUBLISHED_DIMENSIONS} dimensions are what the published number was computed over."
    )
    yield "Vectors for a share: the fewest leading singular values that reach it, of ΣS or of ΣS²; not centred."
    if ordered:
        yield (
            f"{LEADING}: those for 50% of ΣS. periodic: a larger share of their variance at one frequency than white "
            "noise has at its best one with probability 0.05."
        )
        yield (
            f"{ABOVE_RELABELLED}: a norm that no frequency of the same rows in random order reaches with probability "
            f"0.95 ({ORDERS} orders); p adj. of a frequency is that test's. {ABOVE_MEAN}: the published rule, over "
            "all frequencies with 0; about a sixth of any noise is above it."
        )
        if not every:
            yield "Of the frequencies those above either bound have rows; --every shows all."
    else:
        yield "No spectrum: the task has no grid of inputs (grid_axes) whose values would put tokens in an order."
    if untrained:
        yield f"untrained: mean of {MODELS} untrained models of the architecture, with the range of 95% of them."


def check_control(refs: Sequence[str], controls: Sequence[str], examples: Examples) -> None:
    """Refuse a control that is the checkpoint itself."""
    if not controls:
        return
    named = {each.resolved.path for each in check_refs(refs, examples)}
    for each in check_refs(controls, examples):
        if each.resolved.path in named:
            raise UserError(f"--control {each.label} is a checkpoint of --ckpt too: give another model")


def tables_of(task: Task, held: Tables) -> list[Table]:
    """The rows of W_E for each coordinate of the grid of inputs; without one, for the values that tokens stand for."""
    by_values = {axis.values: axis.name for axis in task.grid_axes() if axis.position is not None}
    if by_values:
        one = len(by_values) == 1
        return [
            Table("W_E" if one else f"W_E ({name})", held.tokens[list(values)], "digit" if one else name)
            for values, name in by_values.items()
        ]
    values = task.token_values()
    used = sorted(values, key=lambda token: values[token]) or list(range(len(held.tokens)))
    return [Table("W_E", held.tokens[used], None)]


def pairs_of(task: Task, positions: int) -> list[tuple[int, int]]:
    """The positions compared: those of the grid's coordinates, else the first two."""
    places = sorted({axis.position for axis in task.grid_axes() if axis.position is not None}) or [0, 1]
    return [pair for pair in itertools.combinations(places, 2) if pair[1] < positions]


def of_positions(
    task: Task, own: Tables, others: Sequence[Tables], seed: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[Array, Array]]]:
    """Rows of the similarity of positions, and the compared rows of W_pos; nothing of a model without a table."""
    import numpy as np

    if own.positions is None:
        return [], {}
    rows: list[dict[str, Any]] = []
    compared = {}
    for one, other in pairs_of(task, len(own.positions)):
        name = f"positions {one} and {other}"
        compared[name] = (own.positions[one], own.positions[other])
        for dimensions in dict.fromkeys([own.positions.shape[1], PUBLISHED_DIMENSIONS]):
            if dimensions > own.positions.shape[1]:
                continue
            whole = dimensions == own.positions.shape[1]
            about = "all dimensions" if whole else f"first {dimensions} dimensions"
            drawn = similarities(own.positions, (one, other), dimensions, resamples(dimensions, seed))
            plain = np.ones((1, dimensions))
            beside = [
                similarities(each.positions, (one, other), dimensions, plain)
                for each in others
                if each.positions is not None
            ]
            for metric, values in drawn.items():
                low, high = interval(values[1:])
                row = {"site": "pos_embed", "n": dimensions, "ci_low": low, "ci_high": high}
                key = (name, about, metric)
                rows += both(key, float(values[0]), [float(each[metric][0]) for each in beside], row)
    return rows, compared


def similarities(table: Array, pair: tuple[int, int], dimensions: int, weights: Array) -> dict[str, Array]:
    """Pearson and cosine of two rows over their first dimensions, weighted ``[draws dimension]``; by metric."""
    import numpy as np

    from interp_tasks.experiments.geometry import correlation

    one, other = (table[place, :dimensions] for place in pair)
    products = weights @ (one * other)
    scale = np.sqrt((weights @ one**2) * (weights @ other**2))
    cosine = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return {PEARSON: correlation(one, other, weights), COSINE: cosine}


def both(
    key: Key, value: float, beside: Sequence[float], more: Mapping[str, Any], own_row: bool = True
) -> list[dict[str, Any]]:
    """A row, and below it one of the untrained models (but not where ``own_row`` is false)."""
    import numpy as np

    variant, about, metric = key
    row: dict[str, Any] = {"variant": variant, "intervention": about, "metric": metric, "value": value}
    row |= {"engine": "exact", **more}
    if not beside:
        return [row]
    middle = float(np.mean(beside))
    row |= {"baseline": middle, "effect": value - middle}
    if not own_row:
        return [row]
    low, high = np.quantile(beside, [(1 - RANGE) / 2, (1 + RANGE) / 2])
    other = {"variant": variant, "intervention": BESIDE + about, "metric": metric, "value": middle}
    other |= {"site": row["site"], "ci_low": float(low), "ci_high": float(high), "n": len(beside)}
    return [row, {**other, "engine": "exact"}]


@dataclass(frozen=True)
class Measured:
    """One table, measured: numbers by key, and what they were read off."""

    numbers: dict[Key, float]
    singular: Singular
    vectors: dict[str, tuple[int, float]]
    frequencies: Relabelled | None
    above_mean: float
    published: frozenset[int]


def measured(table: Table, orders: int, seed: int) -> Measured:
    """Every number of one table."""
    from interp_tasks.experiments.relabelling import relabelled
    from interp_tasks.experiments.singular import Singular, periodicity

    singular = Singular.of(table.rows)
    numbers: dict[Key, float] = {}
    for sum_of, power in (("S", 1), ("S²", 2)):
        for share in (0.5, 0.9):
            metric = f"vectors for {share:.0%} of {sum_of}"
            numbers[table.label, VALUES, metric] = float(singular.needed(share, power))
    numbers[table.label, VALUES, "effective rank"] = singular.effective_rank
    if table.axis is None:
        return Measured(numbers, singular, {}, None, 0.0, frozenset())
    leading = singular.vectors[:, : max(1, singular.needed(0.5))]
    found = periodicity(leading)
    numbers[table.label, LEADING, PERIODIC] = float(found.periodic.mean())
    numbers[table.label, LEADING, BEST] = float(found.share.mean())
    vectors = {
        f"vector {k + 1}": (int(found.frequency[k]), float(found.share[k]))
        for k in range(min(VECTORS, len(found.share)))
    }
    frequencies = relabelled(table.rows, orders, seed)
    of_spectrum, bound, published = spectral_numbers(table.rows)
    numbers |= {(table.label, SPECTRUM, metric): value for metric, value in of_spectrum.items()}
    numbers[table.label, SPECTRUM, ABOVE_RELABELLED] = float(frequencies.significant.sum())
    return Measured(numbers, singular, vectors, frequencies, bound, published)


def spectral_numbers(rows: Array) -> tuple[dict[str, float], float, frozenset[int]]:
    """Numbers of a table's spectrum by metric, the published bound of its norms, and the frequencies above it."""
    import numpy as np

    from circuits.fourier import AboveMean, gini, key_frequencies, spectrum, transform

    found = spectrum(rows, {"digit": len(rows)})
    published = frozenset(int(key) for key in key_frequencies(found, AboveMean(1)).keys)  # type: ignore[arg-type]  # of one coordinate frequencies are numbers
    norms = np.sqrt(found.total().power.numpy() * len(rows))
    power = np.sort(norms[1:] ** 2)[::-1]
    grown = np.cumsum(power)
    many = int((grown < 0.9 * grown[-1] * (1 - 1e-9)).sum()) + 1 if grown[-1] else 0
    numbers = {
        ABOVE_MEAN: float(len(published)),
        NINETY: float(many),
        GINI: gini(transform(rows).norm(dim=1)),
    }
    # As the rule has it: in the transform frequency 0 counts √2-fold beside cos and sin together.
    sizes = np.concatenate([norms[:1] * np.sqrt(2), norms[1:]])
    return numbers, float(sizes.mean() + sizes.std()), published


def of_tables(
    tables: Sequence[Table], others: Sequence[Sequence[Table]], seed: int, every: bool
) -> tuple[list[dict[str, Any]], list[Seen]]:
    """Rows of token tables, each beside the same table of other models, and what figures show of them."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    shown = []
    for place, table in enumerate(tables):
        own = measured(table, ORDERS, seed)
        beside = [measured(each[place], FEWER_ORDERS, seed) for each in others]
        common = {"site": "embed", "n": len(table.rows)}
        for key, value in own.numbers.items():
            rows += both(key, value, [each.numbers[key] for each in beside], common)
            if key[1:] == (LEADING, BEST):
                rows += vector_rows(table, own, beside, common)
        sizes = np.mean([each.singular.values for each in beside], 0) if beside else None
        seen = Seen(table.label, table.axis, own.singular, sizes)
        if own.frequencies is not None:
            norms = [each.frequencies.norms for each in beside if each.frequencies is not None]
            rows += frequency_rows(table, own, norms, common, every)
            seen = Seen(
                **{
                    **vars(seen),
                    "frequencies": own.frequencies,
                    "above_mean": own.above_mean,
                    "norms_beside": np.mean(norms, 0) if norms else None,
                }
            )
        shown.append(seen)
    return rows, shown


def vector_rows(
    table: Table, own: Measured, beside: Sequence[Measured], common: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each of the first leading singular vectors."""
    for name, (frequency, share) in own.vectors.items():
        others = [each.vectors[name][1] for each in beside if name in each.vectors]
        yield from both((name, f"{table.label}, frequency {frequency}", BEST), share, others, common, False)


def frequency_rows(
    table: Table, own: Measured, beside: Sequence[Array], common: Mapping[str, Any], every: bool
) -> Iterator[dict[str, Any]]:
    """A row for each frequency, unless ``every`` only for those above either bound."""
    found = own.frequencies
    assert found is not None
    for place, norm in enumerate(found.norms):
        bounds = [
            name
            for name, above in (
                ("relabelled digits", bool(found.significant[place])),
                ("mean + 1 sd", place + 1 in own.published),
            )
            if above
        ]
        if bounds or every:
            about = (
                f"{table.label}, above {' and '.join(bounds)}" if bounds else f"{table.label}, above neither"
            )
            more = {**common, "p_adjusted": float(found.p_values[place])}
            key = (f"frequency {place + 1}", about, NORM)
            yield from both(key, float(norm), [float(each[place]) for each in beside], more, False)


def raw(model: Any) -> dict[str, NDArray[np.float32]]:
    """Every weight that is not 0 throughout, as a matrix: heads side by side, a vector as one row."""
    found = {}
    for name, weight in model.named_parameters():
        values = weight.detach().float().cpu()
        if not values.any():
            continue
        kind = name.rsplit(".", 1)[-1]
        if values.ndim == 3:
            # [head d_model d_head] of what reads the residual stream, [head d_head d_model] of W_O.
            values = values.flatten(0, 1) if kind == "W_O" else values.permute(1, 0, 2).flatten(1)
        found[name] = values.reshape(-1, values.shape[-1]).numpy() if values.ndim != 2 else values.numpy()
    return found
