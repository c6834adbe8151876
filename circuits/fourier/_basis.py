"""The orthonormal Fourier basis of Z_p, and the transform into it along any axes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.harmonics import cos_sin
from circuits.validate import is_whole


def basis(period: int) -> Float[Tensor, "period period"]:
    """The rows const, cos 1, sin 1, cos 2, ...: functions of x = 0..p-1, orthonormal, float64.

    cos k and sin k are √(2/p) cos(2πkx/p) and √(2/p) sin(2πkx/p), k = 1..(p-1)/2. An even period ends with the
    alternating cos(πx)/√p. The basis of Nanda et al. 2023 (arXiv:2301.05217).
    """
    if not is_whole(period, 1):
        raise CircuitsError(f"fourier: period={period!r}; give a whole number of at least 1")
    period = int(period)
    x = torch.arange(period)
    rows = [torch.ones(period, 1, dtype=torch.float64)]
    rows += [cos_sin(x, k, period) for k in range(1, period // 2 + 1)]
    return torch.cat(rows, 1).T / math.sqrt(period)


def frequencies(period: int) -> Int[Tensor, " period"]:
    """The frequency of each row of the basis: 0, 1, 1, 2, 2, ..."""
    return (torch.arange(int(period)) + 1) // 2


def transform(x: Any, axes: int | Sequence[int] = 0) -> Float[Tensor, "*shape"]:
    """The coefficients of x in the basis of each axis, whose length is its period; same shape, float64.

    Of a p × p grid, with axes (0, 1), entry (i, j) belongs to the product of row i of the basis in the first
    coordinate and row j in the second. Sums of squares stay what they are (Parseval).
    """
    return _along(read_values(x), axes, inverted=False)


def inverse(coefficients: Any, axes: int | Sequence[int] = 0) -> Float[Tensor, "*shape"]:
    """What `transform` was made of."""
    return _along(read_values(coefficients), axes, inverted=True)


def read_values(x: Any) -> Tensor:
    """Numbers as float64, on their device; gradients pass."""
    try:
        values = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise CircuitsError(
            f"fourier: a spectrum needs numbers along an axis; got {type(x).__name__} without them"
        ) from None
    if values.is_complex():
        raise CircuitsError(
            "fourier: a spectrum needs real numbers; got complex ones: choose their real, imag or abs"
        )
    values = values.double()
    wrong = int((~values.isfinite()).sum())
    if wrong or values.ndim == 0 or values.numel() == 0:
        what = f"{wrong} infinite or NaN" if wrong else "no axis" if values.ndim == 0 else "no entries"
        raise CircuitsError(
            f"fourier: a spectrum needs finite numbers along an axis; {list(values.shape)} has {what}"
        )
    return values


def read_axis(axis: Any, values: Tensor) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or not -values.ndim <= axis < values.ndim:
        raise CircuitsError(f"fourier: no axis {axis!r} in {list(values.shape)}")
    return axis % values.ndim


def _along(values: Tensor, axes: int | Sequence[int], inverted: bool) -> Tensor:
    for axis in (axes,) if isinstance(axes, int) else axes:
        at = read_axis(axis, values)
        rows = basis(values.shape[at]).to(values.device)
        values = torch.tensordot(rows.T if inverted else rows, values, dims=([1], [at])).movedim(0, at)
    return values
