"""Treats tensors and positions as values: copied once, compared by content, shown in one line."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError, format_value


class Snapshot:
    """A private copy of a tensor: equal to another when shape, dtype and sha256 of the bytes are equal.

    Live snapshots of one tensor are one object as long as it has not changed. Without that, a grid of patches from one
    cache would copy the cache once per row.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    _latest: ClassVar[WeakValueDictionary[tuple[Any, ...], Snapshot]] = WeakValueDictionary()

    def __new__(cls, tensor: Tensor) -> Snapshot:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found = cls._latest.get(key)
        if found is None or not found.equals(tensor):
            found = cls._latest[key] = super().__new__(cls)
            with torch.inference_mode(False):
                # In the order of its entries, as some models take no transpose.
                found.tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            found.shape = tuple(found.tensor.shape)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self.tensor,)

    def equals(self, tensor: Tensor) -> bool:
        """Tells whether the copy equals the tensor bit for bit."""
        stored, current = self.tensor, tensor.detach()
        if not (stored.is_contiguous() and current.is_contiguous()):
            return False
        return torch.equal(stored.reshape(-1).view(torch.uint8), current.reshape(-1).view(torch.uint8))

    @cached_property
    def sha256(self) -> str:
        raw = self.tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().tobytes()).hexdigest()

    def describe(self) -> dict[str, Any]:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return {"shape": list(self.shape), "dtype": dtype, "sha256": self.sha256}

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.tensor.dtype, self.sha256

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        text = self.describe()
        return f"tensor({text['shape']}, {text['dtype']}, sha256={self.sha256[:12]})"


def to_tensor_if_array(given: Any, label: str) -> Any:
    """Returns an array or tensor as a tensor; another sequence, such as a column of `datasets`, as a list; anything
    else unchanged.

    It is copied only where torch cannot read an array in place: backwards, write-protected or in foreign byte order.
    """
    if isinstance(given, Sequence) and not isinstance(given, list | tuple | str | bytes | range):
        return list(given)
    if isinstance(given, np.ndarray):
        if np.ma.is_masked(given):
            raise CircuitsError(
                f"{label}: {np.ma.count_masked(given)} entries of the array are masked, and would be read as numbers; "
                "leave them out"
            )
        try:
            return torch.from_numpy(np.require(given, given.dtype.newbyteorder("="), ["C", "W"]))
        except TypeError as error:
            raise CircuitsError(
                f"{label}: torch has no numbers of {given.dtype}, which the array holds"
            ) from error
    if not isinstance(given, Tensor):
        return given
    if given.layout != torch.strided or given.is_nested or given.is_quantized or given.is_meta:
        raise CircuitsError(
            f"{label}: a tensor that is sparse, nested, quantized or on meta; give a dense one"
        )
    if given.is_inference():
        # Autograd refuses tensors made under torch.inference_mode, even as ids.
        with torch.inference_mode(False):
            return given.clone()
    return given


def parse_numbers(given: Any, label: str) -> Tensor:
    """Returns numbers given as a tensor, an array or nested lists as a dense tensor."""
    dense = to_tensor_if_array(given, label)
    try:
        return torch.as_tensor(dense)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CircuitsError(
            f"{label}: give numbers as a tensor or an array, got {type(given).__name__}"
        ) from error


Positions = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Positions from `start` to before `stop`, as in a slice, or by name: those of the prompt, or the new ones."""

    start: int | None = None
    stop: int | None = None
    name: str | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether it depends on the length of the prompt."""
        return self.name is not None or min(self.start or 0, self.stop or 0) < 0

    def start_and_stop(self, length: Any) -> tuple[Any, Any]:
        """Returns its first position, and that after its last, for a prompt of this length, or for a tensor of
        lengths; its end is open without `stop`.
        """
        if self.name is not None:
            return (0, length) if self.name == "prompt" else (length, float("inf"))
        first, last = self.start or 0, float("inf") if self.stop is None else self.stop
        return (first + length if first < 0 else first), (last + length if last < 0 else last)

    def __str__(self) -> str:
        bounds = ("" if bound is None else str(bound) for bound in (self.start, self.stop))
        return self.name or ":".join(bounds)


#: Names of positions while a model generates.
SPANS = ("prompt", "new")


def check_no_integer_mask(given: Any, label: str, mask_text: str) -> None:
    """Refuses a series of whole numbers that may be meant as a mask: only 0 and 1, with repeats or as bytes."""
    is_bytes = isinstance(given, np.ndarray | Tensor) and given.ndim > 0 and given.itemsize == 1
    if isinstance(given, np.ndarray | Tensor):
        numbers = given.reshape(-1).tolist() if given.ndim < 2 else []
    else:
        numbers = list(given) if isinstance(given, list | tuple) or hasattr(given, "to_numpy") else []
    numbers = [] if any(isinstance(number, Tensor) or is_bool(number) for number in numbers) else numbers
    try:
        distinct = set(numbers)
    except TypeError:
        return
    if distinct and distinct <= {0, 1} and (len(numbers) > len(distinct) or is_bytes):
        raise CircuitsError(
            f"{label}: {len(numbers)} numbers that are all 0 or 1 can be read as a mask {mask_text} or as the numbers "
            "0 and 1; give a mask as booleans, and numbers once each, as a list of int"
        )


def parse_positions_or_span(given: Any, label: str) -> Positions | Span | Snapshot | None:
    """Reads positions as `parse_positions` does, or given as a slice, as "prompt" or as "new"; None stays None."""
    if isinstance(given, str) and given in SPANS:
        return Span(name=given)
    if not isinstance(given, slice):
        return parse_positions(given, label)
    try:
        bounds = [None if one is None else operator.index(one) for one in (given.start, given.stop)]
    except TypeError as error:
        raise CircuitsError(f"{label}: a slice of positions has whole numbers, got {given}") from error
    if given.step not in (None, 1):
        raise CircuitsError(f"{label}: a slice of positions has no step, got {given}")
    return Span(bounds[0], bounds[1])


def parse_positions(given: Any, label: str, repeats: bool = False) -> Positions | Snapshot | None:
    """Reads positions: integers (negative ones count from the end) or a boolean mask, [pos] or [batch pos]."""
    if given is None:
        return None
    given = to_tensor_if_array(given, label)
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        if given.ndim not in (1, 2):
            raise CircuitsError(f"{label}: a mask is [pos] or [batch pos], this one is {list(given.shape)}")
        if not bool(given.any()):
            raise CircuitsError(f"{label}: the mask {list(given.shape)} selects nothing")
        return Snapshot(given)
    if isinstance(given, Tensor) and given.ndim > 1:
        raise CircuitsError(
            f"{label}: positions are one list for all examples, a mask of each example's is boolean; got "
            f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
        )
    check_no_integer_mask(given, label, "[pos]")
    given = given.reshape(-1).tolist() if isinstance(given, Tensor) else given
    given = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not given:
        raise CircuitsError(f"{label}: no position given")
    try:
        parsed = tuple(operator.index(one) for one in given if not is_bool(one))
        if len(parsed) < len(given):
            raise TypeError
    except TypeError as error:
        raise CircuitsError(
            f"{label}: positions are integers, or a mask as a tensor or array of bools; got {format_value(given)}"
        ) from error
    return parsed if repeats else tuple(dict.fromkeys(parsed))


def is_bool(number: Any) -> bool:
    """Tells whether the value is a bool, which Python would take for 0 or 1."""
    return isinstance(number, bool | np.bool_) or (isinstance(number, Tensor) and number.dtype == torch.bool)


def positions_to_mask(positions: Positions, length: int, label: str, mask: Tensor | None = None) -> Tensor:
    """Returns a boolean mask [length] that is true at `positions`; with the `mask` [batch length] of padding, [batch
    length], where positions count in each row's own tokens.
    """
    shortest = length if mask is None else int(mask.sum(1).min())
    outside = [position for position in positions if not -shortest <= position < shortest]
    if outside:
        where = "the run has positions" if mask is None else "the shortest prompt has positions"
        raise CircuitsError(f"{label}: no position {outside[0]}: {where} 0-{shortest - 1}")
    if mask is None:
        chosen = torch.zeros(length, dtype=torch.bool)
        chosen[list(positions)] = True
        return chosen
    return torch.zeros_like(mask).scatter(1, positions_to_columns(positions, mask), True)


def positions_to_columns(positions: Positions, mask: Tensor) -> Tensor:
    """Returns the columns [batch position] of positions that count in each row's own tokens."""
    own = torch.tensor(positions, device=mask.device)
    own = torch.where(own < 0, own + mask.sum(1, keepdim=True), own)
    # The columns of each row's tokens come first here, in order.
    return (~mask).int().argsort(dim=1, stable=True).gather(1, own)


def describe_positions(positions: Positions | Span | Snapshot | None) -> Any:
    if isinstance(positions, Snapshot):
        return positions.describe()
    if isinstance(positions, Span):
        return str(positions)
    return None if positions is None else list(positions)
