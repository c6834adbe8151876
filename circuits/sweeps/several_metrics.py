"""Several metrics by name, `metric={"logit difference": f, "loss": g}`, as one function that returns them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from circuits.errors import CircuitsError, format_value
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts
from circuits.sweeps.logit_difference import LogitDifference, bound, logit_difference
from circuits.validate import index_by_text


@dataclass(frozen=True)
class Batches:
    """The batch of each metric by name, None where it takes none."""

    parts: Mapping[str, Any]

    def __len__(self) -> int:
        return max(len(part) for part in self.parts.values() if part is not None)

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        return {name: None if part is None else part[rows] for name, part in self.parts.items()}


def bind_each(
    metrics: Mapping[Any, Any], batch: Any, inputs: tuple[HookedModel, Prompts] | None, caller: str
) -> tuple[Callable[..., dict[str, Any]], Batches | None, tuple[int, ...] | None]:
    """Returns one function of an output, its batch, and the positions it reads; None: perhaps all."""
    functions: dict[str, tuple[Any, Any, Any]] = {}
    for name, one in index_by_text(metrics, caller, "metrics").items():
        if not callable(one):
            raise CircuitsError(
                f"{caller}: metric {name!r}: expected a function of the output, got {format_value(one)}"
            )
        if one is logit_difference or isinstance(one, LogitDifference):
            functions[name] = bound(one, None, inputs, caller)
        else:
            functions[name] = one, batch, getattr(one, "read_positions", None)
    if not functions:
        raise CircuitsError(f"{caller}: metric is an empty dict; give functions of the output by name")

    def metric(output: Tensor, rows: Mapping[str, Any] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (function, _, _) in functions.items():
            part = None if rows is None else rows[name]
            # Copies, as a function may write to what it is given.
            part = part.to(output.device, copy=True) if isinstance(part, Tensor) else part
            values = function(output.clone(), *(() if part is None else (part,)))
            own = values if isinstance(values, Mapping) else {None: values}
            found |= {name if key is None else f"{name} {key}": value for key, value in own.items()}
        return found

    _, batches, reads = zip(*functions.values(), strict=True)
    parts = dict(zip(functions, batches, strict=True))
    read = None if None in reads else tuple(dict.fromkeys(at for own in reads for at in own))
    return metric, None if all(part is None for part in batches) else Batches(parts), read
