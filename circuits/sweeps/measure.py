"""Every variant of a sweep on every chunk of examples, by the fast engine where it can, by plain hooks where not."""

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
from circuits.model.record import evaluating
from circuits.model.state import running_rows
from circuits.model.surface import Surface
from circuits.sweeps.metrics import PerExample, called, metric_name, read_values, unedited_metrics
from circuits.sweeps.table import BASELINE, Measured, about
from circuits.tensors import Positions, select_positions

NAIVE, FAST = "naive", "fast"
# Of the examples in a chunk, the part whose effect may be within rounding by chance.
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
    """What is asked of every variant."""

    tokens: Tensor
    metric: Any
    batch: Any
    read: Positions | None
    step: int  # examples per forward
    chunk: int  # tokens per forward, of all variants in it

    def pieces(self) -> Iterator[slice]:
        """The examples of each forward."""
        for start in range(0, len(self.tokens), self.step):
            yield slice(start, min(start + self.step, len(self.tokens)))


@dataclass
class Group:
    """The variants that one engine runs, and what they are compared with: its own unedited output."""

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
    """What was measured on one model."""

    groups: list[Group]
    names: list[str]
    naive: dict[str, str]  # of each variant that did not run on the fast engine: why
    nbytes: int
    stacked: int = 1  # of how many checkpoints the forwards were made of


@dataclass
class ModelSweep:
    """All variants on one model, with the weights it has now."""

    surface: Surface
    question: SweepInputs
    references: References
    groups: list[Group]
    names: list[str]
    naive: dict[str, str]
    engine: Engine | None
    branches: list[Branch]
    asked: str  # which engine

    @classmethod
    def of(cls, surface: Surface, variants: list[Variant], question: SweepInputs, engine: str) -> ModelSweep:
        with evaluating(surface.model), torch.no_grad():
            fast, naive, branches = _sorted_out(surface, variants, question, engine)
        names = list(dict.fromkeys(one.name for one in variants))
        groups = _grouped(variants, naive)
        return cls(surface, question, References(surface), groups, names, naive, fast, branches, engine)

    def run(self) -> Measurements:
        with evaluating(self.surface.model), torch.no_grad():
            try:
                self._run()
            except NotReplayed as reason:
                # In one chunk: then all of them run naive, as effects of two engines cannot be pooled.
                if self.asked == FAST:
                    raise CircuitsError(f"sweep, engine='fast': {reason}; use engine='auto'") from reason
                variants = [one for group in self.groups for one in group.variants]
                self.naive = {name: self.naive.get(name, str(reason)) for name in self.names}
                self.groups, self.engine = _grouped(variants, self.naive), None
                self._run()
        return Measurements(self.groups, self.names, self.naive, self.engine.bytes_held if self.engine else 0)

    def _run(self) -> None:
        for rows in self.question.pieces():
            for group in self.groups:
                if group.engine == NAIVE:
                    _run_naive(self, group, rows)
                else:
                    _run_fast(self, group, rows)

    def another(self) -> ModelSweep:
        """The same, to be measured on other weights of the model."""
        groups = [Group(group.engine, group.variants) for group in self.groups]
        references = References(self.surface)
        return ModelSweep(
            self.surface,
            self.question,
            references,
            groups,
            self.names,
            {},
            self.engine,
            self.branches,
            self.asked,
        )

    def max_stacked(self) -> int:
        """With how many checkpoints of its shape, itself included, it can be stacked."""
        if self.engine is None or self.naive:
            return 1
        return self.engine.max_stacked(self.question.tokens, self.branches, self.question.chunk)

    @property
    def plan(self) -> Plan:
        """What all variants do."""
        return tuple(step for group in self.groups for one in group.variants for step in one.plan)

    @property
    def needs_clean_passes(self) -> bool:
        return any(True for _ in wanted(self.plan))

    def fetch(self) -> None:
        self.references.fetch(wanted(self.plan))


def measure_all(
    surface: Surface, variants: list[Variant], question: SweepInputs, engine: str
) -> Measurements:
    return ModelSweep.of(surface, variants, question, engine).run()


def measure_stacked(
    engine: Engine, jobs: Sequence[ModelSweep], load_into_model: Callable[[int], None]
) -> list[Measurements]:
    """Several checkpoints of one model, whose passes are made together.

    Args:
        engine: that of all their weights.
        take_on: gives the model the weights of one, with which it is measured.
    """
    first, question = jobs[0], jobs[0].question
    rows = slice(0, len(question.tokens))
    tokens = question.tokens.to(first.surface.device)
    with torch.no_grad():
        output, kept = engine.clean(tokens, first.branches)
        assert engine.output is not None
        engine.check(tokens, engine.output, output)
        references = [job.references for job in jobs]
        edited: list[list[tuple[Branch, bool, Tensor]]] = [[] for _ in jobs]
        for at, branch, found in engine.run(
            tokens, rows, first.branches, references, kept, len(first.branches)
        ):
            edited[at].append((branch, branch.changed[at], found))
        with evaluating(first.surface.model):
            for at, (job, clean) in enumerate(zip(jobs, output.split(len(tokens)), strict=True)):
                load_into_model(at)
                compared = _Compared(job, job.groups[0], rows, engine, clean)
                for each in edited[at]:
                    compared.add(*each)
    return [Measurements(job.groups, job.names, {}, engine.bytes_held, len(jobs)) for job in jobs]


def _sorted_out(
    surface: Surface, variants: list[Variant], question: SweepInputs, engine: str
) -> tuple[Engine | None, dict[str, str], list[Branch]]:
    """The fast engine, if it can be used; by variant, why it cannot; and the branches of those for which it can."""
    naive: dict[str, str] = {}
    branches: list[Branch] = []
    fast: Engine | None = None
    if engine == NAIVE:
        return None, {one.name: 'engine="naive"' for one in variants}, []
    for one in variants:
        try:
            branch_of(0, one.plan, surface.n_layers)
        except NotReplayed as reason:
            # All draws of a variant run on one engine: they are pooled.
            naive[one.name] = str(reason)
    if len(naive) < len({one.name for one in variants}):
        try:
            fast = Engine(surface, question.tokens, question.read, question.step)
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
    """One full forward per variant."""
    surface, question = job.surface, job.question
    # A model may overwrite its output in the next run.
    clean = _output(surface, question, rows, BASELINE).clone()
    group.baseline.parts.append(_measure(question, clean, clean, rows, BASELINE))
    # Not before the metric has been tried; all at once, so that references on the same tokens share a pass.
    job.fetch()
    for variant, found in zip(group.variants, group.measured, strict=True):
        output = _edited(surface, variant, question, rows, job.references)
        found.parts.append(_measure(question, output, clean, rows, variant.title))


def _run_fast(job: ModelSweep, group: Group, rows: slice) -> None:
    engine = job.engine
    assert engine is not None
    tokens = job.question.tokens[rows].to(job.surface.device)
    if engine.output is None:
        own = _output(job.surface, job.question, rows, BASELINE).clone()
    else:
        own, engine.output = _checked(engine.output, job.question, BASELINE), None
    output, kept = engine.clean(tokens, job.branches)
    engine.check(tokens, own, output)
    compared = _Compared(job, group, rows, engine, output, own)
    job.fetch()
    width = max(1, job.question.chunk // tokens.numel())
    for _, branch, found in engine.run(tokens, rows, job.branches, [job.references], kept, width):
        compared.add(branch, branch.changed[0], found)


class _Compared:
    """What the fast engine has computed of some examples, measured and compared with the unedited output."""

    def __init__(
        self,
        job: ModelSweep,
        group: Group,
        rows: slice,
        engine: Engine,
        output: Tensor,
        own: Tensor | None = None,
    ) -> None:
        """own: the model's own output, bit for bit as it has it alone."""
        self._question, self._group, self._rows, self._engine = job.question, group, rows, engine
        self._output = output
        self._clean = self._placed(output, BASELINE)
        self._near = engine.tolerance * float(_finite(output).abs().max())
        self._base = _measure(self._question, self._clean, self._clean, rows, BASELINE)
        group.baseline.parts.append(self._base)
        self._settled = _RoundingCheck(
            job.surface, self._question, rows, job.references, engine.tolerance, own
        )

    def add(self, branch: Branch, changed: bool, found: Tensor) -> None:
        variant = self._group.variants[branch.index]
        if changed:
            apart = (found - self._output).abs().flatten(1).nan_to_num(nan=0.0).amax(1)
            near = (apart <= self._near).cpu().numpy()
            edited = self._placed(found, variant.title)
            part = _measure(self._question, edited, self._clean, self._rows, variant.title)
            part = self._settled.part(variant, part, self._base, near)
        else:
            # Where no activation changed the output is the clean one, and not only up to rounding.
            part = _measure(self._question, self._clean, self._clean, self._rows, variant.title)
        self._group.measured[branch.index].parts.append(part)

    def _placed(self, output: Tensor, variant: str) -> Tensor:
        """What was computed at the positions that are read, among all: NaN elsewhere."""
        _refuse_nan(output, variant)
        read = self._engine.read
        if read is None:
            return output
        whole = output.new_full((len(output), self._question.tokens.shape[1], output.shape[-1]), torch.nan)
        whole[:, read] = output
        return whole


class _RoundingCheck:
    """Which examples an edit leaves as they were: stacked and single forwards differ by rounding, which would be an
    effect, and have a sign in the test of signs.

    A variant with effects within rounding is run once more with plain hooks, as is the model; in these examples it
    has the effect that the two say, which may be none.
    """

    def __init__(
        self,
        surface: Surface,
        question: SweepInputs,
        rows: slice,
        references: References,
        tolerance: float,
        clean: Tensor | None,
    ) -> None:
        self._surface, self._question, self._rows, self._references = surface, question, rows, references
        self._tolerance, self._clean = tolerance, clean
        self._base: PerExample | None = None

    def part(self, variant: Variant, part: PerExample, base: PerExample, near: np.ndarray) -> PerExample:
        """near: of which examples (boolean) the output is within rounding of the unedited one."""
        doubtful = {
            name: near | _within_rounding(part[name][0], base[name][0], self._tolerance)
            for name in part
            if name in base
        }
        # Of many effects some are small by chance.
        if not near.any() and all(one.mean() < _BY_CHANCE for one in doubtful.values()):
            return part
        if self._clean is None:
            self._clean = _output(self._surface, self._question, self._rows, BASELINE).clone()
        clean = self._clean
        if self._base is None:
            self._base = _measure(self._question, clean, clean, self._rows, BASELINE)
        plain_base = self._base
        output = _edited(self._surface, variant, self._question, self._rows, self._references)
        plain = _measure(self._question, output, clean, self._rows, variant.title)
        return {
            **part,
            **{
                name: _moved(where, part[name], base[name], plain[name], plain_base[name])
                for name, where in doubtful.items()
                if name in plain and name in plain_base
            },
        }


def _finite(output: Tensor) -> Tensor:
    return output.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _moved(where: np.ndarray, *given: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of a variant, the effect in some examples being that of two other runs."""
    sums, counts = (
        np.where(where, base + (plain - plain_base), part)
        for part, base, plain, plain_base in zip(*given, strict=True)
    )
    return sums, counts


def _within_rounding(edited: np.ndarray, base: np.ndarray, tolerance: float) -> np.ndarray:
    """In which examples a metric is; where it is equal, as one that counts may be, its outputs tell."""
    apart = np.abs(edited - base)
    most = max(np.abs(edited).max(), np.abs(base).max())
    return (apart > 0) & (apart <= tolerance * (most + 1e-4))


def _edited(
    surface: Surface, variant: Variant, question: SweepInputs, rows: slice, references: References
) -> Tensor:
    with attached(surface, variant.plan, references):
        return _output(surface, question, rows, variant.title)


def _output(surface: Surface, question: SweepInputs, rows: slice, variant: str) -> Tensor:
    with running_rows(surface.model, rows, len(question.tokens)):
        return _checked(surface.model(question.tokens[rows].clone()), question, variant)


def _checked(output: Any, question: SweepInputs, variant: str) -> Tensor:
    """Finite where it is read, NaN elsewhere."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise CircuitsError(
            f"{variant}: the model's output is {type(output).__name__}, not a tensor of numbers"
        )
    if question.read is None:
        _refuse_nan(output, variant)
        return output
    inside = select_positions(question.read, output.shape[1], "sweep, positions").to(output.device)
    _refuse_nan(output[:, inside], variant)
    output = output.clone()
    output[:, ~inside] = torch.nan
    return output


def _refuse_nan(output: Tensor, variant: str) -> None:
    if bool(output.isnan().any()):
        raise CircuitsError(f"{variant}: the output is not finite")


def _measure(question: SweepInputs, output: Tensor, clean: Tensor, rows: slice, variant: str) -> PerExample:
    metric = question.metric
    if metric is not None:
        examples = None if question.batch is None else question.batch[rows]
        return read_values(called(metric, output, examples), metric_name(metric), len(output), variant)
    if question.read is not None:
        inside = select_positions(question.read, output.shape[1], "sweep, positions").to(output.device)
        output, clean = output[:, inside], clean[:, inside]
    return read_values(unedited_metrics(output, clean), "unedited", len(output), variant)
