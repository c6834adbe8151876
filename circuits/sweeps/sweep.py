"""Runs many interventions on the same examples and compares them with the unedited model, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.engine.stacked import Variant
from circuits.errors import CircuitsError, format_value, prefixed
from circuits.interventions.apply import planned
from circuits.interventions.grids import Draws
from circuits.model.edit_state import exclusive
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import parse_prompts
from circuits.model.prompts import Prompts
from circuits.model.types import MetricLike, PositionsLike, TokensLike
from circuits.statistics import Resampling
from circuits.sweeps.logit_difference import LogitDifference
from circuits.sweeps.metrics import BASELINE, Measurements, Metric, Row
from circuits.sweeps.model_sweep import ModelSweep
from circuits.sweeps.table import SweepResult, parse_resampling, tabulate
from circuits.validate import answers_former_names, by_text, parse_choice


@answers_former_names
def sweep(
    model: nn.Module,
    tokens: TokensLike,
    variants: Mapping[str, Any],
    metric: MetricLike = None,
    batch: Any = None,
    engine: str = "auto",
    batch_size: int | None = None,
    positions: PositionsLike = None,
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
            gets copies of its own, is called once per variant and chunk of examples, and returns a value per example
            [n], a pair (sum [n], count [n]), pooled as Σsum/Σcount, or a dict of those. Without a metric: `kl` (nats)
            and `mse` from the unedited output, which have no p-value, and `logit_diff`, of the unedited model's two
            highest logits: means over all positions read but padding.
        engine: "auto", many variants in each forward of the model's own blocks where that can be; "naive", a forward
            with plain hooks for each. The column `engine` says which it was, `settings["naive"]` why.
        batch_size: rows (examples × variants) in a forward; results depend on it by rounding only. Default: a bound on
            tokens and on numbers in memory; halved where an accelerator has no room for them.
        positions: the positions the metric reads; the output is NaN everywhere else. Default: `read_positions` of the
            metric, or of the task whose method it is, else all.
        seed: of the bootstrap over examples (95% percentile intervals) and of the sign-flip test.
        draws: resamples of the bootstrap, shared by all variants.
        flips: the most flips of the sign-flip test, which is exact where 2^n is no more than that.

    Inside a block of `intervene`, the edits of that block belong to the model that is compared with, while clean passes
    still run without them. Sweeps of several models (checkpoints, seeds) are one table by `SweepResult.concat`.

    Raises:
        CircuitsError: before any run for variants, batch or arguments that do not fit, and after the first one for a
            metric that returns another shape or a value that is not finite.
    """
    surface = HookedModel.of(model)
    parse_choice(engine, ("auto", "naive"), "sweep", "engine")
    prompts = parse_prompts(surface, tokens, "sweep")
    surface.check_prompts(prompts, "sweep: tokens")
    measured = Metric.of(metric, batch, (surface, prompts), "sweep", positions)
    resampling = parse_resampling(seed, draws, flips, "sweep")
    return run_sweep(surface, prompts, variants, measured, resampling, engine, batch_size)[0]


def run_sweep(
    surface: HookedModel,
    prompts: Prompts,
    variants: Any,
    metric: Metric,
    resampling: Resampling,
    engine: str = "auto",
    batch_size: int | None = None,
) -> tuple[SweepResult, Measurements]:
    """Returns the result of `sweep`, and the values of every example behind it."""
    with exclusive(surface.model):
        plans, columns = _planned(variants, surface), metric.columns
        # The streams of the clean pass are held beside a forward.
        kept = surface.n_layers * (surface.sizes["d_model"] or 1)
        read = None if columns is None else len(columns)
        size = rows_in_a_forward(surface, prompts.shape[1], batch_size, "sweep", kept=kept, read=read)
        job = ModelSweep(surface, prompts, metric, plans, size)
        measured = job.run(engine)
    settings: dict[str, Any] = {"batch_size": job.batch_size, "n": len(prompts), **surface.settings}
    settings |= {"words": prompts.labels()} if prompts.words is not None else {}
    settings |= {
        "positions": None if metric.positions is None else list(metric.positions),
        "engine": engine,
        "naive": {one.name: one.alone for one in plans if one.alone is not None},
    }
    described: dict[str, list[Row]] = {}
    for one in plans:
        described.setdefault(one.name, []).extend(each.describe() for each in one.interventions)
    return tabulate(measured, resampling, described, settings, metric.untested), measured


def _planned(variants: Any, surface: HookedModel) -> list[Variant]:
    """Returns every variant, each draw by itself, as steps on the model; refuses names that would be the same in the
    table.
    """
    if not isinstance(variants, Mapping):
        raise CircuitsError(
            f"sweep: give variants by name, such as {{'without 0.1': ablate.zero('0.1')}}; got {format_value(variants)}"
        )
    if not variants:
        raise CircuitsError("sweep: no variants; give a dict of names and interventions")
    found: list[Variant] = []
    for name, given in by_text(variants, "sweep", "variants").items():
        drawn = isinstance(given, Draws)
        for draw, one in enumerate(given.interventions if isinstance(given, Draws) else (given,)):
            together = tuple(one) if isinstance(one, tuple | list) else (one,)
            if not together:
                raise CircuitsError(f"sweep: variant {name!r} has no intervention")
            with prefixed(f"variant {name!r}"):
                found.append(Variant(name, draw if drawn else None, together, planned(together, surface)))
    return found


def compare(
    parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    metric: MetricLike = None,
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
        batch: as in `sweep`.
        seed: as in `sweep`.
        draws: as in `sweep`.
        flips: as in `sweep`.
        columns: by variant, its values in the columns intervention, site, layer, head, position.

    Raises `CircuitsError` for chunks with different variants, and for what `sweep` refuses of a metric.
    """
    resampling = parse_resampling(seed, draws, flips, "compare")
    measured = Metric.of(metric, batch, None, "compare")
    found: Measurements | None = None
    done = 0
    for clean, outputs in parts:
        if found is None:
            found = Measurements(
                [{"variant": name, **(columns or {}).get(name, {})} for name in outputs], "given"
            )
        names = [run["variant"] for run in found.runs]
        if list(outputs) != names:
            raise CircuitsError(
                f"compare: a chunk has {', '.join(outputs)}; the first had {', '.join(names)}"
            )
        of_chunk = measured.at(slice(done, done + len(clean)))
        done += len(clean)
        found.begin(of_chunk.measure(clean, clean, BASELINE))
        for index, (name, output) in enumerate(outputs.items()):
            if output.shape != clean.shape:
                raise CircuitsError(
                    f"compare: {name} is {list(output.shape)}, the unedited {list(clean.shape)}"
                )
            found.add(index, of_chunk.measure(output, clean, name))
    if isinstance(measured.batch, LogitDifference):
        measured.batch.check_count(done)
    if found is None or not found.runs or (batch is not None and len(batch) != done):
        got = "no outputs" if found is None or not found.runs else f"{done} examples, batch has {len(batch)}"
        raise CircuitsError(f"compare: {got}; give the unedited output and others, of all examples")
    return tabulate(found, resampling, {}, {"engine": "given", "n": done}, measured.untested)
