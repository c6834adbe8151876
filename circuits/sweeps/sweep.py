"""Runs many interventions on the same examples and compares them with the unedited model, in one table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import planned
from circuits.interventions.variants import Draws
from circuits.model.inputs import read_prompts
from circuits.model.padding import refuse_padding
from circuits.model.surface import Surface
from circuits.statistics import Resampling
from circuits.sweeps.answers import LogitDifference, bound
from circuits.sweeps.checkpoints import measure_checkpoints, read_checkpoints
from circuits.sweeps.measure import Measurements, SweepInputs, Variant
from circuits.sweeps.metrics import (
    UNTESTED,
    called,
    metric_name,
    own_positions,
    read_metric,
    read_values,
    unedited_metrics,
)
from circuits.sweeps.table import (
    BASELINE,
    Comparison,
    Measured,
    Row,
    SweepResult,
    adjust,
    make_result,
    tabulate,
)
from circuits.tensors import Snapshot, parse_positions, select_positions
from circuits.validate import is_whole, read_batch, read_choice, read_seed

# Tokens per forward under chunk="auto". On two cores the time does not depend on it between 512 and 16384; what the
# clean pass of the fast engine keeps does: at d_model 768, 75 MB per layer.
AUTO_CHUNK = 8192


def sweep(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    variants: Mapping[str, Any],
    metric: Any = None,
    batch: Any = None,
    engine: str = "auto",
    chunk: int | str = "auto",
    positions: Any = None,
    checkpoints: Any = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Runs every variant on the same tokens and compares each with the unedited model.

    Args:
        tokens: ids [batch pos], or anything that `prompts` takes. Where prompts have padding it is masked, each example
            counts its positions in its own tokens, and the output at padding is NaN, so that a metric that reads there
            fails.
        variants: name -> an intervention, a tuple of them that act together, or `Draws` of one; `ablate.each` and
            `grid` make such dicts. Draws get a row each, after one that pools them.
        metric: `fn(output)`, or `fn(output, batch[rows])` where `batch` is given (it has len() and takes a slice). It
            gets copies of its own, is called once per variant and chunk, and returns a value per example [n], a pair
            (sum [n], count [n]), or a dict of those. Pairs are pooled as Σsum/Σcount over examples. Without a metric:
            `kl` (nats) and `mse` from the unedited output, which have no p-value, and `logit_diff`, of the unedited
            model's two highest logits: means over all positions read but padding. `logit_difference` makes a metric of
            given answers.
        engine: "naive", one full forward per variant with plain hooks; "fast", one clean pass, then each variant from
            its first edit on, many of them stacked; "auto", fast where it can. The column `engine` says which it was,
            and `settings["naive"]` why, by variant: weights are edited, there are hooks on the model, prompts have
            padding, it is not a plain pre-norm transformer of the library's own code, or the replay of a chunk differed
            from the model's own.
        chunk: tokens per forward, of one example and variant at least. Results depend on it by rounding only.
        positions: the positions the metric reads. The output everywhere else is set to NaN, so that a metric that reads
            there fails. Default: `read_positions` of the metric, or of the task whose method it is, else all.
        checkpoints: label -> a model, a state_dict that is loaded into `model` for it, or a function that returns one
            of these; every variant is run at each, and compared with that checkpoint unedited. Pairs (label, model)
            may also come from an iterator, one at a time. Default: `model` itself.
        seed: of the bootstrap over examples (95% percentile intervals, `draws` resamples shared by all variants) and of
            the sign-flip test (at most `flips` flips; exact where 2^n is no more than that).
        draws: see `seed`.
        flips: see `seed`.

    Inside a block of `intervene`, the edits of that block belong to the model that is compared with, while
    clean passes still run without them. Raises `CircuitsError` before any run for variants, batch or
    arguments that do not fit, and after the first one for a metric that returns another shape or a value
    that is not finite.
    """
    return swept(
        model,
        tokens,
        variants,
        metric,
        batch=batch,
        engine=engine,
        chunk=chunk,
        positions=positions,
        checkpoints=checkpoints,
        seed=seed,
        draws=draws,
        flips=flips,
        keep=False,
    )[0]


def swept(
    model: Any,
    tokens: Any,
    variants: Any,
    metric: Any,
    *,
    batch: Any = None,
    engine: str = "auto",
    chunk: int | str = "auto",
    positions: Any = None,
    checkpoints: Any = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
    keep: bool = True,
) -> tuple[SweepResult, list[Measurements]]:
    """Returns the result of `sweep`, and with `keep`, for each checkpoint, the values of every example behind it."""
    surface = Surface.of(model)
    read_choice(engine, ("auto", "fast", "naive"), "sweep", "engine")
    seed = read_seed(seed, "sweep")
    prompts = read_prompts(surface, tokens, "sweep")
    surface.check_prompts(prompts, "sweep: tokens")
    metric, batch = bound(metric, batch, surface, prompts, "sweep")
    read = parse_positions(own_positions(metric) if positions is None else positions, "sweep, positions")
    if isinstance(read, Snapshot):
        raise CircuitsError(
            "sweep, positions: the same positions are read in every example; got a mask [batch pos]"
        )
    if read is not None:
        select_positions(read, prompts.shape[1], "sweep, positions", prompts.real if prompts.padded else None)
    if metric is None:
        used = torch.ones(prompts.shape[1], dtype=torch.bool)
        used = used if read is None else select_positions(read, prompts.shape[1], "sweep, positions")
        refuse_padding(surface, prompts, used.expand(prompts.shape[:2]), "sweep, without metric=")
    batch = read_batch(batch, "sweep")
    size = _read_chunk(prompts.tokens, batch, chunk)
    inputs = SweepInputs(prompts, metric, batch, read, max(1, size // prompts.tokens[0].numel()), size)
    if metric is not None:
        read_metric(metric, batch is not None)
    if not all(is_whole(count) and 0 < count <= 10**7 for count in (draws, flips)):
        raise CircuitsError(
            f"sweep: draws and flips are positive numbers up to 10**7, got {draws} and {flips}"
        )
    settings: dict[str, Any] = {
        "seed": seed,
        "draws": draws,
        "flips": flips,
        "chunk": chunk,
        "n": len(prompts),
    }
    settings |= {"words": prompts.labels()} if prompts.words is not None else {}
    settings |= {"positions": None if read is None else list(read), "engine": engine, "naive": {}}
    settings |= {"bytes": 0, "stacked": 1}
    untested: Collection[str] = UNTESTED if metric is None else ()

    described = _described(_read_variants(variants, surface))
    rows: list[Row] = []
    unedited: list[Row] = []
    kept: list[Measurements] = []
    read_them = partial(_read_variants, variants)
    resampling = Resampling(seed, draws, flips)
    for measured_together in measure_checkpoints(
        read_checkpoints(checkpoints, surface), read_them, inputs, engine
    ):
        for variant_rows, baseline_rows in _tables(measured_together, resampling, untested):
            rows += variant_rows
            unedited += baseline_rows
        for _, measurements in measured_together:
            if keep:
                kept.append(measurements)
            settings["naive"] |= measurements.naive
            settings["bytes"] = max(settings["bytes"], measurements.nbytes)
            settings["stacked"] = max(settings["stacked"], measurements.stacked)
    if not rows:
        raise CircuitsError("sweep: no checkpoints; give a dict of labels and models or state_dicts")
    adjust(rows)
    return make_result(rows, unedited, described, settings), kept


def _tables(
    measured_together: Sequence[tuple[str | None, Measurements]],
    resampling: Resampling,
    untested: Collection[str],
) -> Iterator[tuple[list[Row], list[Row]]]:
    """Yields, for each checkpoint, the rows of its variants in their given order, and those of the unedited model."""
    comparisons = [
        Comparison(group.baseline, group.measured, group.engine, label)
        for label, measurements in measured_together
        for group in measurements.groups
    ]
    tables = iter(tabulate(comparisons, resampling, untested))
    for _, measurements in measured_together:
        rows: list[Row] = []
        unedited: list[Row] = []
        for variant_rows, baseline_rows in islice(tables, len(measurements.groups)):
            rows += variant_rows
            unedited = baseline_rows
        order = {name: place for place, name in enumerate(measurements.names)}
        rows.sort(key=lambda row: order[row["variant"]])
        yield rows, unedited


def _read_variants(variants: Mapping[str, Any], surface: Surface) -> list[Variant]:
    if not isinstance(variants, Mapping) or not variants:
        raise CircuitsError("sweep: no variants; give a dict of names and interventions")
    parsed: list[Variant] = []
    names: set[str] = set()
    for name, given in variants.items():
        is_draws = isinstance(given, Draws)
        if str(name) in names:
            raise CircuitsError(f"sweep: two variants are called {str(name)!r} in the table")
        names.add(str(name))
        for draw, one in enumerate(given.interventions if isinstance(given, Draws) else (given,)):
            together = tuple(one) if isinstance(one, tuple | list) else (one,)
            if not together:
                raise CircuitsError(f"sweep: variant {name!r} has no intervention")
            try:
                plan = planned(together, surface)
            except CircuitsError as error:
                raise CircuitsError(f"variant {name!r}: {error}") from error
            parsed.append(Variant(str(name), draw if is_draws else None, together, plan))
    return parsed


def _described(variants: list[Variant]) -> dict[str, list[Row]]:
    descriptions: dict[str, list[Row]] = {}
    for variant in variants:
        descriptions.setdefault(variant.name, []).extend(one.describe() for one in variant.interventions)
    return descriptions


def _read_chunk(tokens: Tensor, batch: Any, chunk: int | str) -> int:
    """Returns the number of tokens per forward."""
    if batch is not None and len(batch) != len(tokens):
        raise CircuitsError(f"sweep: tokens have {len(tokens)} examples, batch has {len(batch)}")
    if isinstance(chunk, str) and chunk == "auto":
        chunk = AUTO_CHUNK
    if not is_whole(chunk) or int(chunk) < 1:
        raise CircuitsError(
            f'sweep: chunk={chunk!r}; give "auto" or a number of tokens per forward, at least 1'
        )
    return int(chunk)


def compare(
    parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    metric: Any = None,
    batch: Any = None,
    columns: Mapping[str, Row] | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Makes the table of a `sweep` from outputs that other code has computed: a read-out, a lens, code of your own.

        compare([(model(tokens), {"doubled": 2 * model(tokens)})], metric=metric)

    Args:
        parts: for consecutive chunks of examples, the unedited output [n pos out] and, by variant, the outputs to
            compare with it. One chunk is in memory at a time.
        metric: as in `sweep`; batch covers the examples of all chunks.
        batch: see `metric`.
        seed: see `metric`.
        draws: see `metric`.
        flips: see `metric`.
        columns: by variant, its values in the columns intervention, site, layer, head, position.

    Raises `CircuitsError` for chunks with different variants, and for what `sweep` refuses of a metric.
    """
    seed, batch = read_seed(seed, "compare"), read_batch(batch, "compare")
    if metric is not None and not isinstance(metric, LogitDifference):
        read_metric(metric, batch is not None)
    baseline = Measured(BASELINE, {})
    measured: dict[str, Measured] = {}
    done = 0
    for clean, outputs in parts:
        example_rows = slice(done, done + len(clean))
        done = example_rows.stop
        if baseline.parts and list(outputs) != list(measured):
            raise CircuitsError(
                f"compare: a lot has {', '.join(outputs)}; the first had {', '.join(measured)}"
            )
        for name, output in {BASELINE: clean, **outputs}.items():
            if output.shape != clean.shape:
                raise CircuitsError(
                    f"compare: {name} is {list(output.shape)}, the unedited {list(clean.shape)}"
                )
            if metric is None:
                values: Any = unedited_metrics(output, clean)
            elif isinstance(metric, LogitDifference):
                values = metric.at(example_rows)(output)
            else:
                values = called(metric, output, None if batch is None else batch[example_rows])
            about = {"variant": name, **(columns or {}).get(name, {})}
            one = baseline if name == BASELINE else measured.setdefault(name, Measured(name, about))
            one.parts.append(read_values(values, metric_name(metric), len(output), name))
    if not measured or (batch is not None and len(batch) != done):
        got = "no outputs" if not measured else f"{done} examples, batch has {len(batch)}"
        raise CircuitsError(f"compare: {got}; give the unedited output and others, of all examples")
    settings = {"seed": seed, "draws": draws, "flips": flips, "engine": "given", "n": done}
    untested: Collection[str] = UNTESTED if metric is None else ()
    given = Comparison(baseline, list(measured.values()), "given")
    [(rows_with_p, unedited)] = tabulate([given], Resampling(seed, draws, flips), untested)
    adjust(rows_with_p)
    return make_result(rows_with_p, unedited, {}, settings)
