"""The cosines and sines of Z_p, defined once: for removing frequencies and for measuring them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cos_sin(x: Tensor, frequency: int, period: int) -> Tensor:
    """cos and sin of 2πkx/p at whole numbers x [...]: [... 2], float64, with mean square 1 over x = 0..p-1.

    At the highest frequency of an even period the sine is 0 everywhere and left out: [... 1].
    """
    # k·x mod p in whole numbers: the angle of a large period loses no digits.
    angle = (frequency * x % period).double() * (2 * math.pi / period)
    if 2 * frequency == period:
        # cos² is 1 there, and has mean 1/2 everywhere else.
        return angle.cos()[..., None]
    return torch.stack([angle.cos(), angle.sin()], -1) * math.sqrt(2)


def wave_products(x: Tensor, frequency: int, period: int) -> Tensor:
    """Returns the products over the columns of x [n column] of {1, cos, sin}, but for the constant, [n function].

    The last column varies fastest; for two columns there are 8 (3 at the highest frequency of an even period).
    """
    table = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    for column in x.T:
        each = torch.cat([torch.ones_like(column)[:, None], cos_sin(column, frequency, period)], 1)
        table = (table[:, :, None] * each[:, None, :]).flatten(1)
    return table[:, 1:]
