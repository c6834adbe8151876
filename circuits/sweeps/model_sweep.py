"""Measures every variant of a sweep on one model: many in one forward where that is right, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.engine.stacked import (
    CleanPass,
    NotStacked,
    StackedVariant,
    check_model,
    clean_pass,
    run_stacked,
    stacked_variant,
)
from circuits.errors import CircuitsError
from circuits.interventions.apply import Plan, attached, wanted
from circuits.interventions.base import Intervention
from circuits.interventions.forward_pass import References
from circuits.model.edit_state import State, assert_weights_unchanged, running_rows
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating
from circuits.sweeps.measurements import BASELINE, Measurements, Row, titled
from circuits.sweeps.metrics import Metric, in_errors
from circuits.sweeps.table import about
from circuits.tensors import largest

NAIVE, FAST = "naive", "fast"
# Differences between two runs of one example that are rounding: relative to the output's largest entry, and in half
# precision to the entry itself.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-6}
_HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


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
    engine: str
    batch_size: int
    naive: dict[str, str] = field(default_factory=dict)

    def run(self) -> Measurements:
        """Returns the measurements of all variants."""
        stacked = self._stackable()
        runs: list[Row] = [
            {
                "variant": one.name,
                "draw": one.draw,
                **about(one.interventions, one.plan),
                "engine": FAST if index in stacked else NAIVE,
            }
            for index, one in enumerate(self.variants)
        ]
        with evaluating(self.surface.model), torch.no_grad():
            return within_memory(self.batch_size, partial(self._measured, stacked, runs))

    def _stackable(self) -> dict[int, StackedVariant]:
        """Returns the variants that share forwards, by index; notes why the others do not."""
        found: dict[int, StackedVariant] = {}
        refused = 'engine="naive"' if self.engine == NAIVE else ""
        try:
            check_model(self.surface, self.prompts)
        except NotStacked as reason:
            refused = refused or str(reason)
        for index, one in enumerate(self.variants):
            try:
                if refused:
                    raise NotStacked(refused)
                found[index] = stacked_variant(index, one.plan, self.surface)
            except NotStacked as reason:
                self.naive[one.name] = str(reason)
        return found

    def _measured(self, stacked: dict[int, StackedVariant], runs: list[Row], size: int) -> Measurements:
        """Returns the measurements, of one clean pass after the other, of examples of equal number as far as that
        goes.
        """
        self.batch_size = size
        total = len(self.prompts)
        step = -(-total // -(-total // size))
        found = Measurements(runs, NAIVE)
        references = References(self.surface, size * self.prompts.shape[1])
        for start in range(0, total, step):
            with assert_weights_unchanged(self.surface.model, in_errors(self.metric.name)):
                piece = _Piece(self, slice(start, min(start + step, total)), references, found)
                piece.measure(stacked)
        return found


@dataclass
class _Piece:
    """The examples of one clean pass, whose output every variant is compared with."""

    sweep: ModelSweep
    rows: slice
    references: References
    found: Measurements

    def measure(self, stacked: dict[int, StackedVariant]) -> None:
        """Adds the measurements of these examples: of the model, of the variants that share forwards, of the others."""
        surface, whole = self.sweep.surface, self.sweep.prompts
        self.prompts = whole[self.rows]
        # Writes of the metric to the model are looked for once, and not in every call.
        self.metric = replace(self.sweep.metric.at(self.rows), model=None)
        with running_rows(surface.model, self.rows, len(whole)):
            clean = clean_pass(surface, self.prompts, {one.start for one in stacked.values()})
        # A model may overwrite its output in the next run.
        self.clean = _checked(clean.output, self.metric.kept, BASELINE).clone()
        self.scale = largest(self.clean.masked_fill(~self.clean.isfinite(), 0.0))
        self.found.begin(self.metric.measure(self.clean, self.clean, BASELINE))
        # After the metric has been tried, and all at once, so that references on the same tokens share a pass.
        self.references.fetch(wanted(step for one in self.sweep.variants for step in one.plan))
        ordered = sorted(stacked.values(), key=lambda one: one.start)
        width = max(1, self.sweep.batch_size // len(self.prompts))
        for first in range(0, len(ordered), width):
            self._measure_stack(clean, ordered[first : first + width])
        for index in range(len(self.sweep.variants)):
            if index not in stacked:
                self._measure_alone(index)

    def _measure_stack(self, clean: CleanPass, variants: Sequence[StackedVariant]) -> None:
        """Runs some variants together."""
        state = State(rows=self.rows, total=len(self.sweep.prompts))
        for one in variants:
            one.begin(self.sweep.surface, self.prompts, self.references, state)
        columns = self.metric.columns
        if columns is not None:
            columns = None if len(columns) == self.clean.shape[1] else columns.to(self.clean.device)
        try:
            output = run_stacked(self.sweep.surface, clean, variants, columns).unflatten(
                0, (len(variants), -1)
            )
        except NotStacked as reason:
            for one in variants:
                self.found.runs[one.index]["engine"] = NAIVE
                self.sweep.naive[self.sweep.variants[one.index].name] = str(reason)
                self._measure_alone(one.index)
            return
        unedited = self.clean if columns is None else self.clean[:, columns]
        for one, edited in zip(variants, output, strict=True):
            if one.unseen:  # by itself, it is an error that says why
                self._measure_alone(one.index)
            else:
                self._add(one.index, edited if one.changed else unedited, columns)

    def _measure_alone(self, index: int) -> None:
        """Runs one variant in a forward of its own, by plain hooks."""
        surface = self.sweep.surface
        with (
            attached(surface, self.sweep.variants[index].plan, self.references),
            running_rows(surface.model, self.rows, len(self.sweep.prompts)),
        ):
            output = surface.call(self.prompts)
        self._add(index, output)

    def _add(self, index: int, output: Any, columns: Tensor | None = None) -> None:
        """Measures one variant's output, which has these of the positions.

        The last digits of an example depend on how many run beside it, which would count as an effect, with a sign in
        the sign-flip test. Entries that differ from the unedited output by rounding alone count as equal to it.
        """
        title, kept, clean = titled(self.found.runs[index]), self.metric.kept, self.clean
        if columns is not None:
            clean, kept = clean[:, columns], None if kept is None else kept[:, columns]
        output, dtype = _checked(output, kept, title), clean.dtype
        rounding = _ROUNDING[dtype] * self.scale if dtype in _ROUNDING else _HALF[dtype] * clean.abs()
        output = torch.where((output - clean).abs() <= rounding, clean, output)
        self.found.add(index, self.metric.measure(output, self.clean, title, columns))


def _checked(output: Any, kept: Tensor | None, title: str) -> Tensor:
    """Returns a model's output, checked to be numbers where the metric reads it."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise CircuitsError(
            f"{title}: the model's output is {type(output).__name__}, not a tensor of numbers"
        )
    if kept is not None and output.shape[:2] != kept.shape:
        raise CircuitsError(
            f"{title}: the model's output is {list(output.shape)}, without a row for each of the positions "
            f"{list(kept.shape)}"
        )
    if bool((output if kept is None else output[kept.to(output.device)]).isnan().any()):
        raise CircuitsError(f"{title}: the output is not finite")
    return output
