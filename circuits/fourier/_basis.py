"""Defines the orthonormal Fourier basis of Z_p, and the transform into it along any axes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.harmonics import cos_sin
from circuits.tensors import as_dense_tensor
from circuits.validate import is_whole


def basis(period: int) -> Float[Tensor, "period period"]:
    """Returns the basis functions const, cos 1, sin 1, cos 2, ... of x = 0..p-1 as rows, orthonormal, float64.

    cos k and sin k are √(2/p) cos(2πkx/p) and √(2/p) sin(2πkx/p), k = 1..(p-1)/2. An even period ends with the
    alternating cos(πx)/√p. This is the basis of Nanda et al. 2023 (arXiv:2301.05217).
    """
    if not is_whole(period, 1):
        raise CircuitsError(f"fourier: period={period!r}; give a whole number of at least 1")
    period = int(period)
    x = torch.arange(period)
    rows = [torch.ones(period, 1, dtype=torch.float64)]
    rows += [cos_sin(x, k, period) for k in range(1, period // 2 + 1)]
    return torch.cat(rows, 1).T / math.sqrt(period)


def frequencies(period: int) -> Int[Tensor, " period"]:
    """Returns the frequency of each row of the basis: 0, 1, 1, 2, 2, ..."""
    return (torch.arange(int(period)) + 1) // 2


def transform(x: Any, axes: int | Sequence[int] = 0) -> Float[Tensor, "*shape"]:
    """Returns the coefficients of x in the basis along each axis, in the shape of x, float64.

    The length of an axis is its period. For a p × p grid with axes (0, 1), entry (i, j) belongs to the product of row i
    of the basis in the first coordinate and row j in the second. The sum of squares is unchanged (Parseval).
    """
    return _along(read_values(x), axes, inverted=False)


def inverse(coefficients: Any, axes: int | Sequence[int] = 0) -> Float[Tensor, "*shape"]:
    """Returns the values with these coefficients: the inverse of `transform`."""
    return _along(read_values(coefficients), axes, inverted=True)


def read_values(x: Any) -> Tensor:
    """Returns the numbers as a float64 tensor on their device, with gradients; refuses values that are not finite."""
    try:
        values = torch.as_tensor(as_dense_tensor(x, "fourier"))
    except (TypeError, ValueError, RuntimeError):
        raise CircuitsError(
            f"fourier: a spectrum needs numbers along an axis; got {type(x).__name__} without them"
        ) from None
    if values.is_complex():
        raise CircuitsError(
            "fourier: a spectrum needs real numbers; got complex ones: choose their real, imag or abs"
        )
    values = values.double()
    not_finite = int((~values.isfinite()).sum())
    if not_finite or values.ndim == 0 or values.numel() == 0:
        problem = (
            f"{not_finite} infinite or NaN" if not_finite else "no axis" if values.ndim == 0 else "no entries"
        )
        raise CircuitsError(
            f"fourier: a spectrum needs finite numbers along an axis; {list(values.shape)} has {problem}"
        )
    return values


def read_axis(axis: Any, values: Tensor) -> int:
    """Returns the axis as an index from 0."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -values.ndim <= axis < values.ndim:
        raise CircuitsError(f"fourier: no axis {axis!r} in {list(values.shape)}")
    return axis % values.ndim


def _along(values: Tensor, axes: int | Sequence[int], inverted: bool) -> Tensor:
    for axis in (axes,) if isinstance(axes, int) else axes:
        index = read_axis(axis, values)
        functions = basis(values.shape[index]).to(values.device)
        values = torch.tensordot(functions.T if inverted else functions, values, dims=([1], [index])).movedim(
            0, index
        )
    return values
