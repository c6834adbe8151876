"""Active frequencies against numpy's FFT of relabelled grids, their level, and planted frequencies."""

import math

import numpy as np
import pytest
import torch

from circuits import fourier
from interp_tasks.papers.miiii.active_frequencies import count_active_against_chance, draw_relabelling


def shares_by_fft(values, axis):
    """Of [a b feature], the share of the variance at each frequency ±k of one axis."""
    power = np.abs(np.fft.fft2(values, axes=(0, 1))) ** 2
    power[0, 0] = 0
    power = np.moveaxis(power, axis, 0)
    size = len(power)
    each = [power[sorted({k, size - k})].sum((0, 1)) for k in range(1, size // 2 + 1)]
    return np.array(each) / power.sum((0, 1))


@pytest.mark.parametrize("sizes", [(7, 7), (5, 8)])
def test_counts_against_numpy(sizes, monkeypatch):
    stream = torch.Generator().manual_seed(1)
    angles = torch.arange(sizes[0]) * 2 * math.pi / sizes[0]
    x = torch.randn(*sizes, 12, generator=stream, dtype=torch.float64) + 3
    x += torch.linspace(0, 2, 12) * angles.cos()[:, None, None]
    grid, bound, whole = fourier.Grid({"a": sizes[0], "b": sizes[1]}), 0.0, 0.0
    # Features together: shares of the summed variance.
    weights = x.flatten(0, 1).var(0, correction=0).numpy()
    for draw in range(5):
        first, second = draw_relabelling(grid, 7, draw)
        # The value that was called x is now called first[x].
        renamed = np.empty_like(x.numpy())
        renamed[np.ix_(first, second)] = x.numpy()
        for share in (shares_by_fft(renamed, axis) for axis in (0, 1)):
            bound, whole = (
                np.maximum(bound, share.max(0)),
                max(whole, (share @ weights).max() / weights.sum()),
            )
    found, together = set(), set()
    for share in (shares_by_fft(x.numpy(), axis) for axis in (0, 1)):
        found |= {(k, feature) for k, feature in zip(*(share > bound).nonzero(), strict=True)}
        together |= {*(share @ weights / weights.sum() > whole).nonzero()[0].tolist()}
    expected = [sum(feature == at for _, feature in found) for at in range(12)]
    assert sum(expected) > 0
    for features in (256, 5):
        monkeypatch.setattr("interp_tasks.papers.miiii.active_frequencies.FEATURES", features)
        counts, of_all = count_active_against_chance(x.flatten(0, 1), grid, 5, 7)
        assert (counts.tolist(), of_all) == (expected, len(together))


def test_planted_frequencies_are_found_and_no_others():
    x = torch.arange(31) * 2 * math.pi / 31
    a, b = torch.meshgrid(x, x, indexing="ij")
    planted = [(3 * a).cos() + (3 * b).cos(), (5 * (a + b)).cos(), (3 * a).cos() + (5 * b).sin(), 0 * a + 2]
    counts, together = count_active_against_chance(
        torch.stack(planted, -1).flatten(0, 1), fourier.Grid({"a": 31, "b": 31}), 19, 0
    )
    # A frequency of either coordinate counts, once.
    assert (counts.tolist(), together) == ([1, 1, 2, 0], 2)


def test_arbitrary_functions_of_the_digits_have_none_but_by_chance():
    """f(a) + g(b) has most of its variance in few pairs of frequencies, and none of it from the order of digits."""
    table = torch.randn(2, 29, 400, generator=torch.Generator().manual_seed(0))
    values = (table[0][:, None] + table[1]).relu().flatten(0, 1)
    counts, together = count_active_against_chance(values, fourier.Grid({"a": 29, "b": 29}), 19, 1)
    # 5% by the rule; binomial bounds of 400, one chance in 10,000 each.
    assert 0.015 < float((counts > 0).double().mean()) < 0.1
    assert together == 0


@pytest.mark.parametrize("p", [7, 12])
def test_a_feature_of_one_input_has_none(p):
    """All its frequencies have one share, in any order of the digits: rounding must not tell them apart."""
    one_hot = torch.eye(p * p, dtype=torch.float64) * torch.linspace(0.1, 3, p * p)
    counts, _ = count_active_against_chance(one_hot, fourier.Grid({"a": p, "b": p}), 19, 0)
    assert counts.tolist() == [0] * (p * p)
