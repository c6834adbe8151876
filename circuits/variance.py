"""How much of the variance over examples belongs to classes of the examples: alone, together, and beyond each other.

The functions of a class that examples have, such as x mod q, are a linear space: a value per class. Its part of an
activation is the mean of each class. Where the classes are remainders modulo q, the space is that of the waves
cos(2πjx/q), sin(2πjx/q), whether or not q divides the period of x.

    parts = variance.partition(post, {"mod 3": x % 3, "mod 5": x % 5})
    parts.alone, parts.unique, parts.together
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
    def of(cls, classes: Mapping[str, Any], examples: int, caller: str) -> Contrasts:
        read = {str(name): read_classes(one, examples, f"{caller}: {name}") for name, one in classes.items()}
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
                f"{caller}: {', '.join(read)} have {starts[-1]} functions over {examples} examples that are not "
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


def read_classes(classes: Any, examples: int, caller: str) -> tuple[Int[Tensor, " example"], int]:
    """Classes of the examples, numbered anew without those that no example has, and how many there are."""
    read = torch.as_tensor(classes)
    if read.shape != (examples,) or read.dtype.is_floating_point or read.dtype.is_complex:
        raise CircuitsError(
            f"{caller}: classes are whole numbers [example] = [{examples}]; got {str(read.dtype)[6:]} "
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


#: A variance below this share of the mean square is what rounding leaves.
ROUNDING = 1e-20


@dataclass(frozen=True)
class Partition:
    """Shares of the variance over examples, of each feature; 0 for one that does not vary.

    Attributes:
        names: of the classes.
        alone: what the means of its classes explain (η²).
        unique: what they add to those of all others, by least squares.
        together: what all explain.
        degrees: how many numbers each is free to choose.
    """

    names: tuple[str, ...]
    alone: Float[Tensor, " name *features"]
    unique: Float[Tensor, " name *features"]
    together: Float[Tensor, "*features"]
    degrees: tuple[int, ...]

    def plot(self) -> Any:
        """A plotly figure: for each kind of classes, what it explains alone and beyond the others, as bars."""
        from circuits.figures.components import partition_figure

        return partition_figure(self.names, self.alone, self.unique, float(self.together.double().mean()))


def explained(values: Any, classes: Any) -> Float[Tensor, "*kinds"]:
    """The share of the variance over examples that the means of classes explain (η², the correlation ratio).

    Args:
        values: [example *features].
        classes: whole numbers from 0, [example], or of several kinds [kind example], each for itself. Returns
            [*features] or [kind *features]; 0 for a feature that does not vary.
    """
    between, whole, squares, shape = _sums(values, classes, "variance.explained")
    found = torch.where(whole > ROUNDING * squares, between / torch.where(whole > 0, whole, 1.0), 0.0)
    return found.reshape(shape)


def total(values: Any, classes: Any) -> Float[Tensor, "*kinds"]:
    """As `explained`, of all features together: the variance explained, summed over them, over the whole sum."""
    between, whole, squares, _ = _sums(values, classes, "variance.total")
    varies = bool(whole.sum() > ROUNDING * squares.sum())
    found = between.sum(-1) / whole.sum() if varies else torch.zeros(len(between), dtype=torch.float64)
    return found.reshape(torch.as_tensor(classes).shape[:-1])


def adjusted(share: float, examples: int, degrees: int) -> float:
    """What is left of a share once chance has had its part: 1 − (1 − share)·(n − 1)/(n − 1 − degrees).

    0 on average over random classes of the same sizes (whose share is degrees/(n − 1)), 1 where all is explained.
    NaN where the classes leave no freedom.
    """
    left = examples - 1 - degrees
    return 1 - (1 - share) * (examples - 1) / left if left > 0 else float("nan")


def partition(values: Any, classes: Mapping[str, Any]) -> Partition:
    """What several kinds of classes explain, each alone, each beyond all others, and all together.

    Args:
        values: [example *features].
        classes: name -> whole numbers from 0 [example]. Where the kinds together can choose as many numbers as there
            are examples, or repeat each other, what each adds is not defined: an error.
    """
    read = _read_values(values)
    if not isinstance(classes, Mapping) or not classes:
        raise CircuitsError(
            "variance.partition: classes are a dict of names and whole numbers, one per example"
        )
    centred = _centred(read)
    found = Contrasts.of(classes, len(read), "variance.partition")
    moved = found.products(centred)  # [function feature]
    solution = torch.cholesky_solve(moved, found.factor)
    shape = tuple(torch.as_tensor(values).shape[1:])
    alone = torch.stack([_between(centred, index) for index in found.indices(read.device)])
    unique = torch.stack(
        [
            # The general linear hypothesis: what the sum of squares loses without a block of functions.
            (solution[block] * torch.linalg.solve(found.inverse[block, block], solution[block])).sum(0)
            for block in found.blocks
        ]
    )
    together = (moved * solution).sum(0)
    return Partition(
        tuple(map(str, classes)),
        _shares(alone, read).reshape(-1, *shape),
        _shares(unique, read).reshape(-1, *shape),
        _shares(together[None], read)[0].reshape(shape),
        tuple(block.stop - block.start for block in found.blocks),
    )


def _read_values(values: Any) -> Float[Tensor, "example feature"]:
    read = torch.as_tensor(values).detach().double()
    if read.ndim == 0 or read.numel() == 0 or not bool(read.isfinite().all()):
        raise CircuitsError(f"variance: needs finite values [example ...], got {list(read.shape)}")
    return read.reshape(len(read), -1)


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _sums(values: Any, classes: Any, caller: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Sums of squares between classes [kind feature], about the mean and about 0 [feature]; the shape of shares."""
    read = _read_values(values)
    kinds = torch.as_tensor(classes)
    centred = _centred(read)
    several = kinds if kinds.ndim == 2 else kinds[None]
    between = torch.stack(
        [_between(centred, read_classes(one, len(read), caller)[0].to(read.device)) for one in several]
    )
    shape = (*kinds.shape[:-1], *torch.as_tensor(values).shape[1:])
    return between, centred.square().sum(0), read.square().sum(0), shape


def _between(centred: Tensor, index: Tensor) -> Float[Tensor, " feature"]:
    """Σ over classes of n_c · mean², of values whose mean is 0."""
    counts = torch.bincount(index)
    sums = centred.new_zeros(len(counts), centred.shape[1]).index_add_(0, index, centred)
    return (sums.square() / counts.clamp(min=1)[:, None]).sum(0)


def _shares(sums: Tensor, values: Tensor) -> Tensor:
    whole = _centred(values).square().sum(0)
    varies = whole > ROUNDING * values.square().sum(0)
    return torch.where(varies, sums / torch.where(varies, whole, 1.0), 0.0)
