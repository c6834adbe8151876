"""Runs many interventions on the same examples and compares them with the unedited model, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_choice, parse_metric_batch, stringify_keys
from circuits.engine.stacked_from_first_edit import Variant, reason_not_to_stack, run_clean_pass, run_stacked
from circuits.errors import CircuitsError, format_value, prefix_circuits_errors
from circuits.frozen_tensors_and_positions import Span
from circuits.interventions.base import ActivationEdit, EdgePatch, Intervention
from circuits.interventions.clean_passes_and_edit_hooks import (
    PassResults,
    needed_clean_passes,
    run_clean_passes,
)
from circuits.interventions.intervene_run_cache import attach_plan, plan_steps
from circuits.interventions.variant_grids_and_draws import Draws, VariantLike
from circuits.model.activation_recording import hold_eval_mode
from circuits.model.batch_size import choose_batch_size, run_within_memory
from circuits.model.edit_state import assert_weights_unchanged, mark_running_rows
from circuits.model.generation_positions import parse_position_mask
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import parse_prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.model.types import BatchLike, MetricLike, PositionsLike, TokensLike
from circuits.sweeps.logit_difference import LogitDifference
from circuits.sweeps.metric import BASELINE, Measurements, Metric, Row, metric_label, variant_label
from circuits.sweeps.sweep_result import SweepResult, edited_place_columns, parse_resampling, tabulate_runs

NAIVE, FAST = "naive", "fast"
# Differences between two runs of one example that are rounding: relative to the output's largest entry, and in half
# precision to the entry itself.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-6}
_HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


@check_renamed_args
def sweep(
    model: nn.Module,
    tokens: TokensLike,
    variants: Mapping[str, VariantLike] | VariantLike,
    metric: MetricLike = None,
    batch: BatchLike = None,
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
            `grid` make such dicts. Draws get a row each, after one that pools them. Or one of these alone.
        metric: `fn(output)`, or `fn(output, batch[rows])` with `batch`, or a dict of several. It gets its own copies,
            is called once per variant and chunk of examples, and returns a value per example [n], a pair (sum [n],
            count [n]), pooled as Σsum/Σcount, or a dict of those. Without one: `kl` (nats) and `mse` from the unedited
            output, which have no p-value, and `logit_diff`, of the unedited model's two highest logits: means over all
            positions read but padding.
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
    hooked = HookedModel(model)
    parse_choice(engine, ("auto", NAIVE), "sweep", "engine")
    prompts = parse_prompts(hooked, tokens, "sweep")
    measured = Metric.parse(metric, batch, (hooked, prompts), "sweep", positions)
    resampling = parse_resampling(seed, draws, flips, "sweep")
    return sweep_with_measurements(hooked, prompts, variants, measured, resampling, engine, batch_size)[0]


def sweep_with_measurements(
    hooked: HookedModel,
    prompts: Prompts,
    variants: Any,
    metric: Metric,
    resampling: dict[str, int],
    engine: str = "auto",
    batch_size: int | None = None,
) -> tuple[SweepResult, Measurements]:
    """Returns the result of `sweep`, and the values of every example behind it."""
    with hold_eval_mode(hooked.model), torch.no_grad():
        plans, columns = _plan_variants(variants, hooked, prompts), metric.columns_read
        refused = 'engine="naive"' if engine == NAIVE else reason_not_to_stack(hooked, prompts)
        for one in plans:
            one.alone = refused
            if refused is None:
                one.decide_stacking(hooked)
        # The streams of the clean pass are held beside a forward.
        kept = hooked.n_layers * (hooked.sizes["d_model"] or 1)
        read = None if columns is None else len(columns)
        size = choose_batch_size(hooked, prompts.shape[1], batch_size, "sweep", kept=kept, read=read)
        job = ModelSweep(hooked, prompts, metric, plans)
        measured = run_within_memory(size, job.measure)
    settings: dict[str, Any] = {
        "batch_size": job.batch_size,
        "n": len(prompts),
        **hooked.setting_if_unchecked,
    }
    settings |= {"words": prompts.labels()} if prompts.words is not None else {}
    settings |= {
        "positions": None if metric.positions is None else list(metric.positions),
        "engine": engine,
        "naive": {one.name: one.alone for one in plans if one.alone is not None},
    }
    described: dict[str, list[Row]] = {}
    for run, one in zip(measured.runs, plans, strict=True):
        run["engine"] = FAST if one.alone is None else NAIVE
        described.setdefault(one.name, []).extend(each.describe() for each in one.interventions)
    return tabulate_runs(measured, resampling, described, settings, metric.untested), measured


@dataclass
class ModelSweep:
    """All variants on one model, with its current weights, a chunk of examples at a time.

    Attributes:
        batch_size: rows in a forward of the latest measurement.
    """

    hooked: HookedModel
    prompts: Prompts
    metric: Metric
    variants: Sequence[Variant]
    batch_size: int = 0

    def measure(self, rows_per_forward: int) -> Measurements:
        """Returns the measurements with so many rows in a forward, of chunks of equal number as far as that goes."""
        self.batch_size, total = rows_per_forward, len(self.prompts)
        self.found = Measurements(
            [
                {"variant": one.name, "draw": one.draw, **edited_place_columns(one.interventions, one.plan)}
                for one in self.variants
            ]
        )
        self.references: PassResults = {}
        step = -(-total // -(-total // rows_per_forward))
        for start in range(0, total, step):
            with assert_weights_unchanged(self.hooked.model, metric_label(self.metric.name)):
                self._measure_examples(slice(start, min(start + step, total)))
        return self.found

    def _measure_examples(self, rows: slice) -> None:
        """Adds the measurements of some examples: of the model, of the variants that share forwards, of the others."""
        self.rows = rows
        self.here = self.metric.for_rows(rows)
        stacked = sorted(
            (index for index, one in enumerate(self.variants) if one.alone is None),
            key=lambda index: (self.variants[index].start, self.variants[index].from_z),
        )
        together = [self.variants[index] for index in stacked]
        clean = run_clean_pass(self.hooked, self.prompts, rows, together, self.references)
        # A model may overwrite its output in the next run.
        self.clean = _check_numeric_output(clean.output, self.here.kept, BASELINE).clone()
        self.scale = self.clean.masked_fill(~self.clean.isfinite(), 0.0).abs().max()
        self.found.add_chunk_of_run(-1, self.here.measure(self.clean, self.clean, BASELINE))
        # After the metric has been tried, and all at once, so that references on the same tokens share a pass.
        wanted = needed_clean_passes(step for one in self.variants for step in one.plan)
        run_clean_passes(self.hooked, wanted, self.references, self.batch_size)
        columns = self.here.columns_read
        if columns is not None:
            columns = None if len(columns) == self.clean.shape[1] else columns.to(self.clean.device)
        unedited = self.clean if columns is None else self.clean[:, columns]
        width = max(1, self.batch_size // len(clean.prompts))
        for first in range(0, len(stacked), width):
            indices = stacked[first : first + width]
            together = [self.variants[index] for index in indices]
            outputs = run_stacked(self.hooked, clean, together, columns).unflatten(0, (len(indices), -1))
            for index, one, output in zip(indices, together, outputs, strict=True):
                if one.unseen:  # by itself, it is an error that says why
                    self._measure_alone(index)
                else:
                    self._measure_output(index, output if one.changed else unedited, columns)
        for index, one in enumerate(self.variants):
            if one.alone is not None:
                self._measure_alone(index)

    def _measure_alone(self, index: int) -> None:
        """Runs one variant in a forward of its own, by plain hooks."""
        with (
            attach_plan(self.hooked, self.variants[index].plan, self.references),
            mark_running_rows(self.hooked.model, self.rows, len(self.prompts)),
        ):
            output = self.hooked.run_forward(self.prompts[self.rows])
        self._measure_output(index, output)

    def _measure_output(self, index: int, output: Any, columns: Tensor | None = None) -> None:
        """Measures one variant's output, which has these of the positions.

        The last digits of an example depend on how many run beside it, which would count as an effect, with a sign in
        the sign-flip test. Entries that differ from the unedited output by rounding alone count as equal to it.
        """
        title, kept, clean = variant_label(self.found.runs[index]), self.here.kept, self.clean
        if columns is not None:
            clean = clean[:, columns]
            kept = None if kept is None else kept[:, columns.to(kept.device)]
        output, dtype = _check_numeric_output(output, kept, title), clean.dtype
        rounding = _ROUNDING[dtype] * self.scale if dtype in _ROUNDING else _HALF[dtype] * clean.abs()
        output = torch.where((output - clean).abs() <= rounding, clean, output)
        self.found.add_chunk_of_run(index, self.here.measure(output, self.clean, title, columns))


def _check_numeric_output(output: Any, read: Tensor | None, title: str) -> Tensor:
    """Returns a model's output, checked to be numbers where the metric reads it."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        got = getattr(output, "dtype", type(output).__name__)
        raise CircuitsError(f"{title}: the output is {got}, not a tensor of floats")
    if read is not None and output.shape[:2] != read.shape:
        raise CircuitsError(
            f"{title}: the model's output is {list(output.shape)}, without a row for each of the positions "
            f"{list(read.shape)}"
        )
    if bool((output if read is None else output[read.to(output.device)]).isnan().any()):
        raise CircuitsError(f"{title}: the output is not finite")
    return output


def _plan_variants(variants: Any, hooked: HookedModel, prompts: Prompts) -> list[Variant]:
    """Returns every variant, each draw by itself, as steps on the model; refuses names that would be the same in the
    table, and slices of positions that no prompt has, where nothing would be edited.
    """
    if isinstance(variants, Intervention | Draws | tuple) and variants:
        together = variants.interventions[:1] if isinstance(variants, Draws) else variants
        together = together if isinstance(together, tuple) else (together,)
        variants = {" + ".join(getattr(one, "label", str(one)) for one in together): variants}
    if not isinstance(variants, Mapping):
        raise CircuitsError(
            f"sweep: give variants by name, such as {{'without 0.1': ablate.zero('0.1')}}; got {format_value(variants)}"
        )
    if not variants:
        raise CircuitsError("sweep: no variants; give a dict of names and interventions")
    found: list[Variant] = []
    for name, given in stringify_keys(variants, "sweep", "variants").items():
        drawn = isinstance(given, Draws)
        for draw, one in enumerate(given.interventions if isinstance(given, Draws) else (given,)):
            together = tuple(one) if isinstance(one, tuple | list) else (one,)
            if not together:
                raise CircuitsError(f"sweep: variant {name!r} has no intervention")
            with prefix_circuits_errors(f"variant {name!r}"):
                plan = plan_steps(together, hooked)
                for step in plan:
                    edit = step.sender if isinstance(step, EdgePatch) else step
                    if isinstance(edit, ActivationEdit) and isinstance(edit.positions, Span):
                        parse_position_mask(edit.positions, prompts, edit.label)
                found.append(Variant(name, draw if drawn else None, together, plan))
    return found


def compare(
    parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    metric: MetricLike = None,
    batch: BatchLike = None,
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
        metric: `fn(output)`, or `fn(output, batch[rows])`, or a dict of several, of the examples of all chunks.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        seed: of the bootstrap over examples and of the sign-flip test.
        draws: resamples of the bootstrap.
        flips: the most flips of the sign-flip test.
        columns: by variant, its values in the columns intervention, site, layer, head, position.

    Raises `CircuitsError` for chunks with different variants, and for what `sweep` refuses of a metric.
    """
    resampling, given = parse_resampling(seed, draws, flips, "compare"), parse_metric_batch(batch, "compare")
    measured = Metric.parse(metric, given, None, "compare")
    found: Measurements | None = None
    done = 0
    for part in parts if isinstance(parts, Iterable) else ():
        if not _is_unedited_with_outputs(part):
            raise CircuitsError("compare: give a list of (unedited, {name: output}), all of them tensors")
        clean, outputs = part
        if found is None:
            found = Measurements(
                [{"variant": name, **(columns or {}).get(name, {})} for name in outputs], "given"
            )
        names = [run["variant"] for run in found.runs]
        if list(outputs) != names:
            raise CircuitsError(f"compare: a chunk has {', '.join(outputs)}; the first {', '.join(names)}")
        of_chunk = measured.for_rows(slice(done, done + len(clean)))
        done += len(clean)
        found.add_chunk_of_run(-1, of_chunk.measure(clean, clean, BASELINE))
        for index, (name, output) in enumerate(outputs.items()):
            if output.shape != clean.shape:
                raise CircuitsError(f"compare: {name} is {list(output.shape)}, unedited {list(clean.shape)}")
            found.add_chunk_of_run(index, of_chunk.measure(output, clean, name))
    if isinstance(measured.batch, LogitDifference):
        measured.batch.check_count(done)
    if found is None or not found.runs or (given is not None and len(given) != done):
        got = "no outputs" if found is None or not found.runs else f"{done} examples, batch has {len(given)}"
        raise CircuitsError(f"compare: {got}; give the unedited output and others, of all examples")
    return tabulate_runs(found, resampling, {}, {"engine": "given", "n": done}, measured.untested)


def _is_unedited_with_outputs(part: Any) -> bool:
    is_pair = isinstance(part, tuple | list) and len(part) == 2 and isinstance(part[1], Mapping)
    return is_pair and all(isinstance(x, Tensor) for x in (part[0], *part[1].values()))
