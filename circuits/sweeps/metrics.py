"""Reads the results of metrics as sums and counts per example; defines the metrics used when none is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.sweeps.copies import private
from circuits.tensors import as_dense_tensor

#: Metrics that are distances from the unedited output.
UNTESTED = ("kl", "mse")

PerExample = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (sum [n], count [n]), both float64


def read_metric(metric: Any, has_batch: bool) -> Callable[..., Any]:
    """Checks that `metric` can be called with the arguments that it will be given."""
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


def own_positions(metric: Any) -> Any:
    """Returns the positions that a metric says it reads, itself or through the object whose method it is; None: all."""
    owner = getattr(metric, "__self__", None)
    return getattr(metric, "read_positions", getattr(owner, "read_positions", None))


def metric_name(metric: Any) -> str:
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric" if name == "<lambda>" else str(name)


def called(metric: Any, output: Tensor, examples: Any = None) -> dict[str, Any]:
    """Returns a metric's values by name, for an output and its rows of the batch, where one is given.

    The metric gets copies, so that its writes reach no other variant and nobody's tensors, and an output of half
    precision as float32, in which differences of logits keep their digits.
    """
    half = output.dtype in (torch.bfloat16, torch.float16)
    copy = output.float() if half else output.clone()
    values = metric(copy) if examples is None else metric(copy, private(examples))
    return by_name(values, metric_name(metric))


def by_name(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {name: values}
    by_key = {str(key): value for key, value in values.items()}
    if not values or len(by_key) < len(values):
        what = "an empty dict" if not values else "two values that are called alike"
        raise CircuitsError(f"metric {name}: returned {what}")
    return by_key


def read_values(values: Any, name: str, size: int, variant: str) -> PerExample:
    """Reads one call's result: a value per example [n], a pair (sum [n], count [n]), or a dict of those.

    Copied: a metric may fill the same array in every call.
    """
    return {key: _pair(value, key, size, variant) for key, value in by_name(values, name).items()}


def is_pair(value: Any) -> bool:
    """Tells whether a value is a tuple of two, but none of torch's own, such as the values and indices of `max`."""
    return isinstance(value, tuple) and len(value) == 2 and not type(value).__module__.startswith("torch")


def unedited_metrics(
    output: Tensor, clean: Tensor, kept: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compares an output [n pos out] with the unedited one.

    kl: KL(unedited || edited) in nats. mse. logit_diff: the logit of the unedited model's first choice minus that
    of its second. All pool over positions (mse over the entries of the last axis as well), for every output of the
    example. A read-out of width 1 is a number, not logits, and has mse only.

    Args:
        kept: bool [n pos], the positions that count; None: all.
    """
    output, clean = output.double(), clean.double()
    entries = torch.full((len(output),), float(output[0].numel()), dtype=torch.float64)
    if kept is not None:
        kept = kept.to(output.device)
        # Equal outputs add nothing to any of the sums.
        output, clean = (x.masked_fill(~kept[..., None], 0.0) for x in (output, clean))
        entries = kept.sum(1).double().cpu() * output[0, 0].numel()
    # The difference of equal infinite logits is NaN, and counts as 0.
    difference = torch.where(output == clean, torch.zeros_like(output), output - clean)
    metrics = {"mse": (difference.square().flatten(1).sum(1), entries)}
    if output.shape[-1] > 1:
        p, q = clean.log_softmax(-1), output.log_softmax(-1)
        # xlogy-like: a class with probability 0 in the unedited model (logit -inf) adds nothing.
        gap = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - q))
        rows = entries / output.shape[-1]
        metrics = {
            "kl": (gap.flatten(1).sum(1), rows),
            **metrics,
            "logit_diff": (_first_two(output, clean), rows),
        }
    return metrics


def first_choice(output: Tensor, clean: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns `logit_diff` alone, differentiable in `output`, as (sum, count) per example."""
    rows = torch.full((len(output),), float(output[0].numel() // output.shape[-1]), dtype=torch.float64)
    if kept is not None:
        kept = kept.to(output.device)
        output, clean = (x.masked_fill(~kept[..., None], 0.0) for x in (output, clean))
        rows = kept.sum(1).double().cpu()
    return _first_two(output.double(), clean.double()), rows


def _first_two(output: Tensor, clean: Tensor) -> Tensor:
    choices = output.gather(-1, clean.topk(2, dim=-1).indices)
    return (choices[..., 0] - choices[..., 1]).flatten(1).sum(1)


def _pair(value: Any, name: str, size: int, variant: str) -> tuple[np.ndarray, np.ndarray]:
    total, count = value if is_pair(value) else (value, None)
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
    what = f"metric {name}, {variant}"
    if isinstance(value, Tensor):
        value = as_dense_tensor(value, what).detach().cpu().resolve_conj().resolve_neg()
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
