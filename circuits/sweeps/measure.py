"""Measures every variant of a sweep on every chunk of examples: replayed where possible, else resumed, else by
plain hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.branches import Branch
from circuits.engine.engine import Engine
from circuits.engine.memory import Meter, known_peaks
from circuits.engine.replay import NotReplayed
from circuits.engine.resume import Resume
from circuits.engine.tails import NotResumed, Tail
from circuits.errors import CircuitsError
from circuits.interventions.apply import Plan, attached, wanted
from circuits.interventions.reference_runs import References
from circuits.model.record import evaluating
from circuits.model.state import parameters_of, running_rows, untouched, unwritten
from circuits.model.surface import Surface
from circuits.sweeps.engine_choice import FAST, RESUMED, Part, assign_engines, refusal
from circuits.sweeps.inputs import SweepInputs, Variant
from circuits.sweeps.measurements import BASELINE, Measurements, titled
from circuits.sweeps.metrics import Metric, PerExample
from circuits.sweeps.sizes import sizes_of
from circuits.tensors import largest

_FUNCTION = "sweep, the function of an edit or a hook"
# Share of the examples in a chunk whose effect may be within rounding by chance.
_BY_CHANCE = 0.02
# Outputs of several variants are compared with the unedited one together, up to this many numbers.
_TOGETHER = 2**20


@dataclass
class ModelSweep:
    """All variants on one model, with its current weights."""

    surface: Surface
    inputs: SweepInputs
    variants: Sequence[Variant]
    asked: str  # the engine that the caller chose
    references: References
    parts: list[Part]
    meter: Meter
    #: What decides how much memory it takes, but for the engines.
    sizes: Hashable

    @classmethod
    def of(
        cls,
        surface: Surface,
        variants: Sequence[Variant],
        inputs: SweepInputs,
        engine: str,
        checkpoint: str | None = None,
    ) -> ModelSweep:
        """Prepares a sweep over one model, and measures the memory that this takes where it is not known yet."""
        known, sizes = known_peaks(surface.model), sizes_of(surface, variants, inputs, engine)
        with evaluating(surface.model), torch.no_grad():
            # What was measured was so with the engines of that time; where there are others now it is measured again.
            for measure in (sizes not in known, True):
                meter = Meter()
                with meter.on(measure):
                    parts = assign_engines(surface, variants, inputs, engine, checkpoint)
                references = inputs.references(surface)
                job = cls(surface, inputs, variants, engine, references, parts, meter, sizes)
                if measure or job._peak is not None:
                    break
        return job

    def run(self) -> list[Measurements]:
        """Returns the measurements, those of plain forwards last."""
        with (
            evaluating(self.surface.model),
            torch.no_grad(),
            # What is kept to notice writes to the model counts too.
            self.meter.on(self._peak is None),
            unwritten(self.surface.model, "sweep"),
        ):
            failed: dict[str, str] = {}
            while True:
                try:
                    self._run()
                    break
                except (NotReplayed, NotResumed) as reason:
                    # One chunk failed: all of them then run on another engine, as effects of two cannot be pooled.
                    failed[FAST if isinstance(reason, NotReplayed) else RESUMED] = str(reason)
                    if self.asked in failed:
                        raise refusal(self.asked, str(reason)) from reason
                checkpoint = self.parts[-1].measurements.checkpoint
                self.parts = assign_engines(
                    self.surface, self.variants, self.inputs, self.asked, checkpoint, failed
                )
            if self._peak is None:
                # To look for writes takes memory again.
                self.meter.start()
        if self._peak is None:
            known_peaks(self.surface.model).setdefault(self.sizes, {})[self._engines] = self.meter.peak
        return [replace(part.measurements, bytes_held=self._peak or 0) for part in self.parts]

    @property
    def _engines(self) -> Hashable:
        return tuple((part.measurements.engine, len(part.variants)) for part in self.parts)

    @property
    def _peak(self) -> int | None:
        """The memory of a sweep like this, where it has been measured."""
        return known_peaks(self.surface.model).get(self.sizes, {}).get(self._engines)

    def _run(self) -> None:
        measure = self._peak is None
        for rows in self.inputs.pieces():
            for part in self.parts:
                first = measure and rows == self.inputs.first
                if first and part.engine is not None:
                    part.engine.meter = self.meter
                with self.meter.on(first):
                    _run(self, part, rows)

    def another(self, checkpoint: str | None) -> ModelSweep:
        """Returns the same sweep, to be measured on other weights of the model."""
        parts = [
            replace(part, measurements=part.measurements.again(checkpoint=checkpoint)) for part in self.parts
        ]
        return replace(self, references=self.inputs.references(self.surface), parts=parts)

    def max_stacked(self) -> int:
        """Returns with how many checkpoints of its shape, itself included, it can be stacked."""
        part = self.parts[0]
        if not isinstance(part.engine, Engine) or len(self.parts) > 1:
            return 1
        most = part.engine.max_stacked(self.inputs.tokens, _of_type(Branch, part), self.inputs.chunk)
        if self.inputs.memory is None:
            return most
        # Each takes what this one has taken, and its weights in the stack.
        weights = sum(weight.nbytes for weight in parameters_of(self.surface.model))
        return min(most, (self.inputs.memory - 2 * weights) // ((self._peak or 0) + weights))

    @property
    def plan(self) -> Plan:
        """The steps of all variants."""
        return tuple(step for one in self.variants for step in one.plan)

    @property
    def needs_clean_passes(self) -> bool:
        return any(True for _ in wanted(self.plan))

    def fetch(self) -> None:
        self.references.fetch(wanted(self.plan))


def measure_stacked(
    engine: Engine, jobs: Sequence[ModelSweep], load_into_model: Callable[[int], None], weights: int
) -> list[Measurements]:
    """Measures several checkpoints of one model, whose forward passes are made together.

    Args:
        engine: the engine of all their weights, stacked.
        load_into_model: copies the weights of the checkpoint of this index into the model.
        weights: bytes that copies of weights take.
    """
    first, inputs = jobs[0], jobs[0].inputs
    rows, branches = slice(0, len(inputs.tokens)), _of_type(Branch, first.parts[0])
    tokens = inputs.tokens.to(first.surface.device)
    meter, peaks = Meter(), known_peaks(first.surface.model).setdefault(first.sizes, {})
    with evaluating(first.surface.model), torch.no_grad(), meter.on(len(jobs) not in peaks):
        outputs, cache = engine.clean(tokens, branches, rows)
        own_output = engine.output
        assert own_output is not None
        engine.check(tokens, own_output, outputs, rows)
        references = [job.references for job in jobs]
        edited: list[list[tuple[list[tuple[Branch | Tail, bool]], Tensor]]] = [[] for _ in jobs]
        for at, members, output in engine.run(
            tokens, rows, branches, references, cache, inputs.chunk, inputs.outputs
        ):
            edited[at].append(([(branch, branch.changed[at]) for branch in members], output))
        for at, (job, clean) in enumerate(zip(jobs, outputs.split(len(tokens)), strict=True)):
            load_into_model(at)
            part = replace(job.parts[0], engine=engine)
            with unwritten(first.surface.model, "sweep"):
                compared = _Compared(job, part, rows, clean)
                for each in edited[at]:
                    compared.add(*each)
            meter.stop()  # the metric takes as much of the others
    # The model's own output was there before.
    held = peaks.setdefault(len(jobs), meter.peak + own_output.nbytes) + weights
    measured = [job.parts[0].measurements for job in jobs]
    return [replace(one, bytes_held=held, stacked=len(jobs)) for one in measured]


def _of_type(kind: type[Any], part: Part) -> list[Any]:
    return [branch for branch in part.branches if isinstance(branch, kind)]


def _run(job: ModelSweep, part: Part, rows: slice) -> None:
    if part.engine is None:
        _run_naive(job, part, rows)
    elif isinstance(part.engine, Resume):
        _run_resumed(job, part, rows, part.engine)
    else:
        _run_fast(job, part, rows, part.engine)


def _run_naive(job: ModelSweep, part: Part, rows: slice) -> None:
    """Runs one full forward per variant."""
    metric, found = job.inputs.metric.at(rows), part.measurements
    # A model may overwrite its output in the next run.
    clean = _output(job, metric, rows, BASELINE).clone()
    found.begin(metric.measure(clean, clean, BASELINE))
    # Fetched after the metric has been tried, and all at once, so that references on the same tokens share a pass.
    job.fetch()
    with untouched(job.surface.model, _FUNCTION):
        for index, variant in enumerate(part.variants):
            title = titled(found.runs[index])
            found.add(index, metric.measure(_edited(job, variant, metric, rows, title), clean, title))


def _run_resumed(job: ModelSweep, part: Part, rows: slice, engine: Resume) -> None:
    """Runs the model, checks its blocks one by one, and goes on from them."""
    inputs, metric = job.inputs, job.inputs.metric.at(rows)
    prompts = inputs.prompts[rows]
    with running_rows(job.surface.model, rows, len(inputs.tokens)):
        clean = engine.clean(prompts)
    output = _checked(clean.output, metric, BASELINE)
    compared = _Compared(job, part, rows, output, output)
    job.fetch()
    runs = engine.run(
        prompts,
        rows,
        len(inputs.tokens),
        _of_type(Tail, part),
        job.references,
        clean,
        min(inputs.chunk, inputs.outputs),
    )
    with untouched(job.surface.model, _FUNCTION):
        for members, edited in runs:
            compared.add(members, edited)
            del edited


def _run_fast(job: ModelSweep, part: Part, rows: slice, engine: Engine) -> None:
    """Runs the clean pass of an engine, compares it with the model's own output, and runs its branches from there."""
    branches = _of_type(Branch, part)
    tokens, metric = job.inputs.tokens[rows].to(job.surface.device), job.inputs.metric.at(rows)
    if engine.output is None:
        model_output = _output(job, metric, rows, BASELINE).clone()
    else:
        model_output, engine.output = _checked(engine.output, metric, BASELINE), None
    output, cache = engine.clean(tokens, branches, rows)
    engine.check(tokens, model_output, output, rows)
    compared = _Compared(job, part, rows, output, model_output if model_output.numel() <= _TOGETHER else None)
    del model_output
    job.fetch()
    # No hook of a user's is there, and functions of edits are watched one by one.
    for _, members, edited in engine.run(
        tokens, rows, branches, [job.references], cache, job.inputs.chunk, job.inputs.outputs
    ):
        compared.add([(branch, branch.changed[0]) for branch in members], edited)
        del edited  # Gone before the next are made.


class _Compared:
    """Measures a fast engine's outputs for some examples beside its unedited output.

    Stacked and single forwards differ by rounding, which would count as an effect, with a sign in the sign-flip test.
    So a variant with effects within rounding is run once more with plain hooks, as is the model; in these examples it
    gets the effect between those two runs, which may be none.
    """

    def __init__(
        self, job: ModelSweep, part: Part, rows: slice, output: Tensor, model_output: Tensor | None = None
    ) -> None:
        """
        Args:
            model_output: the model's own output, bit for bit as in a run of its own; None: made when it is needed.
        """
        assert part.engine is not None
        self._job, self._part, self._rows, self._engine = job, part, rows, part.engine
        self._metric = job.inputs.metric.at(rows)
        self._output, self._plain_clean = output, model_output
        # Where the metric reads an output of the engine, bool [example pos]; None: everywhere.
        kept, columns = self._metric.kept, None if isinstance(self._engine, Resume) else self._engine.read
        self._read = None if kept is None else kept.to(output.device)
        if self._read is not None and columns is not None:
            self._read = self._read[:, columns]
            # Of prompts without padding it computes what is read alone.
            self._read = None if bool(self._read.all()) else self._read
        #: Whether outputs are made for the metric alone, with NaN where it does not read them.
        self._spare = columns is not None and self._read is None
        self._unread = None if self._read is None else ~self._read[..., None]
        self._clean = _checked(self._at_all_positions(output), self._metric, BASELINE)
        self._near = self._engine.tolerance * float(_largest_finite(self._where_read(output)))
        self._base = self._metric.measure(self._clean, self._clean, BASELINE)
        self._plain_base: PerExample | None = None
        part.measurements.begin(self._base)

    def add(self, members: Sequence[tuple[Branch | Tail, bool]], outputs: Tensor) -> None:
        """Measures variants, of which each comes with whether its edits changed an activation.

        Args:
            outputs: those of all variants, one after the other.
        """
        size, stream = len(self._output), self._job.surface.sizes["d_model"] or 1
        # No more together than what a stack's own forward holds.
        most = min(_TOGETHER, self._job.inputs.chunk * stream)
        step = max(1, most // max(1, self._clean.numel()))
        with self._metric.watched() as metric:
            for first in range(0, len(members), step):
                self._add(
                    metric, members[first : first + step], outputs[first * size : (first + step) * size]
                )

    def _add(self, metric: Metric, members: Sequence[tuple[Branch | Tail, bool]], outputs: Tensor) -> None:
        titles = [titled(self._part.measurements.runs[member.index]) for member, _ in members]
        stack = outputs.unflatten(0, (len(members), -1))
        read = self._where_read(stack)
        is_nan = read.flatten(1).amax(1).isnan().tolist()
        # Where all of an output [example pos out] is within rounding, it may be what it was.
        near = _largest_finite(read - self._where_read(self._output), -1) <= self._near
        partly = (near if self._read is None else near & self._read).any(2).cpu().numpy()
        whole = near.all(2).cpu().numpy()
        edited = self._at_all_positions(stack)
        for at, (member, changed) in enumerate(members):
            # Where no activation changed, the output is the clean one exactly, and not only up to rounding.
            if not changed:
                values = metric.measure(self._clean, self._clean, titles[at])
            elif is_nan[at]:
                raise _not_finite(titles[at])
            else:
                values = metric.measure(edited[at], self._clean, titles[at], self._spare)
                variant = self._part.variants[member.index]
                values = self._without_rounding(metric, variant, values, whole[at], partly[at], titles[at])
            self._part.measurements.add(member.index, values)

    def _where_read(self, output: Tensor) -> Tensor:
        """Returns an output with zeros where the metric does not read it."""
        return output if self._unread is None else output.masked_fill(self._unread, 0.0)

    def _at_all_positions(self, output: Tensor) -> Tensor:
        """Returns an output [... example pos out] at all positions, with NaN where it is not computed."""
        if isinstance(self._engine, Resume) or self._engine.read is None:
            return output
        length = self._job.inputs.tokens.shape[1]
        whole = output.new_full((*output.shape[:-2], length, output.shape[-1]), torch.nan)
        whole[..., self._engine.read, :] = output
        return whole

    def _without_rounding(
        self,
        metric: Metric,
        variant: Variant,
        values: PerExample,
        near: np.ndarray,
        partly: np.ndarray,
        title: str,
    ) -> PerExample:
        """Returns the variant's values, with effects within rounding replaced.

        Args:
            near: examples (boolean) whose output is within rounding of the unedited one.
            partly: those in which it is at some position, which may be all that a metric reads.
        """
        if not partly.any():
            return values
        base = self._base
        doubtful = {
            name: near | (partly & _within_rounding(values[name][0], base[name][0], self._engine.tolerance))
            for name in values
            if name in base
        }
        # Among many effects some are small by chance.
        if not near.any() and all(one.mean() < _BY_CHANCE for one in doubtful.values()):
            return values
        if self._plain_clean is None:
            self._plain_clean = _output(self._job, metric, self._rows, BASELINE).clone()
        clean = self._plain_clean
        if self._plain_base is None:
            self._plain_base = metric.measure(clean, clean, BASELINE)
        plain_base = self._plain_base
        plain = metric.measure(_edited(self._job, variant, metric, self._rows, title), clean, title)
        return {
            **values,
            **{
                name: _substituted_effect(where, values[name], base[name], plain[name], plain_base[name])
                for name, where in doubtful.items()
                if name in plain and name in plain_base
            },
        }


def _largest_finite(x: Tensor, *dim: int) -> Tensor:
    """Returns the size of the largest entry, of all or along a dimension; those that are not finite count as zero."""
    found = largest(x, *dim)
    if bool(found.isfinite().all()):
        return found
    return largest(x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), *dim)


def _substituted_effect(
    where: np.ndarray, *given: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums and counts of a variant, with its effect in the examples `where` replaced by that of two
    other runs.
    """
    sums, counts = (
        np.where(where, base + (plain - plain_base), part)
        for part, base, plain, plain_base in zip(*given, strict=True)
    )
    return sums, counts


def _within_rounding(edited: np.ndarray, base: np.ndarray, tolerance: float) -> np.ndarray:
    """Tells in which examples a metric is within rounding; equal values do not count, as a metric that counts may be
    equal by chance, and `near` tells by the outputs.
    """
    difference = np.abs(edited - base)
    largest = max(np.abs(edited).max(), np.abs(base).max())
    return (difference > 0) & (difference <= tolerance * (largest + 1e-4))


def _edited(job: ModelSweep, variant: Variant, metric: Metric, rows: slice, title: str) -> Tensor:
    with attached(job.surface, variant.plan, job.references):
        return _output(job, metric, rows, title)


def _output(job: ModelSweep, metric: Metric, rows: slice, title: str) -> Tensor:
    with running_rows(job.surface.model, rows, len(job.inputs.tokens)):
        return _checked(job.surface.call(job.inputs.prompts[rows]), metric, title)


def _checked(output: Any, metric: Metric, title: str) -> Tensor:
    """Returns a model's output, checked to be finite where the metric reads it."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise CircuitsError(
            f"{title}: the model's output is {type(output).__name__}, not a tensor of numbers"
        )
    kept = metric.kept
    if kept is not None and output.shape[:2] != kept.shape:
        raise CircuitsError(
            f"{title}: the model's output is {list(output.shape)}, without a row for each of the positions "
            f"{list(kept.shape)}"
        )
    _refuse_nan(output if kept is None else output[kept.to(output.device)], title)
    return output


def _refuse_nan(output: Tensor, title: str) -> None:
    if output.numel() and bool(output.amax().isnan()):
        raise _not_finite(title)


def _not_finite(title: str) -> CircuitsError:
    return CircuitsError(f"{title}: the output is not finite")
