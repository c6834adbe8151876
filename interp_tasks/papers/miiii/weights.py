"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models.

``variant`` says of what, ``intervention`` which part of it. The spectrum is left out for a task that has no grid of
inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from interp_tasks.measurement.table import Row, numbers
from interp_tasks.measurement.untrained import untrained

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings import Array
    from tasks import Task

#: How many untrained models stand beside a checkpoint.
MODELS = 20
#: Random orders of the digits: of the checkpoint's table, and of each untrained one's.
ORDERS, UNTRAINED_ORDERS = 999, 199
#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
PEARSON, COSINE = "Pearson correlation", "cosine similarity"
#: Chance that white noise is called periodic, and that a table in no order has a significant frequency at all.
LEVEL = 0.05
#: Shares of a sum are compared with a bound up to rounding.
ROUNDING = 1e-9
#: What ``intervention`` says of a row.
VALUES, LEADING, SPECTRUM = "singular values", "leading singular vectors", "spectrum"
PERIODIC = "periodic share"
ABOVE_MEAN, ABOVE_RELABELLED = "frequencies above mean + 1 sd", "frequencies above relabelled digits"
CONTROL = typer.Option(
    "--control", metavar="REF", help="A model to compare with, such as one of shuffled answers. Repeat."
)


@experiment("modular")
def weights(
    refs: str | Sequence[str],
    control: Annotated[str | Sequence[str], CONTROL, list[str]] = (),
    **options: Unpack[Options],
) -> Result:
    """See embeddings as tables: similar positions, singular values and vectors, frequencies over the digits.

    Beside each number (``baseline``) stands the mean of ``MODELS`` untrained models of the architecture.

    Syrkis & Søgaard 2024 (MIIII), figures 7 to 13; the spectrum also Nanda et al. 2023, figure 3. Examples play no
    part.

    Args:
        refs: one or several REFs.
        control: REFs of models to compare them with, such as one trained on shuffled answers: rows of their own.
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
    untrained_of: dict[Any, list[Tables]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures the embedding tables of one checkpoint, beside those of untrained models."""
        task, tables, seed = subject.task, Tables.of(subject.model), subject.seed
        assert task is not None
        # The same for all checkpoints of a run and architecture.
        key = (run_of(subject), task, *(tuple(one.shape) for one in subject.model.parameters()))
        if key not in untrained_of:
            untrained_of[key] = untrained_tables(subject)
        others = untrained_of[key]
        beside = [tables_of(task, one) for one in others]
        rows = list(position_rows(task, tables, others, seed))
        for index, table in enumerate(tables_of(task, tables)):
            baselines = [numbers_of(each[index], UNTRAINED_ORDERS, seed) for each in beside]
            for (about, metric), value in numbers_of(table, ORDERS, seed).items():
                baseline = mean_of(each[about, metric] for each in baselines)
                row = {"variant": table.label, "intervention": about, "metric": metric, "site": "embed"}
                rows.append({**row, "n": len(table.rows), **numbers(value, baseline=baseline)})
        return [{"split": WEIGHTS, "engine": "exact", **row} for row in rows]

    config = {"control": [one.label for one in controls]}
    result = measure("weights", [*examined, *controls], options, measure_checkpoint, config=config)
    has_order = bool((result.frame["intervention"] == SPECTRUM).any())
    return replace(result, notes=tuple(notes([one.label for one in controls], has_order)))


def untrained_tables(subject: LoadedCheckpoint) -> list[Tables]:
    """Returns the tables of untrained models; none for an architecture that the task cannot build."""
    try:
        return [Tables.of(untrained(subject, draw)) for draw in range(MODELS)]
    except UserError:
        return []


def numbers_of(table: Table, orders: int, seed: int) -> dict[tuple[str, str], float]:
    """Returns of a token table its singular values, and its frequencies where the rows stand in an order, by the part
    and the metric.
    """
    import numpy as np

    from circuits import fourier
    from circuits.fourier import AboveMean, key_frequencies

    left, sizes, _ = np.linalg.svd(table.rows, full_matrices=False)
    found = {(VALUES, f"vectors for {share:.0%} of S"): float(needed(sizes, share)) for share in (0.5, 0.9)}
    if table.axis is None:
        return found
    leading = periodic(left[:, : max(1, needed(sizes, 0.5))])
    published = key_frequencies(fourier.spectrum(table.rows, {"digit": len(table.rows)}), AboveMean(1))
    return found | {
        (LEADING, PERIODIC): float(leading.mean()),
        (SPECTRUM, ABOVE_MEAN): float(len(published.keys)),
        (SPECTRUM, ABOVE_RELABELLED): float(significant(table.rows, orders, seed).sum()),
    }


def notes(controls: Sequence[str], ordered: bool) -> Iterator[str]:
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
    yield f"baseline: mean of {MODELS} untrained models of the architecture."


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
            beside = [similarities(each, pair, dimensions, plain) for each in controls]
            for metric, values in similarities(table, pair, dimensions, resamples(dimensions, seed)).items():
                row = {
                    "variant": f"positions {pair[0]} and {pair[1]}",
                    "intervention": about,
                    "metric": metric,
                }
                baseline = mean_of(float(each[metric][0]) for each in beside)
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


# ---- singular values, frequencies


def needed(sizes: Array, share: float) -> int:
    """Returns the fewest leading singular values that reach a share of their sum ΣS; 0 for none."""
    import numpy as np

    grown = np.cumsum(sizes)
    return int((grown / grown[-1] < share - ROUNDING).sum()) + 1 if grown[-1] else 0


def periodic(functions: Array) -> NDArray[np.bool_]:
    """Returns which functions ``[row k]`` of the rows, taken as a cycle, have one frequency that white noise has not.

    Of white noise over p rows the share of one frequency (cos and sin together) exceeds x with probability
    (1 − x)^((p − 3)/2); at ``LEVEL`` divided by the number of frequencies (Fisher 1929, Bonferroni) that is the bound.
    """
    import numpy as np

    from circuits.fourier import spectrum

    share = spectrum(functions, {"row": len(functions)}).bands().share.numpy()
    return np.asarray(share.max(0) > periodic_above(len(functions)))


def periodic_above(rows: int) -> float:
    """Returns the share of variance at the best frequency above which a function of ``rows`` rows is periodic."""
    return float(1 - (LEVEL / (rows // 2)) ** (2 / (rows - 3))) if rows > 3 else 1.0


def significant(table: Array, draws: int, seed: int) -> NDArray[np.bool_]:
    """Returns which frequencies k = 1, 2, ... of a table ``[row d]`` no frequency of the rows in random order reaches.

    The maximum over frequencies is what is compared (Westfall and Young 1993): if the rows are exchangeable, the chance
    that any frequency is significant is ``LEVEL`` at most, whatever the table's own covariance is.
    """
    import numpy as np

    norms, strongest = norms_and_strongest(table, draws, seed)
    # Ties count against significance; rounding must not break them.
    hits = (strongest >= norms[:, None] * (1 - 1e-12)).sum(1)
    return np.asarray((1 + hits) / (1 + draws) <= LEVEL + 1e-9)


def norms_and_strongest(table: Array, draws: int, seed: int) -> tuple[Array, Array]:
    """Returns the norm of each frequency, over all dimensions, and the largest one of each random order of the rows."""
    import numpy as np

    rows = len(table)
    # The mean is in no frequency, and of a large one only rounding would be left.
    centred = table - table.mean(0)
    products = centred @ centred.T
    first, second = np.tril_indices(rows, -1)
    pairs, alone = 2 * products[first, second], np.trace(products)
    waves = autocorrelation_waves(rows)

    def norms(names: NDArray[np.int64]) -> Array:
        # ‖Σ_x w_x e^(−2πikx/p)‖² is a sum over pairs of rows, w_x · w_y cos(2πk(x − y)/p): an order only says how far
        # apart the rows of a pair are, and the dimensions are summed over once.
        apart = (names[first] - names[second]) % rows
        by_distance = np.bincount(apart, weights=pairs, minlength=rows)
        by_distance[0] += alone
        return np.asarray(np.sqrt(np.clip(waves @ by_distance, 0, None)), dtype=float)

    rng = np.random.default_rng([seed, 5])
    strongest = [norms(rng.permutation(rows)).max() for _ in range(draws)]
    return norms(np.arange(rows)), np.array(strongest, dtype=float)


def autocorrelation_waves(rows: int) -> Array:
    """Returns ``[frequency distance]``: the weight of the product of two rows at a distance in each power k ≥ 1."""
    import numpy as np

    k = np.arange(1, rows // 2 + 1)
    waves = np.cos(2 * np.pi * (np.outer(k, np.arange(rows)) % rows) / rows)
    # The highest frequency of an even period is one function, the others are two.
    functions = np.where(2 * k == rows, 1, 2)[:, None]
    return np.asarray(waves * functions / rows, dtype=float)
