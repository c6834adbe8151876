"""Embeddings as tables: similar positions, singular values and vectors, frequencies; beside untrained models.

``variant`` says of what, ``intervention`` which part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import (
    mean,
    ones_and_bootstrap_weights,
    percentile_interval,
    weighted_correlation,
)
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, path_of_run, resolve_refs
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns
from interp_tasks.measurement.token_and_position_embeddings import WEIGHTS, Embeddings, untrained_embeddings
from interp_tasks.papers.input_grid_and_answers import GridInputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from interp_tasks.measurement.token_and_position_embeddings import Array

#: How many untrained models stand beside a checkpoint.
MODELS = 20
#: Random orders of the digits: of the checkpoint's table, and of each untrained one's.
ORDERS, UNTRAINED_ORDERS = 999, 199
#: Dimensions that the published similarity of positions is over: the first ones.
PUBLISHED_DIMENSIONS = 37
#: Chance that white noise is called periodic, and that a table in no order has a significant frequency at all.
LEVEL = 0.05
#: Shares of a sum are compared with a bound up to rounding.
ROUNDING = 1e-9
CONTROL = typer.Option(
    "--control", metavar="REF", help="A model to compare with, such as one of shuffled answers. Repeat."
)


@experiment(without=("tokens", "prompts", "samples", "split"))
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
        refs: one or several REFs, of tasks with a grid of inputs.
        control: REFs of models to compare them with, such as one trained on shuffled answers: rows of their own.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples, random
            orders and untrained models.
    """
    examples = Examples.of(options)
    examined = resolve_refs(refs, examples)
    controls = resolve_refs(control, examples) if control else []
    for each in controls:
        if each.path in {one.path for one in examined}:
            raise UserError(f"--control {each.label} is a checkpoint of --ckpt too: give another model")
    untrained_of: dict[Any, list[Embeddings]] = {}

    def grid_of(subject: LoadedCheckpoint) -> GridInputs:
        return GridInputs.of(subject.task, "weights")

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures the embedding tables of one checkpoint, beside those of untrained models."""
        # The same for all checkpoints of a run and architecture.
        key = (path_of_run(subject), subject.task, *(tuple(one.shape) for one in subject.model.parameters()))
        if key not in untrained_of:
            drawn = [untrained_embeddings(subject, draw) for draw in range(MODELS)]
            untrained_of[key] = [each for each in drawn if each is not None]
        tables, inputs = [Embeddings.of(subject.model), *untrained_of[key]], grid_of(subject)
        rows = [*similarity_rows(inputs, tables, subject.seed), *token_rows(inputs, tables, subject.seed)]
        return [{"split": WEIGHTS, "engine": "exact", **row} for row in rows]

    labels = [one.label for one in controls]
    config, found = {"control": labels}, [*examined, *controls]
    result = measure("weights", found, options, measure_checkpoint, config=config, check=grid_of)
    listed = (f"Controls: {', '.join(labels)}.",) if labels else ()
    return replace(result, notes=(*listed, *NOTES))


NOTES = (
    "Similarity of positions: of the rows of W_pos, over dimensions; intervals: 95%, bootstrap over dimensions. "
    f"{PUBLISHED_DIMENSIONS} dimensions are what the published number was computed over.",
    "Vectors for a share: the fewest leading singular values that reach it, of ΣS; not centred.",
    "leading singular vectors: those for 50% of ΣS. periodic: a larger share of their variance at one frequency than "
    "white noise has at its best one with probability 0.05.",
    "frequencies above relabelled digits: a norm that no frequency of the same rows in random order reaches with "
    f"probability 0.95 ({ORDERS} orders). frequencies above mean + 1 sd: the published rule, over all frequencies with "
    "0; about a sixth of any noise is above it.",
    f"baseline: mean of {MODELS} untrained models of the architecture.",
)


# ---- of the positions and tokens of a model, and of untrained ones after it


def similarity_rows(inputs: GridInputs, tables: Sequence[Embeddings], seed: int) -> Iterator[Row]:
    """Yields Pearson and cosine of the rows of W_pos at the grid's coordinates."""
    import numpy as np

    positions = [each.positions for each in tables if each.positions is not None]
    for pair in itertools.combinations(sorted(inputs.operand_positions), 2) if positions else ():
        table, *others = positions
        for dimensions in dict.fromkeys([table.shape[1], PUBLISHED_DIMENSIONS]):
            if dimensions > table.shape[1]:
                continue
            about = "all dimensions" if dimensions == table.shape[1] else f"first {dimensions} dimensions"
            plain = np.ones((1, dimensions))
            beside = [pearson_and_cosine_of_rows(each, pair, dimensions, plain) for each in others]
            weights = ones_and_bootstrap_weights(dimensions, seed)
            for metric, values in pearson_and_cosine_of_rows(table, pair, dimensions, weights).items():
                row = {"variant": f"positions {pair[0]} and {pair[1]}", "intervention": about}
                baseline = mean([float(each[metric][0]) for each in beside]) if beside else None
                of_value = number_columns(values[0], percentile_interval(values[1:]), baseline)
                yield {**row, "metric": metric, "site": "pos_embed", "n": dimensions, **of_value}


def pearson_and_cosine_of_rows(
    table: Array, row_pair: tuple[int, int], dimensions: int, weights: Array
) -> dict[str, Array]:
    """Returns Pearson and cosine of two rows over their first dimensions, weighted ``[draws dimension]``."""
    import numpy as np

    one, other = (table[position, :dimensions] for position in row_pair)
    products = weights @ (one * other)
    scale = np.sqrt((weights @ one**2) * (weights @ other**2))
    cosine = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return {"Pearson correlation": weighted_correlation(one, other, weights), "cosine similarity": cosine}


def token_rows(inputs: GridInputs, tables: Sequence[Embeddings], seed: int) -> Iterator[Row]:
    """Yields the rows of W_E over the values of each coordinate."""
    by_values = {axis.values: axis.name for axis in inputs.axes}
    for values, name in by_values.items():
        label = "W_E" if len(by_values) == 1 else f"W_E ({name})"
        table, *others = (each.tokens[list(values)] for each in tables)
        beside = [svd_and_frequency_metrics(each, UNTRAINED_ORDERS, seed) for each in others]
        for (about, metric), value in svd_and_frequency_metrics(table, ORDERS, seed).items():
            baseline = mean([each[about, metric] for each in beside]) if beside else None
            row = {"variant": label, "intervention": about, "metric": metric, "site": "embed"}
            yield {**row, "n": len(table), **number_columns(value, baseline=baseline)}


def svd_and_frequency_metrics(table: Array, orders: int, seed: int) -> dict[tuple[str, str], float]:
    """Returns of a token table ``[digit d]`` its singular values and frequencies, by the part and the metric."""
    import numpy as np

    from circuits.fourier import key_frequencies, spectrum

    left, sizes, _ = np.linalg.svd(table, full_matrices=False)
    found = {
        ("singular values", f"vectors for {share:.0%} of S"): float(vectors_for_share(sizes, share))
        for share in (0.5, 0.9)
    }
    leading = are_periodic(left[:, : max(1, vectors_for_share(sizes, 0.5))])
    published = key_frequencies(spectrum(table, {"digit": len(table)}), "above-mean")
    return found | {
        ("leading singular vectors", "periodic share"): float(leading.mean()),
        ("spectrum", "frequencies above mean + 1 sd"): float(len(published.keys)),
        ("spectrum", "frequencies above relabelled digits"): float(
            significant_frequencies(table, orders, seed).sum()
        ),
    }


def vectors_for_share(sizes: Array, share: float) -> int:
    """Returns the fewest leading singular values that reach a share of their sum ΣS; 0 for none."""
    import numpy as np

    grown = np.cumsum(sizes)
    return int((grown / grown[-1] < share - ROUNDING).sum()) + 1 if grown[-1] else 0


def are_periodic(functions: Array) -> NDArray[np.bool_]:
    """Returns which functions ``[row k]`` of the rows, taken as a cycle, have one frequency that white noise has not.

    Of white noise over p rows the share of one frequency (cos and sin together) exceeds x with probability
    (1 − x)^((p − 3)/2); at ``LEVEL`` divided by the number of frequencies (Fisher 1929, Bonferroni) that is the bound.
    """
    import numpy as np

    from circuits.fourier import spectrum

    share = spectrum(functions, {"row": len(functions)}).bands().share.numpy()
    return np.asarray(share.max(0) > periodic_share_threshold(len(functions)))


def periodic_share_threshold(rows: int) -> float:
    """Returns the share of variance at the best frequency above which a function of ``rows`` rows is periodic."""
    return float(1 - (LEVEL / (rows // 2)) ** (2 / (rows - 3))) if rows > 3 else 1.0


def significant_frequencies(table: Array, draws: int, seed: int) -> NDArray[np.bool_]:
    """Returns which frequencies k = 1, 2, ... of a table ``[row d]`` no frequency of the rows in random order reaches.

    The maximum over frequencies is what is compared (Westfall and Young 1993): if the rows are exchangeable, the chance
    that any frequency is significant is ``LEVEL`` at most, whatever the table's own covariance is.
    """
    import numpy as np

    norms = true_and_shuffled_norms(table, draws, seed)
    # Ties count against significance; rounding must not break them.
    hits = (norms[1:].max(1)[:, None] >= norms[0] * (1 - 1e-12)).sum(0)
    return np.asarray((1 + hits) / (1 + draws) <= LEVEL + 1e-9)


def true_and_shuffled_norms(table: Array, draws: int, seed: int) -> Array:
    """Returns the norm over all dimensions of each frequency, of the rows and of random orders, ``[1 + draws, k]``."""
    import numpy as np
    import torch

    from interp_tasks.papers.miiii.active_frequencies import relabelled_powers

    rng = np.random.default_rng([seed, 5])
    orders = [np.arange(len(table)), *(rng.permutation(len(table)) for _ in range(draws))]
    # The mean is in no frequency, and of a large one only rounding would be left.
    centred = table - table.mean(0)
    found = relabelled_powers(
        torch.from_numpy(centred @ centred.T)[..., None], [torch.from_numpy(order) for order in orders]
    )
    return np.asarray(found[..., 0].sqrt())
