"""Measures outputs: the sum and count of a metric for every example, by a user's function or a default one; and holds
them for every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.arguments import parse_metric_batch, stringify_keys
from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import (
    Positions,
    Snapshot,
    parse_positions,
    positions_to_mask,
    to_tensor_if_array,
)
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import check_no_unmasked_padding
from circuits.model.prompts_with_mask import Prompts
from circuits.sweeps.logit_difference import LogitDifference, ResolvedAnswers, bind_answers, logit_difference

PerExample = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (sum [n], count [n]), both float64
Row = dict[str, Any]

BASELINE = "the unedited model"


@dataclass(frozen=True)
class Metric:
    """A metric, with all that is needed to measure an output of given examples.

    Attributes:
        function: of an output, and of the examples' rows of `batch` where there is one; None: `default`.
        batch: of all examples.
        default: compares an output with the unedited one, given where it is read or None for everywhere.
        positions: what is read, in each example's own tokens; None: all.
        kept: bool [n pos], where the output is read; None: everywhere.
        aligned: whether that is the same in all examples, which then have no padding.
        examples: how many there are in all; None where that is not known.
        name: of the function; "unedited" for the default.
        untested: the metrics that are distances from the unedited output.
        parts: several metrics by name, `metric={"logit difference": f, "loss": g}`, in the place of a function.
    """

    function: Callable[..., Any] | None
    batch: Any
    default: Callable[[Tensor, Tensor, Tensor | None], Mapping[str, Any]]
    positions: Positions | None = None
    kept: Tensor | None = None
    aligned: bool = True
    examples: int | None = None
    name: str = "unedited"
    untested: tuple[str, ...] = ("kl", "mse")
    parts: Mapping[str, Metric] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        metric: Any,
        batch: Any,
        inputs: tuple[HookedModel, Prompts] | None,
        caller: str,
        positions: Any = None,
        default: Callable[[Tensor, Tensor, Tensor | None], Mapping[str, Any]] | None = None,
    ) -> Metric:
        """Reads and checks the metric, batch and positions that a user gave; `inputs` are the model and its prompts,
        None where outputs come from elsewhere.
        """
        batch = parse_metric_batch(batch, caller, None if inputs is None else len(inputs[1]))
        if isinstance(metric, Mapping):
            return cls._parse_several(metric, batch, inputs, caller, positions)
        owner = getattr(metric, "__self__", None)
        own = getattr(metric, "read_positions", getattr(owner, "read_positions", None))
        if metric is logit_difference or isinstance(metric, LogitDifference):
            metric, batch, own = bind_answers(metric, batch, inputs, caller)
        if metric is not None and not callable(metric):
            raise CircuitsError(f"metric: expected a function of the output, got {metric!r}")
        read = cls(metric, batch, default or compare_with_unedited)
        if metric is not None:
            name = str(getattr(metric, "__name__", type(metric).__name__))
            read = replace(read, name="metric" if name == "<lambda>" else name, untested=())
        if inputs is None:
            return read
        hooked, prompts = inputs
        what = f"{caller}, " + ("positions" if positions is not None else "read_positions of the metric")
        if isinstance(positions, slice):
            if prompts.padded:
                raise CircuitsError(f"{what}: prompts differ in length; give numbers in place of a slice")
            positions = range(prompts.shape[1])[positions]
        at = parse_positions(own if positions is None else positions, what)
        if isinstance(at, Snapshot):
            raise CircuitsError(
                f"{what}: the same positions are read in every example; got a mask [batch pos]"
            )
        kept = prompts.real if prompts.padded else None
        if at is not None:
            kept = positions_to_mask(at, prompts.shape[1], what, kept).expand(prompts.shape[:2])
        if metric is None:
            used = prompts.real if kept is None else kept
            check_no_unmasked_padding(hooked, prompts, used, f"{caller}, without metric=")
        return replace(read, positions=at, kept=kept, aligned=not prompts.padded, examples=len(prompts))

    @classmethod
    def _parse_several(
        cls, given: Mapping[Any, Any], batch: Any, inputs: Any, caller: str, positions: Any
    ) -> Metric:
        """Reads metrics by name; `logit_difference` has its answers with it, each other one gets the batch."""
        named = stringify_keys(given, caller, "metrics")
        if not named or None in named.values():
            raise CircuitsError(f"{caller}: give each metric by its name; got {format_value(given)}")
        parts = {
            name: cls.parse(
                one, None if isinstance(one, LogitDifference) else batch, inputs, caller, positions
            )
            for name, one in named.items()
        }
        first, *_ = parts.values()
        kept = [one.kept for one in parts.values() if one.kept is not None]
        read = [one.positions for one in parts.values() if one.positions is not None]
        return replace(
            first,
            kept=torch.stack(kept).any(0) if len(kept) == len(parts) else None,
            positions=tuple(dict.fromkeys(sum(read, ()))) if len(read) == len(parts) else None,
            name="metric",
            parts=parts,
        )

    def for_rows(self, rows: slice) -> Metric:
        """Returns the metric of some of the examples."""
        batch, kept = (None if one is None else one[rows] for one in (self.batch, self.kept))
        parts = {name: one.for_rows(rows) for name, one in self.parts.items()}
        return replace(self, batch=batch, kept=kept, parts=parts)

    def measure(self, output: Tensor, clean: Tensor, title: str, columns: Tensor | None = None) -> PerExample:
        """Returns sum and count of every example, by metric, for an output at these columns (None: all) and the
        unedited one at all.
        """
        values = self.compute_values(output, clean if columns is None else clean[:, columns], columns)
        return {
            name: self.parse_sums_and_counts(value, name, len(output), title)
            for name, value in values.items()
        }

    def parse_sums_and_counts(
        self, value: Any, name: str, size: int, variant: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads one of a call's values: a number per example [n], or a pair (sum [n], count [n]).

        Copied: a metric may fill the same array in every call.
        """
        total, count = value if is_sum_count_pair(value) else (value, None)
        sums = _parse_per_example(total, name, size, variant)
        counts = np.ones(size) if count is None else _parse_per_example(count, name, size, variant)
        if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
            advice = self.non_finite_advice
            if np.isinf(sums).any():
                advice = "it is infinite, as is the logit of a token that the model or an edit suppresses; read others"
            raise CircuitsError(
                f"{metric_label(name)}, {variant}: not finite for {int((~np.isfinite(sums + counts)).sum())} of {size} "
                f"examples; {advice}"
            )
        if (counts < 0).any():
            raise CircuitsError(f"{metric_label(name)}, {variant}: a count is negative")
        if stray := int(((counts == 0) & (sums != 0)).sum()):
            raise CircuitsError(
                f"{metric_label(name)}, {variant}: {stray} of {size} examples have a sum of entries that their count "
                "of 0 says are not there; leave these out of the sum too"
            )
        return sums, counts

    @property
    def non_finite_advice(self) -> str:
        """What may be the matter where a value is not finite."""
        if self.kept is None:
            return "an entry that does not exist is a count of 0 in a pair (sum, count)"
        where = "elsewhere than at positions=" if self.aligned else "at padding"
        return (
            f"the output is NaN {where}, and the metric may have read it there; "
            "logit_difference reads each prompt's own position"
        )

    @property
    def columns_read(self) -> Tensor | None:
        """The columns of the output that it reads in some example; None: perhaps all."""
        if self.parts:
            columns = [one.columns_read for one in self.parts.values()]
            known = [one for one in columns if one is not None]
            return torch.cat(known).unique() if len(known) == len(columns) else None
        if isinstance(self.batch, ResolvedAnswers):
            return self.batch.columns.unique()
        if self.positions is None or self.kept is None:
            return None
        return self.kept.any(0).nonzero()[:, 0]

    def compute_values(self, output: Tensor, clean: Tensor, columns: Tensor | None = None) -> dict[str, Any]:
        """Returns what the function returns, by name; with a gradient where the output has one.

        The function gets copies, so that its writes reach no other variant and nobody's tensors, and a batch that is a
        tensor on the output's device. Its output is NaN at padding and where it said that it does not read; one of half
        precision comes as float32, in which differences of logits keep their digits. Outputs [n pos out] may have some
        `columns` alone.
        """
        if self.parts:
            found: dict[str, Any] = {}
            for name, one in self.parts.items():
                values = one.compute_values(output, clean, columns)
                found |= {name if key == one.name else f"{name} {key}": x for key, x in values.items()}
            return found
        kept, batch, owned = self.kept, self.batch, False
        kept = None if kept is None else kept.to(output.device)
        if columns is not None:
            if self.function is None or isinstance(batch, ResolvedAnswers):
                kept = None if kept is None else kept[:, columns.to(kept.device)]
                batch = batch.for_kept_columns(columns) if isinstance(batch, ResolvedAnswers) else batch
            else:
                assert kept is not None
                whole = output.new_full((*kept.shape, output.shape[2]), torch.nan)
                whole[:, columns.to(output.device)] = output
                output, owned = whole, True
        if self.function is None:
            if kept is not None and self.aligned:
                output, clean, kept = output[:, kept[0]], clean[:, kept[0]], None
            return dict(self.default(output, clean.detach(), kept))
        half = output.dtype in (torch.bfloat16, torch.float16)
        own = output.float() if half else output.clone() if kept is None and not owned else output
        if kept is not None and not (owned and self.aligned):
            own = own.masked_fill(~kept[..., None], torch.nan)
        return self._call_function(own, batch.to(output.device) if isinstance(batch, Tensor) else batch)

    def _call_function(self, output: Tensor, batch: Any) -> dict[str, Any]:
        """Returns what the function returns, by name; it is given a copy of the batch, to which it may write."""
        # What cannot be copied, such as a lock, is shared.
        with suppress(Exception):
            batch = batch.clone() if isinstance(batch, Tensor) else copy.deepcopy(batch)
        assert self.function is not None
        try:
            values = self.function(output) if batch is None else self.function(output, batch)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if (known := self._error_advice(error, output)) is None:
                raise
            raise CircuitsError(f"{metric_label(self.name)}: {known}") from error
        if not isinstance(values, Mapping):
            return {self.name: values}
        by_key = {str(key): value for key, value in values.items()}
        if not values or len(by_key) < len(values):
            what = "an empty dict" if not values else "two values that are called alike"
            raise CircuitsError(f"{metric_label(self.name)}: returned {what}")
        return by_key

    def _error_advice(self, error: Exception, output: Tensor) -> str | None:
        """Says what to do about a function that cannot have gradients, or does not know which examples it is given."""
        if output.requires_grad and "numpy" in str(error):
            return "numpy has no gradient; compute it with torch"
        if isinstance(error, TypeError):  # of the call itself, not of what the function does
            given = (
                "the output and batch" if self.batch is not None else "the output alone (batch= gives more)"
            )
            return None if getattr(error.__traceback__, "tb_next", None) else f"it is given {given}: {error}"
        if isinstance(error, CircuitsError | torch.OutOfMemoryError) or self.examples in (None, len(output)):
            return None
        return (
            f"{type(error).__name__} on {len(output)} of {self.examples} examples, which run in parts; give what it "
            "reads of each example (answers, labels) as batch=, whose rows come with those of the output"
        )


def metric_label(name: str) -> str:
    """Returns what an error calls a metric; a lambda has no name of its own."""
    return name if name == "metric" else f"metric {name}"


def is_sum_count_pair(value: Any) -> bool:
    """Tells whether a value is a tuple of two, but none of torch's own, such as the values and indices of `max`."""
    return isinstance(value, tuple) and len(value) == 2 and not type(value).__module__.startswith("torch")


# Numbers of an output that the metrics without a function compare at a time, one example at least.
_PIECE = 2**16


def compare_with_unedited(
    output: Tensor, clean: Tensor, read: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compares an output [n pos out] with the unedited one, a few examples at a time.

    kl: KL(unedited || edited) in nats. mse. logit_diff: the logit of the unedited model's first choice minus that
    of its second. All pool over positions (mse over the entries of the last axis as well), for every output of the
    example; `read`, bool [n pos], says at which. A read-out of width 1 is a number, not logits, and has mse only.
    """
    step = max(1, _PIECE // max(1, output[0].numel()))
    pieces = []
    for start in range(0, len(output), step):
        rows = slice(start, start + step)
        pieces.append(_compare_chunk(output[rows], clean[rows], None if read is None else read[rows]))
    return {
        name: (torch.cat([one[name][0] for one in pieces]), torch.cat([one[name][1] for one in pieces]))
        for name in pieces[0]
    }


def _compare_chunk(output: Tensor, clean: Tensor, read: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    output, clean, entries = _zero_unread_outputs(output, clean, read)
    # The difference of equal infinite logits is NaN, and counts as 0.
    difference = torch.where(output == clean, torch.zeros_like(output), output - clean)
    mse = (difference.square().flatten(1).sum(1), entries)
    if output.shape[-1] < 2:
        return {"mse": mse}
    p, q = clean.log_softmax(-1), output.log_softmax(-1)
    # xlogy-like: a class with probability 0 in the unedited model (logit -inf) adds nothing.
    gap = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - q))
    rows = entries / output.shape[-1]
    return {
        "kl": (gap.flatten(1).sum(1), rows),
        "mse": mse,
        "logit_diff": (_top_two_difference(output, clean), rows),
    }


def top_two_logit_diff(
    output: Tensor, clean: Tensor, read: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns `logit_diff` alone, differentiable in `output`, as (sum, count) per example."""
    if output.shape[-1] < 2:
        raise CircuitsError(
            "the model's output has one column, and no first and second choice to take the difference of; give metric="
        )
    output, clean, entries = _zero_unread_outputs(output, clean, read)
    return {"logit_diff": (_top_two_difference(output, clean), entries / output.shape[-1])}


def _zero_unread_outputs(output: Tensor, clean: Tensor, read: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns two outputs in float64, 0 where they are not read, and each example's number of entries."""
    output, clean = output.double(), clean.double()
    if read is None:
        return output, clean, torch.full((len(output),), float(output[0].numel()), dtype=torch.float64)
    hidden = ~read.to(output.device)[..., None]
    entries = read.sum(1).double().cpu() * output.shape[-1]
    return output.masked_fill(hidden, 0.0), clean.masked_fill(hidden, 0.0), entries


def _top_two_difference(output: Tensor, clean: Tensor) -> Tensor:
    choices = output.gather(-1, clean.topk(2, dim=-1).indices)
    return (choices[..., 0] - choices[..., 1]).flatten(1).sum(1)


def _parse_per_example(value: Any, name: str, size: int, variant: str) -> np.ndarray:
    """Returns a metric's values as a number per example; refuses any other shape or kind."""
    what = f"{metric_label(name)}, {variant}"
    if isinstance(value, Tensor):
        value = to_tensor_if_array(value, what).detach().cpu().resolve_conj().resolve_neg()
        # Complex values are refused below, as in numpy arrays.
        value = (value if value.is_complex() else value.double()).numpy()
    shape = list(np.shape(value)) if isinstance(value, np.ndarray) else type(value).__name__
    if shape != [size]:
        raise CircuitsError(
            f"{what}: returned {shape} for {size} examples; return a value per example [{size}], a pair (sum, count) "
            "of those, or a dict of such"
        )
    if value.dtype.kind not in "biuf" or isinstance(value, np.ma.MaskedArray):
        got = "a masked array" if isinstance(value, np.ma.MaskedArray) else f"values of {value.dtype}"
        raise CircuitsError(
            f"{what}: returned {got}; values are real numbers, and one that is missing is a count of 0 in a pair "
            "(sum, count)"
        )
    return np.array(value, dtype=np.float64)


@dataclass(frozen=True)
class Measurements:
    """The metric of several runs on the same examples, and of the unedited run of the same model.

    Attributes:
        runs: of each run but the unedited one, its columns in the table: `variant`, `draw` and what it edits.
        engine: what computed the outputs of runs that do not say it themselves.
        chunks: for consecutive examples, by run, the metric of each; 0 is the unedited run.
    """

    runs: list[Row]
    engine: str = "naive"
    chunks: list[dict[int, PerExample]] = field(default_factory=list)

    def add_chunk_of_run(self, index: int, values: PerExample) -> None:
        """Adds the metric of the run of this index for the examples of a chunk, which the unedited run begins, at −1;
        refuses other metrics than those of the unedited run.
        """
        if index < 0:
            self.chunks.append({})
        self.chunks[-1][1 + index] = values
        if odd := sorted(set(values) ^ set(self.chunks[0][0])):
            title = BASELINE if index < 0 else variant_label(self.runs[index])
            there, missing = (title, BASELINE) if odd[0] in values else (BASELINE, title)
            raise CircuitsError(f"{metric_label(odd[0])}: returned for {there} but not for {missing}")

    def sums_and_counts(self, metric: str) -> np.ndarray:
        """Returns sums and counts of all examples, [2 run example]; run 0 is the unedited one."""
        places = range(1 + len(self.runs))
        parts = [np.stack([chunk[place][metric] for place in places], axis=1) for chunk in self.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def variant_label(run: Row) -> str:
    """Returns what a run is called in messages."""
    return f"variant {run['variant']!r}" + ("" if run.get("draw") is None else f", draw {run['draw']}")
