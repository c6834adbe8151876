"""Functions of the classes that examples have, in numbers that do not grow with the examples.

Of classes 0..q−1 the functions with mean 0 over the classes have q − 1 dimensions. All that least squares needs of
several kinds of classes are the counts of their pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitsError

#: Functions that are combinations of others up to this share are none of their own.
SINGULAR = 1e-9


@dataclass(frozen=True)
class Contrasts:
    """The functions of several kinds of classes, less their means over the examples.

    Attributes:
        classes: [kind example].
        bases: of each kind [class function], orthonormal, each summing to 0.
        blocks: where the functions of each kind are.
        gram: their products summed over examples, [function function]; factor: its Cholesky factor.
    """

    classes: Int[Tensor, "kind example"]
    bases: tuple[Tensor, ...]
    blocks: tuple[slice, ...]
    gram: Float[Tensor, "function also"]
    factor: Float[Tensor, "function also"]

    @classmethod
    def of(cls, classes: Mapping[str, Any], examples: int, verb: str) -> Contrasts:
        read = {str(name): read_classes(one, examples, f"{verb}: {name}") for name, one in classes.items()}
        bases = tuple(_helmert(size) for _, size in read.values())
        starts = [0]
        for basis in bases:
            starts.append(starts[-1] + basis.shape[1])
        blocks = tuple(slice(low, high) for low, high in itertools.pairwise(starts))
        index = torch.stack([one for one, _ in read.values()])
        gram = torch.zeros(starts[-1], starts[-1], dtype=torch.float64)
        for at, (first, first_size) in enumerate(read.values()):
            for beside, (second, second_size) in enumerate(list(read.values())[: at + 1]):
                pairs = torch.bincount(first * second_size + second, minlength=first_size * second_size)
                counts = pairs.reshape(first_size, second_size).double()
                # Less the product of the means: the functions have mean 0 over the examples.
                counts = counts - counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / examples
                found = bases[at].T @ counts @ bases[beside]
                gram[blocks[at], blocks[beside]] = found
                gram[blocks[beside], blocks[at]] = found.T
        if starts[-1] >= examples or _singular(gram):
            raise CircuitsError(
                f"{verb}: {', '.join(read)} have {starts[-1]} functions over {examples} examples that are not "
                "independent of each other; leave some out"
            )
        return cls(index, bases, blocks, gram, torch.linalg.cholesky(gram))

    @property
    def inverse(self) -> Float[Tensor, "function also"]:
        return torch.cholesky_inverse(self.factor)

    def indices(self, device: torch.device) -> list[Tensor]:
        return list(self.classes.to(device))

    def products(self, centred: Float[Tensor, "example feature"]) -> Float[Tensor, "function feature"]:
        """Of values with mean 0, summed over examples."""
        found = []
        for index, basis in zip(self.classes.to(centred.device), self.bases, strict=True):
            sums = centred.new_zeros(len(basis), centred.shape[1]).index_add_(0, index, centred)
            found.append(basis.T @ sums.cpu())
        return torch.cat(found)


def read_classes(classes: Any, examples: int, verb: str) -> tuple[Int[Tensor, " example"], int]:
    """Classes of the examples, numbered anew without those that no example has, and how many there are."""
    read = torch.as_tensor(classes)
    if read.shape != (examples,) or read.dtype.is_floating_point or read.dtype.is_complex:
        raise CircuitsError(
            f"{verb}: classes are whole numbers [example] = [{examples}]; got {str(read.dtype)[6:]} "
            f"{list(read.shape)}"
        )
    read = read.cpu().long()
    read = read - read.min()
    if int(read.max()) >= 4 * examples:
        numbers, index = read.unique(return_inverse=True)
        return index, len(numbers)
    # The same without sorting the examples.
    there = torch.bincount(read) > 0
    return (there.cumsum(0) - 1)[read], int(there.sum())


def _helmert(size: int) -> Float[Tensor, "class function"]:
    """An orthonormal basis of the vectors that sum to 0, [size size−1]."""
    steps = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones(size, size - 1, dtype=torch.float64))
    rows = torch.arange(size - 1)
    basis[rows + 1, rows] = -steps
    return basis / (steps * (steps + 1)).sqrt()


def _singular(gram: Tensor) -> bool:
    if not gram.numel():
        return False
    values = torch.linalg.eigvalsh(gram)
    return bool(values[0] <= SINGULAR * values[-1])
