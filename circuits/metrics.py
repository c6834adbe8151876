"""What a metric may return, read as sums and counts per example; the metrics used when none is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError

#: Metrics that are distances from the unedited output.
UNTESTED = ("kl", "mse")

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


def own_positions(metric: Any) -> Any:
    """The positions that a metric says it reads, itself or through the object whose method it is; None: all."""
    owner = getattr(metric, "__self__", None)
    return getattr(metric, "read_positions", getattr(owner, "read_positions", None))


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
    """How an output [n pos out] compares with the unedited one.

    kl: KL(unedited || edited) in nats. mse. logit_diff: the logit of the unedited model's first choice minus that
    of its second. All pool over positions (mse over the entries of the last axis as well), for every output of the
    example. A read-out of width 1 is a number, not logits, and has mse only.
    """
    output, clean = output.double(), clean.double()
    entries = torch.full((len(output),), float(output[0].numel()), dtype=torch.float64)
    # Infinite logits that stay as they are have not moved.
    moved = torch.where(output == clean, torch.zeros_like(output), output - clean)
    found = {"mse": (moved.square().flatten(1).sum(1), entries)}
    if output.shape[-1] > 1:
        p, q = clean.log_softmax(-1), output.log_softmax(-1)
        # xlogy-like: a class with probability 0 in the unedited model (logit -inf) adds nothing.
        gap = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - q))
        rows = entries / output.shape[-1]
        found = {
            "kl": (gap.flatten(1).sum(1), rows),
            **found,
            "logit_diff": (_first_two(output, clean), rows),
        }
    return found


def logit_difference(output: Tensor, batch: Any, position: int = -1) -> Tensor:
    """Per example, the logit of a right answer minus that of a wrong one, at one position: a metric for `sweep`.

        sweep(model, tokens, variants, metric=logit_difference, batch=answers)

    Args:
        batch: answers [n 2], the token ids of right and wrong; output [n pos vocabulary].
    """
    answers = torch.as_tensor(batch, device=output.device)
    if answers.ndim != 2 or answers.shape[1] != 2 or answers.is_floating_point():
        raise CircuitsError(
            f"logit_difference: answers are [n 2] = (right, wrong) ids, got {list(answers.shape)} {answers.dtype}"
        )
    if output.ndim != 3 or not -output.shape[1] <= position < output.shape[1]:
        raise CircuitsError(f"logit_difference: no position {position} in an output {list(output.shape)}")
    if bool(((answers < 0) | (answers >= output.shape[2])).any()):
        least, most = int(answers.min()), int(answers.max())
        raise CircuitsError(
            f"logit_difference: answers are ids of 0-{output.shape[2] - 1}, got {least}-{most}"
        )
    logits = output[:, position].gather(1, answers.long())
    return logits[:, 0] - logits[:, 1]


def first_choice(output: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """`logit_diff` alone, differentiable in `output`, as (sum, count) per example."""
    rows = torch.full((len(output),), float(output[0].numel() // output.shape[-1]), dtype=torch.float64)
    return _first_two(output.double(), clean.double()), rows


def _first_two(output: Tensor, clean: Tensor) -> Tensor:
    choices = output.gather(-1, clean.topk(2, dim=-1).indices)
    return (choices[..., 0] - choices[..., 1]).flatten(1).sum(1)


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
