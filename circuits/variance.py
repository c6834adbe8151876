"""Partitions variance over examples by classes of the examples: explained by each alone, together, and uniquely.

The functions of an example's class, such as x mod q, form a linear space with one value per class. The projection of an
activation on it is the mean of each class. Where the classes are remainders modulo q, the space is spanned by the waves
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
from circuits.tensors import read_numbers
from circuits.validate import by_text

__all__ = ["Contrasts", "Partition", "adjusted", "explained", "partition", "total"]

#: The Gram matrix of the functions is singular if its smallest eigenvalue is below this share of its largest.
SINGULAR = 1e-9


@dataclass(frozen=True)
class Contrasts:
    """Contrasts between classes: functions of several kinds of classes, less their means over the examples.

    Attributes:
        classes: [kind example], the class of each example.
        bases: for each kind a basis [class function], orthonormal; each function sums to 0.
        blocks: the indices of each kind's functions.
        gram: products of functions summed over examples, [function function].
        factor: the Cholesky factor of `gram`.
    """

    classes: Int[Tensor, "kind example"]
    bases: tuple[Tensor, ...]
    blocks: tuple[slice, ...]
    gram: Float[Tensor, "function also"]
    factor: Float[Tensor, "function also"]

    @classmethod
    def of(cls, classes: Mapping[str, Any], examples: int, caller: str) -> Contrasts:
        """Makes contrasts of named classes of examples; refuses classes whose functions are not independent."""
        parsed = {
            name: read_classes(one, examples, f"{caller}: {name}")
            for name, one in by_text(classes, caller, "classes").items()
        }
        bases = tuple(_helmert(size) for _, size in parsed.values())
        starts = [0]
        for basis in bases:
            starts.append(starts[-1] + basis.shape[1])
        blocks = tuple(slice(low, high) for low, high in itertools.pairwise(starts))
        index = torch.stack([one for one, _ in parsed.values()])
        gram = torch.zeros(starts[-1], starts[-1], dtype=torch.float64)
        for row, (first, first_size) in enumerate(parsed.values()):
            for column, (second, second_size) in enumerate(list(parsed.values())[: row + 1]):
                pairs = torch.bincount(first * second_size + second, minlength=first_size * second_size)
                counts = pairs.reshape(first_size, second_size).double()
                # The product of the means is subtracted, so that functions have mean 0 over the examples.
                counts = counts - counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / examples
                block = bases[row].T @ counts @ bases[column]
                gram[blocks[row], blocks[column]] = block
                gram[blocks[column], blocks[row]] = block.T
        if starts[-1] >= examples or _singular(gram):
            raise CircuitsError(
                f"{caller}: {', '.join(parsed)} have {starts[-1]} functions over {examples} examples that are not "
                "independent of each other; leave some out"
            )
        return cls(index, bases, blocks, gram, torch.linalg.cholesky(gram))

    @property
    def inverse(self) -> Float[Tensor, "function also"]:
        return torch.cholesky_inverse(self.factor)

    def indices(self, device: torch.device) -> list[Tensor]:
        return list(self.classes.to(device))

    def products(self, centred: Float[Tensor, "example feature"]) -> Float[Tensor, "function feature"]:
        """Returns the products of the functions with values of mean 0, summed over examples."""
        by_kind = []
        for index, basis in zip(self.classes.to(centred.device), self.bases, strict=True):
            sums = centred.new_zeros(len(basis), centred.shape[1]).index_add_(0, index, centred)
            by_kind.append(basis.T @ sums.cpu())
        return torch.cat(by_kind)


def read_classes(classes: Any, examples: int, caller: str) -> tuple[Int[Tensor, " example"], int]:
    """Returns the classes of the examples, renumbered without empty ones, and the number of classes."""
    labels = read_numbers(classes, caller)
    if labels.shape != (examples,) or labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise CircuitsError(
            f"{caller}: classes are whole numbers [example] = [{examples}]; got {str(labels.dtype)[6:]} "
            f"{list(labels.shape)}"
        )
    labels = labels.cpu().long()
    labels = labels - labels.min()
    if int(labels.max()) >= 4 * examples:
        numbers, index = labels.unique(return_inverse=True)
        return index, len(numbers)
    # This gives the same without sorting the examples.
    present = torch.bincount(labels) > 0
    return (present.cumsum(0) - 1)[labels], int(present.sum())


def _helmert(size: int) -> Float[Tensor, "class function"]:
    """Returns an orthonormal basis of the vectors that sum to 0, [size size−1] (Helmert contrasts)."""
    k = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones(size, size - 1, dtype=torch.float64))
    rows = torch.arange(size - 1)
    basis[rows + 1, rows] = -k
    return basis / (k * (k + 1)).sqrt()


def _singular(gram: Tensor) -> bool:
    if not gram.numel():
        return False
    values = torch.linalg.eigvalsh(gram)
    return bool(values[0] <= SINGULAR * values[-1])


#: A variance below this share of the mean square is a rounding error.
ROUNDING = 1e-20


@dataclass(frozen=True)
class Partition:
    """Shares of the variance over examples, of each feature; 0 for one that does not vary.

    Attributes:
        names: the names of the kinds of classes.
        alone: the share that the class means of one kind explain (η²).
        unique: the share that one kind adds to all others, by least squares.
        together: the share that all kinds explain.
        degrees: the degrees of freedom of each kind.
    """

    names: tuple[str, ...]
    alone: Float[Tensor, " name *features"]
    unique: Float[Tensor, " name *features"]
    together: Float[Tensor, "*features"]
    degrees: tuple[int, ...]


def explained(values: Any, classes: Any) -> Float[Tensor, "*kinds"]:
    """Returns the share of variance over examples that class means explain (η², the squared correlation ratio).

    Args:
        values: [example *features].
        classes: whole numbers from 0, [example], or for several kinds, each on its own, [kind example].

    Returns:
        [*features] or [kind *features]; 0 for a feature that does not vary.
    """
    between, total_squares, squares, shape = _sums(values, classes, "variance.explained")
    shares = torch.where(
        total_squares > ROUNDING * squares, between / torch.where(total_squares > 0, total_squares, 1.0), 0.0
    )
    return shares.reshape(shape)


def total(values: Any, classes: Any) -> Float[Tensor, "*kinds"]:
    """Returns the share of `explained` for all features together: explained variance over variance, each summed."""
    between, total_squares, squares, _ = _sums(values, classes, "variance.total")
    varies = bool(total_squares.sum() > ROUNDING * squares.sum())
    shares = (
        between.sum(-1) / total_squares.sum() if varies else torch.zeros(len(between), dtype=torch.float64)
    )
    return shares.reshape(read_numbers(classes, "variance.total: classes").shape[:-1])


def adjusted(share: float, examples: int, degrees: int) -> float:
    """Returns a share of variance corrected for chance, 1 − (1 − share)·(n − 1)/(n − 1 − degrees).

    It is 0 on average over random classes of the same sizes (whose share is degrees/(n − 1)), and 1 where all is
    explained. NaN where no degrees of freedom are left.
    """
    degrees_left = examples - 1 - degrees
    return 1 - (1 - share) * (examples - 1) / degrees_left if degrees_left > 0 else float("nan")


def partition(values: Any, classes: Mapping[str, Any]) -> Partition:
    """Partitions variance by several kinds of classes: each alone, each beyond all others, and all together.

    Args:
        values: [example *features].
        classes: name -> whole numbers from 0 [example]. It is an error if the kinds together have as many degrees
            of freedom as there are examples, or depend on each other, because unique shares are then not defined.
    """
    parsed = _read_values(values)
    if not isinstance(classes, Mapping) or not classes:
        raise CircuitsError(
            "variance.partition: classes are a dict of names and whole numbers, one per example"
        )
    centred = _centred(parsed)
    contrasts = Contrasts.of(classes, len(parsed), "variance.partition")
    products = contrasts.products(centred)  # [function feature]
    solution = torch.cholesky_solve(products, contrasts.factor)
    shape = tuple(read_numbers(values, "variance.partition").shape[1:])
    alone = torch.stack([_between(centred, index) for index in contrasts.indices(parsed.device)])
    unique = torch.stack(
        [
            # By the general linear hypothesis, this is the loss in explained squares without a block of functions.
            (solution[block] * torch.linalg.solve(contrasts.inverse[block, block], solution[block])).sum(0)
            for block in contrasts.blocks
        ]
    )
    together = (products * solution).sum(0)
    return Partition(
        tuple(map(str, classes)),
        _shares(alone, parsed).reshape(-1, *shape),
        _shares(unique, parsed).reshape(-1, *shape),
        _shares(together[None], parsed)[0].reshape(shape),
        tuple(block.stop - block.start for block in contrasts.blocks),
    )


def _read_values(values: Any) -> Float[Tensor, "example feature"]:
    tensor = read_numbers(values, "variance").detach().double()
    if tensor.ndim == 0 or tensor.numel() == 0 or not bool(tensor.isfinite().all()):
        raise CircuitsError(f"variance: needs finite values [example ...], got {list(tensor.shape)}")
    return tensor.reshape(len(tensor), -1)


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _sums(values: Any, classes: Any, caller: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Returns sums of squares between classes [kind feature], about the mean and about 0 [feature].

    The last item is the shape of the shares, [*kinds *features].
    """
    parsed = _read_values(values)
    kinds = read_numbers(classes, f"{caller}: classes")
    centred = _centred(parsed)
    class_sets = kinds if kinds.ndim == 2 else kinds[None]
    between = torch.stack(
        [_between(centred, read_classes(one, len(parsed), caller)[0].to(parsed.device)) for one in class_sets]
    )
    shape = (*kinds.shape[:-1], *read_numbers(values, caller).shape[1:])
    return between, centred.square().sum(0), parsed.square().sum(0), shape


def _between(centred: Tensor, index: Tensor) -> Float[Tensor, " feature"]:
    """Returns Σ over classes of n_c · mean², for values whose mean is 0."""
    counts = torch.bincount(index)
    sums = centred.new_zeros(len(counts), centred.shape[1]).index_add_(0, index, centred)
    return (sums.square() / counts.clamp(min=1)[:, None]).sum(0)


def _shares(sums: Tensor, values: Tensor) -> Tensor:
    total_squares = _centred(values).square().sum(0)
    varies = total_squares > ROUNDING * values.square().sum(0)
    return torch.where(varies, sums.to(values.device) / torch.where(varies, total_squares, 1.0), 0.0)
