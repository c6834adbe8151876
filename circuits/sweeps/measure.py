"""Measures every variant of a sweep on one model: many in one forward where that is right, else one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.engine.stacked import (
    CleanPass,
    NotStacked,
    StackedVariant,
    check_model,
    clean_pass,
    edits_of,
    first_block,
    run_stacked,
)
from circuits.errors import CircuitsError
from circuits.interventions.apply import Plan, attached, wanted
from circuits.interventions.base import Intervention
from circuits.interventions.reference_runs import References
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating
from circuits.model.state import State, assert_weights_unchanged, running_rows
from circuits.sweeps.measurements import BASELINE, Measurements, Row, titled
from circuits.sweeps.metrics import Metric, PerExample, in_errors
from circuits.sweeps.table import about
from circuits.tensors import largest

NAIVE, FAST = "naive", "fast"
# What counts as rounding between a stack and a single forward, relative to the largest entry.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}
# Share of the examples whose effect may be within rounding by chance.
_BY_CHANCE = 0.02


@dataclass(frozen=True)
class Variant:
    """One row of the grid, or one draw of it."""

    name: str
    draw: int | None
    interventions: tuple[Intervention, ...]
    plan: Plan


@dataclass
class ModelSweep:
    """All variants on one model, with its current weights.

    Attributes:
        batch_size: rows in a forward.
        naive: by variant, why it runs by itself.
    """

    surface: HookedModel
    prompts: Prompts
    metric: Metric
    variants: Sequence[Variant]
    asked: str
    batch_size: int
    naive: dict[str, str] = field(default_factory=dict)

    def run(self, checkpoint: str | None = None) -> Measurements:
        """Returns the measurements of all variants."""
        stacked = self._stackable()
        runs: list[Row] = []
        for index, one in enumerate(self.variants):
            engine = FAST if index in stacked else NAIVE
            row = {"variant": one.name, "draw": one.draw, **about(one.interventions, one.plan)}
            runs.append(row | {"engine": engine})
        with evaluating(self.surface.model), torch.no_grad():
            return within_memory(self.batch_size, partial(self._measured, stacked, runs, checkpoint))

    def _stackable(self) -> dict[int, StackedVariant]:
        """Returns the variants that share forwards, by index; notes why the others do not."""
        found: dict[int, StackedVariant] = {}
        refused = 'engine="naive"' if self.asked == NAIVE else ""
        try:
            check_model(self.surface, self.prompts)
        except NotStacked as reason:
            refused = refused or str(reason)
        for index, one in enumerate(self.variants):
            try:
                if refused:
                    raise NotStacked(refused)
                start = first_block(one.plan, self.surface)
                found[index] = StackedVariant(index, start, edits_of(one.plan))
            except NotStacked as reason:
                self.naive[one.name] = str(reason)
        return found

    def _measured(
        self, stacked: dict[int, StackedVariant], runs: list[Row], checkpoint: str | None, size: int
    ) -> Measurements:
        self.batch_size = size
        found = Measurements(runs, NAIVE, checkpoint)
        pieces = list(self._pieces(size))
        examples = pieces[0].stop
        references = References(self.surface, size * self.prompts.shape[1], (self.prompts.shape, examples))
        for rows in pieces:
            with assert_weights_unchanged(self.surface.model, in_errors(self.metric.name)):
                piece = _Piece(self, rows, references, found)
                piece.measure(stacked)
        return found

    def _pieces(self, size: int) -> Iterator[slice]:
        """Yields the examples of each clean pass, of equal number as far as that goes."""
        total = len(self.prompts)
        step = -(-total // -(-total // size))
        for start in range(0, total, step):
            yield slice(start, min(start + step, total))


@dataclass
class _Piece:
    """The examples of one clean pass, whose output every variant is compared with."""

    sweep: ModelSweep
    rows: slice
    references: References
    found: Measurements

    def __post_init__(self) -> None:
        # Writes of the metric to the model are looked for once, and not in every call.
        self.metric = replace(self.sweep.metric.at(self.rows), model=None)
        self.prompts = self.sweep.prompts[self.rows]

    def measure(self, stacked: dict[int, StackedVariant]) -> None:
        """Adds the measurements of these examples: of the model, of the variants that share forwards, of the others."""
        surface = self.sweep.surface
        with running_rows(surface.model, self.rows, len(self.sweep.prompts)):
            clean = clean_pass(surface, self.prompts, {one.start for one in stacked.values()})
        # A model may overwrite its output in the next run.
        self.clean = _checked(clean.output, self.metric, BASELINE).clone()
        self.base = self.metric.measure(self.clean, self.clean, BASELINE)
        self.found.begin(self.base)
        # After the metric has been tried, and all at once, so that references on the same tokens share a pass.
        self.references.fetch(wanted(step for one in self.sweep.variants for step in one.plan))
        ordered = sorted(stacked.values(), key=lambda one: one.start)
        width = max(1, self.sweep.batch_size // len(self.prompts))
        for first in range(0, len(ordered), width):
            self._measure_stack(clean, ordered[first : first + width])
        for index in range(len(self.sweep.variants)):
            if index not in stacked:
                self.found.add(index, self._plain(index))

    def _measure_stack(self, clean: CleanPass, variants: Sequence[StackedVariant]) -> None:
        """Runs some variants together.

        A stack differs from single forwards by rounding, which would count as an effect, with a sign in the sign-flip
        test. A variant with effects within rounding, which may be none, is run once more by itself.
        """
        surface, state = self.sweep.surface, State(rows=self.rows, total=len(self.sweep.prompts))
        for one in variants:
            one.begin(surface, self.prompts, self.references, state)
        columns = self._columns()
        try:
            output = run_stacked(surface, clean, variants, columns).unflatten(0, (len(variants), -1))
        except NotStacked as reason:
            for one in variants:
                self.found.runs[one.index]["engine"] = NAIVE
                self.sweep.naive[self.sweep.variants[one.index].name] = str(reason)
                self.found.add(one.index, self._plain(one.index))
            return
        near = self._near(variants, output, columns)
        for one, edited, is_near in zip(variants, output, near, strict=True):
            title = titled(self.found.runs[one.index])
            if not one.changed and not one.unseen:
                values = self.metric.measure(self.clean, self.clean, title)
            elif is_near or one.unseen:
                values = self._plain(one.index)
            else:
                values = self.metric.measure(edited, self.clean, title, columns)
                if self._doubtful(values):
                    values = self._plain(one.index)
            self.found.add(one.index, values)

    def _columns(self) -> Tensor | None:
        """Returns the positions at which the metric reads the output; None: all."""
        columns = self.metric.columns
        if columns is None or len(columns) == self.clean.shape[1]:
            return None
        return columns.to(self.clean.device)

    def _near(self, variants: Sequence[StackedVariant], output: Tensor, columns: Tensor | None) -> list[bool]:
        """Tells which variants leave some example's output [variant example pos out] within rounding of the clean one;
        refuses outputs that are not finite.
        """
        clean, kept = self.clean, self.metric.kept
        if columns is not None:
            clean, kept = clean[:, columns], None if kept is None else kept[:, columns]
        if kept is not None:
            clean, output = (x.masked_fill(~kept[..., None], 0.0) for x in (clean, output))
        scale = largest(clean.masked_fill(~clean.isfinite(), 0.0))
        for one, is_nan in zip(variants, output.flatten(1).isnan().any(1).tolist(), strict=True):
            if is_nan:
                raise _not_finite(titled(self.found.runs[one.index]))
        apart = largest((output - clean).flatten(2), 2)
        near: list[bool] = (apart <= _rounding(clean.dtype) * scale).any(1).tolist()
        return near

    def _doubtful(self, values: PerExample) -> bool:
        """Tells whether effects on a metric are within rounding in more examples than by chance."""
        for name in values.keys() & self.base.keys():
            sums, base = values[name][0], self.base[name][0]
            apart, scale = np.abs(sums - base), max(np.abs(sums).max(), np.abs(base).max())
            near = (apart > 0) & (apart <= _rounding(self.clean.dtype) * (scale + 1e-4))
            if near.mean() >= _BY_CHANCE:
                return True
        return False

    def _plain(self, index: int) -> PerExample:
        """Measures one variant in a forward of its own, by plain hooks."""
        surface, title = self.sweep.surface, titled(self.found.runs[index])
        with (
            attached(surface, self.sweep.variants[index].plan, self.references),
            running_rows(surface.model, self.rows, len(self.sweep.prompts)),
        ):
            output = _checked(surface.call(self.prompts), self.metric, title)
        return self.metric.measure(output, self.clean, title)


def _rounding(dtype: torch.dtype) -> float:
    return _ROUNDING.get(dtype, 2 * torch.finfo(dtype).eps)


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
    read = output if kept is None else output[kept.to(output.device)]
    if bool(read.isnan().any()):
        raise _not_finite(title)
    return output


def _not_finite(title: str) -> CircuitsError:
    return CircuitsError(f"{title}: the output is not finite")
