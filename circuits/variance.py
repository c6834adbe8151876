"""Partitions variance over examples by classes of the examples: explained by each alone, together, and uniquely.

The functions of an example's class, such as x mod q, form a linear space with one value per class. The projection of an
activation on it is the mean of each class. Where the classes are remainders modulo q, the space is spanned by the waves
cos(2πjx/q), sin(2πjx/q), whether or not q divides the period of x.

    parts = variance.partition(post, {"mod 3": x % 3, "mod 5": x % 5})
    parts.alone, parts.unique, parts.together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from circuits.arguments import stringify_keys
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import parse_numbers

__all__ = ["Partition", "adjusted", "explained", "partition", "total"]
__dir__ = __all__.copy

#: The products of the functions are singular if their smallest eigenvalue is below this share of the largest.
SINGULAR = 1e-9
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


def explained(values: ArrayLike, classes: ArrayLike) -> Float[Tensor, "*kinds"]:
    """Returns the share of variance over examples that class means explain (η², the squared correlation ratio).

    Args:
        values: [example *features].
        classes: whole numbers from 0, [example], or for several kinds, each on its own, [kind example].

    Returns:
        [*features] or [kind *features]; 0 for a feature that does not vary.
    """
    parsed, kinds = _parse_values(values), parse_numbers(classes, "variance.explained: classes")
    shape = (*kinds.shape[:-1], *parse_numbers(values, "variance").shape[1:])
    return _shares_of_variance(_between_class_squares(parsed, kinds, "variance.explained"), parsed).reshape(
        shape
    )


def total(values: ArrayLike, classes: ArrayLike) -> Float[Tensor, "*kinds"]:
    """Returns the share of `explained` for all features together: explained variance over variance, each summed."""
    parsed, kinds = _parse_values(values), parse_numbers(classes, "variance.total: classes")
    between = _between_class_squares(parsed, kinds, "variance.total").sum(-1, keepdim=True)
    squares, mean_squares = ((x**2).sum() for x in (parsed - parsed.mean(0), parsed))
    varies = bool(squares > ROUNDING * mean_squares)
    return (between / squares if varies else 0 * between).reshape(kinds.shape[:-1])


def adjusted(share: float, examples: int, degrees: int) -> float:
    """Returns a share of variance corrected for chance, 1 − (1 − share)·(n − 1)/(n − 1 − degrees).

    It is 0 on average over random classes of the same sizes (whose share is degrees/(n − 1)), and 1 where all is
    explained. NaN where no degrees of freedom are left.
    """
    degrees_left = examples - 1 - degrees
    return 1 - (1 - share) * (examples - 1) / degrees_left if degrees_left > 0 else float("nan")


def partition(values: ArrayLike, classes: Mapping[str, ArrayLike]) -> Partition:
    """Partitions variance by several kinds of classes: each alone, each beyond all others, and all together.

    Args:
        values: [example *features].
        classes: name -> whole numbers from 0 [example]. It is an error if the kinds together have as many degrees
            of freedom as there are examples, or depend on each other, because unique shares are then not defined.
    """
    caller, parsed = "variance.partition", _parse_values(values)
    if not isinstance(classes, Mapping) or not classes:
        raise CircuitsError(f"{caller}: classes are a dict of names and whole numbers, one per example")
    kinds = {
        name: _parse_classes(one, len(parsed), f"{caller}: {name}")
        for name, one in stringify_keys(classes, caller, "classes").items()
    }
    # One function fewer than classes, as their sum is constant.
    blocks = [torch.nn.functional.one_hot(kind).double()[:, 1:] for kind in kinds.values()]
    functions = torch.cat([block - block.mean(0) for block in blocks], 1).to(parsed.device)
    products = functions.T @ functions
    eigenvalues = torch.linalg.eigvalsh(products) if products.numel() else torch.ones(1)
    if functions.shape[1] >= len(parsed) or bool(eigenvalues[0] <= SINGULAR * eigenvalues[-1]):
        raise CircuitsError(
            f"{caller}: {', '.join(kinds)} have {functions.shape[1]} functions over {len(parsed)} examples that are "
            "not independent of each other; leave some out"
        )
    inverse, with_values = torch.linalg.inv(products), functions.T @ (parsed - parsed.mean(0))
    solution = inverse @ with_values
    unique, start = [], 0
    for block in blocks:
        own = slice(start, start + block.shape[1])
        start = own.stop
        # By the general linear hypothesis, this is the loss in explained squares without a block of functions.
        unique.append((solution[own] * torch.linalg.solve(inverse[own, own], solution[own])).sum(0))
    shape = parse_numbers(values, caller).shape[1:]
    alone = _between_class_squares(parsed, torch.stack(list(kinds.values())), caller)
    return Partition(
        tuple(kinds),
        _shares_of_variance(alone, parsed).reshape(-1, *shape),
        _shares_of_variance(torch.stack(unique), parsed).reshape(-1, *shape),
        _shares_of_variance((with_values * solution).sum(0), parsed).reshape(shape),
        tuple(block.shape[1] for block in blocks),
    )


def _parse_values(values: Any) -> Float[Tensor, "example feature"]:
    tensor = parse_numbers(values, "variance").detach().double()
    if tensor.ndim == 0 or tensor.numel() == 0 or not bool(tensor.isfinite().all()):
        raise CircuitsError(f"variance: needs finite values [example ...], got {list(tensor.shape)}")
    return tensor.reshape(len(tensor), -1)


def _parse_classes(classes: Any, examples: int, caller: str) -> Int[Tensor, " example"]:
    """Returns the classes of the examples, renumbered without empty ones."""
    labels = parse_numbers(classes, caller)
    if labels.shape != (examples,) or labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise CircuitsError(
            f"{caller}: classes are whole numbers [example] = [{examples}]; got {str(labels.dtype)[6:]} "
            f"{list(labels.shape)}"
        )
    return labels.cpu().unique(return_inverse=True)[1]


def _between_class_squares(values: Tensor, classes: Tensor, caller: str) -> Float[Tensor, "kind feature"]:
    """Returns Σ over classes of n_c · mean², of the values less their mean, for classes [kind example] or [example]."""
    centred, found = values - values.mean(0), []
    for kind in classes if classes.ndim == 2 else classes[None]:
        index = _parse_classes(kind, len(values), caller).to(values.device)
        counts = torch.bincount(index)
        sums = centred.new_zeros(len(counts), centred.shape[1]).index_add_(0, index, centred)
        found.append((sums.square() / counts[:, None]).sum(0))
    return torch.stack(found)


def _shares_of_variance(sums: Tensor, values: Tensor) -> Tensor:
    """Returns sums of squares [... feature] as shares of the variance; 0 for a feature that does not vary."""
    squares = (values - values.mean(0)).square().sum(0)
    varies = squares > ROUNDING * values.square().sum(0)
    return torch.where(varies, sums / torch.where(varies, squares, 1.0), 0.0)
