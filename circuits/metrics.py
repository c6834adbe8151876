"""What a metric may return, read as sums and counts per example; the metrics used when none is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError

PerExample = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (sum [n], count [n]), both float64


def read_metric(metric: Any, has_batch: bool) -> Callable[..., Any]:
    """Check that `metric` can be called with what it will be given."""
    if not callable(metric):
        raise CircuitsError(f"metric: expected a function of the output, got {metric!r}")
    try:
        inspect.signature(metric).bind(*(("output", "batch") if has_batch else ("output",)))
    except TypeError as error:
        given = "(output, batch)" if has_batch else "(output); pass batch= if it needs one"
        raise CircuitsError(
            f"metric {metric_name(metric)}: cannot be called with {given}: {error}"
        ) from error
    except ValueError:
        pass  # built in C, without a signature: calling it will tell
    return metric


def metric_name(metric: Any) -> str:
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric" if name == "<lambda>" else str(name)


def read_values(values: Any, name: str, size: int, variant: str) -> PerExample:
    """Read one call's result: a value per example [n], a pair (sum [n], count [n]), or a dict of those."""
    if not isinstance(values, Mapping):
        values = {name: values}
    if not values:
        raise CircuitsError(f"metric {name}: returned an empty dict")
    return {str(key): _pair(value, str(key), size, variant) for key, value in values.items()}


def unedited_metrics(output: Tensor, clean: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """How far an output [n pos out] is from the unedited one: `kl` in nats, KL(unedited || edited), and
    `mse`.

    Both pool over positions (mse over the entries of the last axis as well), for every output of the example.
    A read-out of width 1 is a number, not logits, and has no kl.
    """
    output, clean = output.double(), clean.double()
    entries = torch.full((len(output),), float(output[0].numel()), dtype=torch.float64)
    found = {"mse": ((output - clean).square().flatten(1).sum(1), entries)}
    if output.shape[-1] > 1:
        p, q = clean.log_softmax(-1), output.log_softmax(-1)
        # xlogy-like: a class with probability 0 in the unedited model (logit -inf) adds nothing.
        gap = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - q))
        found = {"kl": (gap.flatten(1).sum(1), entries / output.shape[-1]), **found}
    return found


def _pair(value: Any, name: str, size: int, variant: str) -> tuple[np.ndarray, np.ndarray]:
    is_pair = isinstance(value, tuple) and len(value) == 2
    total, count = value if is_pair else (value, None)
    sums = _vector(total, name, size, variant)
    counts = np.ones(size) if count is None else _vector(count, name, size, variant)
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise CircuitsError(
            f"metric {name}, {variant}: not finite for {int((~np.isfinite(sums + counts)).sum())} of {size} "
            "examples; an entry that does not exist is a count of 0 in a pair (sum, count)"
        )
    if (counts < 0).any():
        raise CircuitsError(f"metric {name}, {variant}: a count is negative")
    return sums, counts


def _vector(value: Any, name: str, size: int, variant: str) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    shape = list(np.shape(value)) if isinstance(value, np.ndarray) else type(value).__name__
    if shape != [size]:
        raise CircuitsError(
            f"metric {name}, {variant}: returned {shape} for {size} examples; return a value per example "
            f"[{size}], a pair (sum, count) of those, or a dict of such"
        )
    return np.asarray(value, dtype=np.float64)
