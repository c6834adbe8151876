"""Measures every variant of a sweep on every chunk of examples, by the fast engine where possible, else by
plain hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.branches import Branch, branch_of
from circuits.engine.engine import Engine
from circuits.engine.replay import NotReplayed
from circuits.errors import CircuitsError
from circuits.interventions.apply import Plan, attached, wanted
from circuits.interventions.base import Intervention
from circuits.interventions.reference_runs import References
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating
from circuits.model.state import running_rows
from circuits.model.surface import Surface
from circuits.sweeps.metrics import PerExample, called, metric_name, read_values, unedited_metrics
from circuits.sweeps.table import BASELINE, Measured, about
from circuits.tensors import Positions, select_positions

_WHAT = "sweep, positions"
NAIVE, FAST = "naive", "fast"
# Share of the examples in a chunk whose effect may be within rounding by chance.
_BY_CHANCE = 0.02


@dataclass(frozen=True)
class Variant:
    """One row of the grid, or one draw of it."""

    name: str
    draw: int | None
    interventions: tuple[Intervention, ...]
    plan: Plan

    @property
    def title(self) -> str:
        return f"variant {self.name!r}" + ("" if self.draw is None else f", draw {self.draw}")


@dataclass(frozen=True)
class SweepInputs:
    """The inputs that are common to all variants."""

    prompts: Prompts
    metric: Any
    batch: Any
    read: Positions | None
    step: int  # examples per forward
    chunk: int  # tokens per forward, of all variants in it

    @property
    def tokens(self) -> Tensor:
        return self.prompts.tokens

    def kept(self, rows: slice) -> Tensor | None:
        """Returns where the output of some rows is read, bool [batch pos]; None: everywhere."""
        if not self.prompts.padded:
            if self.read is None:
                return None
            length = self.prompts.shape[1]
            return select_positions(self.read, length, _WHAT).expand(rows.stop - rows.start, -1)
        real = self.prompts.real
        return (real if self.read is None else select_positions(self.read, real.shape[1], _WHAT, real))[rows]

    def pieces(self) -> Iterator[slice]:
        """Yields the examples of each forward."""
        for start in range(0, len(self.tokens), self.step):
            yield slice(start, min(start + self.step, len(self.tokens)))


@dataclass
class Group:
    """The variants that one engine runs, with that engine's own unedited output as the baseline."""

    engine: str
    variants: list[Variant]
    baseline: Measured = field(default_factory=lambda: Measured(BASELINE, {}))
    measured: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.measured = [
            Measured(one.name, about(one.interventions, one.plan), one.draw) for one in self.variants
        ]


@dataclass
class Measurements:
    """The measurements on one model."""

    groups: list[Group]
    names: list[str]
    naive: dict[str, str]  # by variant, why it did not run on the fast engine
    nbytes: int
    stacked: int = 1  # number of checkpoints in each forward


@dataclass
class ModelSweep:
    """All variants on one model, with its current weights."""

    surface: Surface
    inputs: SweepInputs
    references: References
    groups: list[Group]
    names: list[str]
    naive: dict[str, str]
    engine: Engine | None
    branches: list[Branch]
    asked: str  # the engine that the caller chose

    @classmethod
    def of(cls, surface: Surface, variants: list[Variant], inputs: SweepInputs, engine: str) -> ModelSweep:
        with evaluating(surface.model), torch.no_grad():
            fast, naive, branches = _choose_engines(surface, variants, inputs, engine)
        names = list(dict.fromkeys(one.name for one in variants))
        groups = _grouped(variants, naive)
        return cls(surface, inputs, References(surface), groups, names, naive, fast, branches, engine)

    def run(self) -> Measurements:
        with evaluating(self.surface.model), torch.no_grad():
            try:
                self._run()
            except NotReplayed as reason:
                # One chunk failed: all of them then run naive, as effects of two engines cannot be pooled.
                if self.asked == FAST:
                    raise CircuitsError(f"sweep, engine='fast': {reason}; use engine='auto'") from reason
                variants = [one for group in self.groups for one in group.variants]
                self.naive = {name: self.naive.get(name, str(reason)) for name in self.names}
                self.groups, self.engine = _grouped(variants, self.naive), None
                self._run()
        return Measurements(self.groups, self.names, self.naive, self.engine.bytes_held if self.engine else 0)

    def _run(self) -> None:
        for rows in self.inputs.pieces():
            for group in self.groups:
                if group.engine == NAIVE:
                    _run_naive(self, group, rows)
                else:
                    _run_fast(self, group, rows)

    def another(self) -> ModelSweep:
        """Returns the same sweep, to be measured on other weights of the model."""
        groups = [Group(group.engine, group.variants) for group in self.groups]
        references = References(self.surface)
        return ModelSweep(
            self.surface,
            self.inputs,
            references,
            groups,
            self.names,
            {},
            self.engine,
            self.branches,
            self.asked,
        )

    def max_stacked(self) -> int:
        """Returns with how many checkpoints of its shape, itself included, it can be stacked."""
        if self.engine is None or self.naive:
            return 1
        return self.engine.max_stacked(self.inputs.tokens, self.branches, self.inputs.chunk)

    @property
    def plan(self) -> Plan:
        """The steps of all variants."""
        return tuple(step for group in self.groups for one in group.variants for step in one.plan)

    @property
    def needs_clean_passes(self) -> bool:
        return any(True for _ in wanted(self.plan))

    def fetch(self) -> None:
        self.references.fetch(wanted(self.plan))


def measure_all(surface: Surface, variants: list[Variant], inputs: SweepInputs, engine: str) -> Measurements:
    return ModelSweep.of(surface, variants, inputs, engine).run()


def measure_stacked(
    engine: Engine, jobs: Sequence[ModelSweep], load_into_model: Callable[[int], None]
) -> list[Measurements]:
    """Measures several checkpoints of one model, whose forward passes are made together.

    Args:
        engine: the engine of all their weights, stacked.
        load_into_model: copies the weights of the checkpoint of this index into the model.
    """
    first, inputs = jobs[0], jobs[0].inputs
    rows = slice(0, len(inputs.tokens))
    tokens = inputs.tokens.to(first.surface.device)
    with torch.no_grad():
        outputs, cache = engine.clean(tokens, first.branches)
        assert engine.output is not None
        engine.check(tokens, engine.output, outputs)
        references = [job.references for job in jobs]
        edited: list[list[tuple[Branch, bool, Tensor]]] = [[] for _ in jobs]
        for at, branch, output in engine.run(
            tokens, rows, first.branches, references, cache, len(first.branches)
        ):
            edited[at].append((branch, branch.changed[at], output))
        with evaluating(first.surface.model):
            for at, (job, clean) in enumerate(zip(jobs, outputs.split(len(tokens)), strict=True)):
                load_into_model(at)
                compared = _Compared(job, job.groups[0], rows, engine, clean)
                for each in edited[at]:
                    compared.add(*each)
    return [Measurements(job.groups, job.names, {}, engine.bytes_held, len(jobs)) for job in jobs]


def _choose_engines(
    surface: Surface, variants: list[Variant], inputs: SweepInputs, engine: str
) -> tuple[Engine | None, dict[str, str], list[Branch]]:
    """Returns the fast engine, if it can be used; by variant, why it cannot; and the branches of the other variants."""
    naive: dict[str, str] = {}
    branches: list[Branch] = []
    fast: Engine | None = None
    if engine == NAIVE:
        return None, {one.name: 'engine="naive"' for one in variants}, []
    for one in variants:
        try:
            branch_of(0, one.plan, surface.n_layers)
        except NotReplayed as reason:
            # All draws of a variant run on one engine, as they are pooled.
            naive[one.name] = str(reason)
    if len(naive) < len({one.name for one in variants}):
        try:
            fast = Engine(surface, inputs.prompts, inputs.read, inputs.step)
        except NotReplayed as reason:
            naive = {one.name: str(reason) for one in variants}
    if naive and engine == FAST:
        name, reason_text = next(iter(naive.items()))
        raise CircuitsError(f"sweep, engine='fast': variant {name!r}: {reason_text}; use engine='auto'")
    kept = [one for one in variants if one.name not in naive]
    branches = [branch_of(index, one.plan, surface.n_layers) for index, one in enumerate(kept)]
    return fast, naive, branches


def _grouped(variants: list[Variant], naive: dict[str, str]) -> list[Group]:
    parts = [(FAST, [one for one in variants if one.name not in naive])]
    parts += [(NAIVE, [one for one in variants if one.name in naive])]
    return [Group(name, part) for name, part in parts if part]


def _run_naive(job: ModelSweep, group: Group, rows: slice) -> None:
    """Runs one full forward per variant."""
    surface, inputs = job.surface, job.inputs
    # A model may overwrite its output in the next run.
    clean = _output(surface, inputs, rows, BASELINE).clone()
    group.baseline.parts.append(_measure(inputs, clean, clean, rows, BASELINE))
    # Fetched after the metric has been tried, and all at once, so that references on the same tokens share a pass.
    job.fetch()
    for variant, measured in zip(group.variants, group.measured, strict=True):
        output = _edited(surface, variant, inputs, rows, job.references)
        measured.parts.append(_measure(inputs, output, clean, rows, variant.title))


def _run_fast(job: ModelSweep, group: Group, rows: slice) -> None:
    engine = job.engine
    assert engine is not None
    tokens = job.inputs.tokens[rows].to(job.surface.device)
    if engine.output is None:
        model_output = _output(job.surface, job.inputs, rows, BASELINE).clone()
    else:
        model_output, engine.output = _checked(engine.output, job.inputs, rows, BASELINE), None
    output, cache = engine.clean(tokens, job.branches)
    engine.check(tokens, model_output, output)
    compared = _Compared(job, group, rows, engine, output, model_output)
    job.fetch()
    width = max(1, job.inputs.chunk // tokens.numel())
    for _, branch, edited in engine.run(tokens, rows, job.branches, [job.references], cache, width):
        compared.add(branch, branch.changed[0], edited)


class _Compared:
    """Measures the fast engine's outputs for some examples, and compares them with the unedited output."""

    def __init__(
        self,
        job: ModelSweep,
        group: Group,
        rows: slice,
        engine: Engine,
        output: Tensor,
        model_output: Tensor | None = None,
    ) -> None:
        """
        Args:
            model_output: the model's own output, bit for bit as in a run of its own.
        """
        self._inputs, self._group, self._rows, self._engine = job.inputs, group, rows, engine
        self._output = output
        self._clean = self._at_all_positions(output, BASELINE)
        self._near = engine.tolerance * float(_finite(output).abs().max())
        self._base = _measure(self._inputs, self._clean, self._clean, rows, BASELINE)
        group.baseline.parts.append(self._base)
        self._rounding_check = _RoundingCheck(
            job.surface, self._inputs, rows, job.references, engine.tolerance, model_output
        )

    def add(self, branch: Branch, changed: bool, output: Tensor) -> None:
        variant = self._group.variants[branch.index]
        if changed:
            difference = (output - self._output).abs().flatten(1).nan_to_num(nan=0.0).amax(1)
            near = (difference <= self._near).cpu().numpy()
            edited = self._at_all_positions(output, variant.title)
            part = _measure(self._inputs, edited, self._clean, self._rows, variant.title)
            part = self._rounding_check.part(variant, part, self._base, near)
        else:
            # Where no activation changed, the output is the clean one exactly, and not only up to rounding.
            part = _measure(self._inputs, self._clean, self._clean, self._rows, variant.title)
        self._group.measured[branch.index].parts.append(part)

    def _at_all_positions(self, output: Tensor, variant: str) -> Tensor:
        """Returns the output at all positions, with NaN where it is not read."""
        _refuse_nan(output, variant)
        read = self._engine.read
        if read is None:
            return output
        whole = output.new_full((len(output), self._inputs.tokens.shape[1], output.shape[-1]), torch.nan)
        whole[:, read] = output
        return whole


class _RoundingCheck:
    """Finds the examples that an edit leaves unchanged. Stacked and single forwards differ by rounding, which would
    count as an effect, with a sign in the sign-flip test.

    A variant with effects within rounding is run once more with plain hooks, as is the model; in these examples it gets
    the effect between those two runs, which may be none.
    """

    def __init__(
        self,
        surface: Surface,
        inputs: SweepInputs,
        rows: slice,
        references: References,
        tolerance: float,
        clean: Tensor | None,
    ) -> None:
        self._surface, self._inputs, self._rows, self._references = surface, inputs, rows, references
        self._tolerance, self._clean = tolerance, clean
        self._base: PerExample | None = None

    def part(self, variant: Variant, part: PerExample, base: PerExample, near: np.ndarray) -> PerExample:
        """Returns the variant's values, with effects within rounding replaced.

        Args:
            near: examples (boolean) whose output is within rounding of the unedited one.
        """
        doubtful = {
            name: near | _within_rounding(part[name][0], base[name][0], self._tolerance)
            for name in part
            if name in base
        }
        # Among many effects some are small by chance.
        if not near.any() and all(one.mean() < _BY_CHANCE for one in doubtful.values()):
            return part
        if self._clean is None:
            self._clean = _output(self._surface, self._inputs, self._rows, BASELINE).clone()
        clean = self._clean
        if self._base is None:
            self._base = _measure(self._inputs, clean, clean, self._rows, BASELINE)
        plain_base = self._base
        output = _edited(self._surface, variant, self._inputs, self._rows, self._references)
        plain = _measure(self._inputs, output, clean, self._rows, variant.title)
        return {
            **part,
            **{
                name: _substituted_effect(where, part[name], base[name], plain[name], plain_base[name])
                for name, where in doubtful.items()
                if name in plain and name in plain_base
            },
        }


def _finite(output: Tensor) -> Tensor:
    return output.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


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


def _edited(
    surface: Surface, variant: Variant, inputs: SweepInputs, rows: slice, references: References
) -> Tensor:
    with attached(surface, variant.plan, references):
        return _output(surface, inputs, rows, variant.title)


def _output(surface: Surface, inputs: SweepInputs, rows: slice, variant: str) -> Tensor:
    with running_rows(surface.model, rows, len(inputs.tokens)):
        return _checked(surface.call(inputs.prompts[rows]), inputs, rows, variant)


def _checked(output: Any, inputs: SweepInputs, rows: slice, variant: str) -> Tensor:
    """Returns the output, checked to be finite where it is read, with NaN elsewhere."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise CircuitsError(
            f"{variant}: the model's output is {type(output).__name__}, not a tensor of numbers"
        )
    kept = inputs.kept(rows)
    if kept is None:
        _refuse_nan(output, variant)
        return output
    kept = kept.to(output.device)
    if output.shape[:2] != kept.shape:
        raise CircuitsError(
            f"{variant}: the model's output is {list(output.shape)}, without a row for each of the positions "
            f"{list(kept.shape)}"
        )
    _refuse_nan(output[kept], variant)
    output = output.clone()
    output[~kept] = torch.nan
    return output


def _refuse_nan(output: Tensor, variant: str) -> None:
    if bool(output.isnan().any()):
        raise CircuitsError(f"{variant}: the output is not finite")


def _measure(inputs: SweepInputs, output: Tensor, clean: Tensor, rows: slice, variant: str) -> PerExample:
    metric = inputs.metric
    if metric is not None:
        examples = None if inputs.batch is None else inputs.batch[rows]
        return read_values(called(metric, output, examples), metric_name(metric), len(output), variant)
    kept = inputs.kept(rows)
    if inputs.prompts.padded:
        return read_values(unedited_metrics(output, clean, kept), "unedited", len(output), variant)
    if kept is not None:
        output, clean = output[:, kept[0]], clean[:, kept[0]]
    return read_values(unedited_metrics(output, clean), "unedited", len(output), variant)
