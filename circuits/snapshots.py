"""Tensors and positions as values: copied once, compared by content, shown in one line."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError


class _Copy:
    """The values of a tensor. Snapshots of one tensor that are alive together share it, while it has not changed.

    A grid of patches from one cache would hold the cache as many times as it has rows.
    """

    _latest: ClassVar[WeakValueDictionary[tuple[Any, ...], _Copy]] = WeakValueDictionary()

    def __init__(self, tensor: Tensor) -> None:
        with torch.inference_mode(False):
            self.tensor = tensor.detach().clone()

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = cls._latest.get(where)
        if known is None or not known.holds(tensor):
            known = cls._latest[where] = cls(tensor)
        return known

    def holds(self, tensor: Tensor) -> bool:
        """Bit for bit."""
        ours, theirs = self.tensor, tensor.detach()
        if not (ours.is_contiguous() and theirs.is_contiguous()):
            return False
        return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))

    @cached_property
    def sha256(self) -> str:
        raw = self.tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


class Snapshot:
    """A private copy of a tensor: equal to another when shape, dtype and sha256 of the bytes are equal."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = _Copy.of(tensor)

    @property
    def tensor(self) -> Tensor:
        return self._copy.tensor

    @property
    def sha256(self) -> str:
        return self._copy.sha256

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

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


def plain(given: Any, what: str) -> Any:
    """An array or tensor as a dense tensor that has values; anything else as it is.

    Copied only where torch cannot read an array in place: backwards, write-protected or in foreign byte order.
    """
    if isinstance(given, np.ndarray):
        try:
            return torch.from_numpy(np.require(given, given.dtype.newbyteorder("="), ["C", "W"]))
        except TypeError as error:
            raise CircuitsError(
                f"{what}: torch has no numbers of {given.dtype}, which the array holds"
            ) from error
    if isinstance(given, Tensor):
        unlike = [
            name
            for name, found in (
                ("sparse", given.layout != torch.strided),
                ("nested", given.is_nested),
                ("quantized", given.is_quantized),
                ("meta", given.is_meta),
            )
            if found
        ]
        if unlike:
            raise CircuitsError(f"{what}: got a {unlike[0]} tensor; give a dense one that has values")
        if given.is_inference():
            # Autograd takes none of those that torch.inference_mode has made, not even as ids.
            with torch.inference_mode(False):
                return given.clone()
    return given


Positions = tuple[int, ...]


def parse_positions(given: Any, what: str) -> Positions | Snapshot | None:
    """Positions as a tuple of integers (negative ones count from the end), or a boolean mask, [pos] or [batch pos]."""
    if given is None:
        return None
    given = plain(given, what)
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        if given.ndim not in (1, 2):
            raise CircuitsError(f"{what}: a mask is [pos] or [batch pos], this one is {list(given.shape)}")
        if not bool(given.any()):
            raise CircuitsError(f"{what}: the mask {list(given.shape)} selects nothing")
        return Snapshot(given)
    if isinstance(given, Tensor):
        if given.ndim > 1:
            raise CircuitsError(
                f"{what}: positions are one list for all examples, a mask of each example's is boolean; got "
                f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
            )
        given = given.reshape(-1).tolist()
    if not isinstance(given, Iterable) or isinstance(given, str):
        given = (given,)
    given = tuple(given)
    try:
        if any(isinstance(position, bool | np.bool_) for position in given):
            raise TypeError
        found = tuple(dict.fromkeys(operator.index(position) for position in given))
    except TypeError as error:
        raise CircuitsError(
            f"{what}: positions are integers or a boolean mask [batch pos], got {given!r}"
        ) from error
    if not found:
        raise CircuitsError(f"{what}: no position given")
    return found


def select_positions(positions: Positions, length: int, what: str) -> Tensor:
    """A boolean mask [length] that is true at `positions`."""
    wrong = [position for position in positions if not -length <= position < length]
    if wrong:
        raise CircuitsError(f"{what}: no position {wrong[0]}: the run has positions 0-{length - 1}")
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(positions)] = True
    return mask


def describe_positions(positions: Positions | Snapshot | None) -> Any:
    if isinstance(positions, Snapshot):
        return positions.describe()
    return None if positions is None else list(positions)
