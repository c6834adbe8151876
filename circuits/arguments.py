"""Reads and checks arguments: tokens, batches, seeds, choices, indices and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import Snapshot, to_tensor_if_array

P = ParamSpec("P")
R = TypeVar("R")


def is_whole(number: Any, least: int | None = None) -> bool:
    """Tells whether the value is an integer, Python's or numpy's but no bool, and at least `least` if that is given."""
    is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return is_integer and (least is None or bool(number >= least))


_BOUND = "batch_size= bounds the rows (examples × variants) in a forward"
#: Arguments by their former names, with what serves instead.
_FORMER = {
    "checkpoints": "sweep each model, and join: SweepResult.concat({label: result, ...})",
    "chunk": _BOUND,
    "memory": _BOUND,
    "queries": "it is positions= now",
}


def check_renamed_args(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: arguments by their former names are refused with a line that says what serves."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in _FORMER.keys() & kwargs.keys():
            raise CircuitsError(f"{function.__name__}: no argument {name}=; {_FORMER[name]}")
        return function(*args, **kwargs)

    return call


def parse_unpadded_tokens(tokens: Any, caller: str, name: str) -> Snapshot:
    """Copies a non-empty batch of examples without padding, [batch pos]."""
    if hasattr(tokens, "padded"):
        if tokens.padded:
            raise CircuitsError(f"{caller}: {name} have padding; give examples of one length")
        tokens = tokens.tokens
    return Snapshot(parse_token_tensor(tokens, f"{caller}: {name}"))


def parse_token_tensor(tokens: Any, label: str) -> Tensor:
    """Returns inputs [batch pos] as a tensor, without copying them."""
    tokens = to_tensor_if_array(tokens, label)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.numel() == 0:
        got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise CircuitsError(f"{label} must be texts, lists of ids or a tensor [batch pos], got {got}")
    # Embedding layers take only int32 and int64 as ids; indexing with bytes would treat them as a mask.
    is_ids = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return tokens.long() if is_ids and tokens.dtype not in (torch.int32, torch.int64) else tokens


_SEVERAL = "of several tensors make torch.utils.data.TensorDataset(a, b), of which the metric gets a tuple"


def parse_metric_batch(batch: Any, caller: str, examples: int | None = None) -> Any:
    """Reads the batch of a metric, anything that takes a slice of rows and has a length, of so many examples."""
    batch = to_tensor_if_array(batch, f"{caller}: batch") if isinstance(batch, Tensor) else batch
    sliceable = hasattr(batch, "__len__") and hasattr(batch, "__getitem__") and getattr(batch, "ndim", 1) > 0
    if batch is not None and (not sliceable or isinstance(batch, str | bytes | Mapping)):
        raise CircuitsError(
            f"{caller}: batch has len() and takes a slice of rows; got {type(batch).__name__}"
            + (f"; {_SEVERAL}" if isinstance(batch, Mapping) else "")
        )
    if batch is not None and examples is not None and len(batch) != examples:
        hint = f"; {_SEVERAL}" if isinstance(batch, tuple | list) else ""
        raise CircuitsError(f"{caller}: tokens have {examples} examples, batch has {len(batch)}{hint}")
    return batch


def parse_integers(given: Any, caller: str, name: str, least: int | None = 0) -> tuple[int, ...] | None:
    """Reads one or several indices from `least`, without repeats; None stays None."""
    if given is None:
        return None
    given = to_tensor_if_array(given, f"{caller}: {name}")
    given = given.tolist() if isinstance(given, Tensor) else given
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not found or not all(is_whole(x, least) for x in found):
        raise CircuitsError(
            f"{caller}: {name} are whole numbers{' from 0' * (least == 0)}, at least one (of a mask, mask.nonzero()); "
            f"got {format_value(found)}"
        )
    return tuple(dict.fromkeys(map(int, found)))


def parse_frequencies(keys: Any, period: int, caller: str, least: int = 1) -> tuple[int, ...]:
    """Returns frequencies, each once; refuses those that the period has not, and fewer than `least`."""
    given = keys.tolist() if hasattr(keys, "tolist") else keys
    given = list(given) if isinstance(given, Iterable) else [given]
    if len(given) < least or not all(is_whole(key, 1) and key <= period // 2 for key in given):
        raise CircuitsError(
            f"{caller}: keys are frequencies from 1 to {period // 2} for period {period}; got {given}"
        )
    return tuple(dict.fromkeys(map(int, given)))


def stringify_keys(given: Mapping[Any, Any], caller: str, kind: str) -> dict[str, Any]:
    """Returns the values by the text of their names, as tables have them; refuses two names of one text."""
    texts: dict[str, Any] = {}
    for name, value in given.items():
        if str(name) in texts:
            raise CircuitsError(f"{caller}: two {kind} are called {str(name)!r} as text; give other names")
        texts[str(name)] = value
    return texts


def parse_choice(value: Any, choices: Iterable[str], caller: str, name: str) -> str:
    """Returns the value, or raises `CircuitsError` if it is not one of the choices."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise CircuitsError(
            f"{caller}: {name}={format_value(value)}; choose from {', '.join(map(repr, choices))}"
        )
    return str(value)


def parse_count(count: Any, caller: str, name: str = "draws", least: int = 1) -> int:
    """Reads a number of resamples, or of what else `name` says."""
    if not is_whole(count, least):
        raise CircuitsError(f"{caller}: {name}={count!r}; give a whole number from {least}")
    return int(count)


def parse_seed(seed: Any, caller: str) -> int:
    """Reads a seed that both torch's and numpy's generators accept."""
    if not is_whole(seed, 0) or seed >= 2**63:
        raise CircuitsError(f"{caller}: seed={seed!r}; a seed is an integer from 0 to 2**63 - 1")
    return int(seed)
