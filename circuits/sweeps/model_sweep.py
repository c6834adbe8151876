"""Measures every variant of a sweep on one model: many in one forward where that is right, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.engine.stacked import NotStacked, Variant, check_model, clean_pass, run_stacked
from circuits.errors import CircuitsError
from circuits.interventions.apply import attached, wanted
from circuits.interventions.forward_pass import References
from circuits.model.edit_state import State, assert_weights_unchanged, running_rows
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating
from circuits.sweeps.metrics import BASELINE, Measurements, Metric, in_errors, titled
from circuits.sweeps.table import about
from circuits.tensors import largest

NAIVE, FAST = "naive", "fast"
# Differences between two runs of one example that are rounding: relative to the output's largest entry, and in half
# precision to the entry itself.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-6}
_HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass
class ModelSweep:
    """All variants on one model, with its current weights, a chunk of examples at a time.

    Attributes:
        batch_size: rows in a forward.
    """

    surface: HookedModel
    prompts: Prompts
    metric: Metric
    variants: Sequence[Variant]
    batch_size: int

    def run(self, engine: str) -> Measurements:
        """Returns the measurements of all variants, of which `alone` says afterwards why they ran by themselves."""
        refused = 'engine="naive"' if engine == NAIVE else None
        try:
            check_model(self.surface, self.prompts)
        except NotStacked as reason:
            refused = refused or str(reason)
        for one in self.variants:
            one.alone = refused
            if refused is None:
                one.stack(self.surface)
        with evaluating(self.surface.model), torch.no_grad():
            found = within_memory(self.batch_size, self._measured)
        for run, one in zip(found.runs, self.variants, strict=True):
            run["engine"] = FAST if one.alone is None else NAIVE
        return found

    def _measured(self, size: int) -> Measurements:
        """Returns the measurements with so many rows in a forward, of chunks of equal number as far as that goes."""
        self.batch_size, total = size, len(self.prompts)
        self.found = Measurements(
            [
                {"variant": one.name, "draw": one.draw, **about(one.interventions, one.plan)}
                for one in self.variants
            ]
        )
        self.references = References(self.surface, size * self.prompts.shape[1])
        step = -(-total // -(-total // size))
        for start in range(0, total, step):
            with assert_weights_unchanged(self.surface.model, in_errors(self.metric.name)):
                self._measure_chunk(slice(start, min(start + step, total)))
        return self.found

    def _measure_chunk(self, rows: slice) -> None:
        """Adds the measurements of some examples: of the model, of the variants that share forwards, of the others."""
        self.rows, self.chunk = rows, self.prompts[rows]
        # Writes of the metric to the model are looked for once, and not in every call.
        self.here = replace(self.metric.at(rows), model=None)
        stacked = sorted(
            (index for index, one in enumerate(self.variants) if one.alone is None),
            key=lambda index: self.variants[index].start,
        )
        with running_rows(self.surface.model, rows, len(self.prompts)):
            clean = clean_pass(self.surface, self.chunk, {self.variants[index].start for index in stacked})
        # A model may overwrite its output in the next run.
        self.clean = _checked(clean.output, self.here.kept, BASELINE).clone()
        self.scale = largest(self.clean.masked_fill(~self.clean.isfinite(), 0.0))
        self.found.begin(self.here.measure(self.clean, self.clean, BASELINE))
        # After the metric has been tried, and all at once, so that references on the same tokens share a pass.
        self.references.fetch(wanted(step for one in self.variants for step in one.plan))
        state = State(rows=rows, total=len(self.prompts))
        columns = self.here.columns
        if columns is not None:
            columns = None if len(columns) == self.clean.shape[1] else columns.to(self.clean.device)
        unedited = self.clean if columns is None else self.clean[:, columns]
        width = max(1, self.batch_size // len(self.chunk))
        for first in range(0, len(stacked), width):
            indices = stacked[first : first + width]
            together = [self.variants[index] for index in indices]
            for one in together:
                one.begin(self.surface, self.chunk, self.references, state)
            try:
                outputs = run_stacked(self.surface, clean, together, columns).unflatten(0, (len(indices), -1))
            except NotStacked as reason:
                for one in together:
                    one.alone = str(reason)
                continue
            for index, one, output in zip(indices, together, outputs, strict=True):
                if one.unseen:  # by itself, it is an error that says why
                    self._measure_alone(index)
                else:
                    self._add(index, output if one.changed else unedited, columns)
        for index, one in enumerate(self.variants):
            if one.alone is not None:
                self._measure_alone(index)

    def _measure_alone(self, index: int) -> None:
        """Runs one variant in a forward of its own, by plain hooks."""
        with (
            attached(self.surface, self.variants[index].plan, self.references),
            running_rows(self.surface.model, self.rows, len(self.prompts)),
        ):
            output = self.surface.call(self.chunk)
        self._add(index, output)

    def _add(self, index: int, output: Any, columns: Tensor | None = None) -> None:
        """Measures one variant's output, which has these of the positions.

        The last digits of an example depend on how many run beside it, which would count as an effect, with a sign in
        the sign-flip test. Entries that differ from the unedited output by rounding alone count as equal to it.
        """
        title, kept, clean = titled(self.found.runs[index]), self.here.kept, self.clean
        if columns is not None:
            clean, kept = clean[:, columns], None if kept is None else kept[:, columns]
        output, dtype = _checked(output, kept, title), clean.dtype
        rounding = _ROUNDING[dtype] * self.scale if dtype in _ROUNDING else _HALF[dtype] * clean.abs()
        output = torch.where((output - clean).abs() <= rounding, clean, output)
        self.found.add(index, self.here.measure(output, self.clean, title, columns))


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
