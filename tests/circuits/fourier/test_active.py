"""Active frequencies against numpy's FFT of relabelled grids, their level, and planted frequencies."""

import math

import numpy as np
import pytest
import torch

from circuits import fourier
from circuits.fourier._spectrum import relabelling


def shares_by_fft(values, axis):
    """Of [a b feature], the share of the variance at each frequency ±k of one axis."""
    power = np.abs(np.fft.fft2(values, axes=(0, 1))) ** 2
    power[0, 0] = 0
    power = np.moveaxis(power, axis, 0)
    size = len(power)
    each = [power[sorted({k, size - k})].sum((0, 1)) for k in range(1, size // 2 + 1)]
    return np.array(each) / power.sum((0, 1))


@pytest.mark.parametrize("sizes", [(7, 7), (5, 8), (6, 6)])
def test_shares_and_bounds_against_numpy(sizes):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(*sizes, 4, generator=stream, dtype=torch.float64) + 3
    grid = fourier.Grid({"a": sizes[0], "b": sizes[1]})
    found = fourier.active(x.flatten(0, 1), grid, draws=5, seed=7)
    drawn = []
    for draw in range(5):
        first, second = relabelling(grid, 7, draw)
        # The value that was called x is now called first[x].
        renamed = np.empty_like(x.numpy())
        renamed[np.ix_(first, second)] = x.numpy()
        drawn.append([shares_by_fft(renamed, axis) for axis in (0, 1)])
    for axis, name in enumerate("ab"):
        np.testing.assert_allclose(found.share[name], shares_by_fft(x.numpy(), axis), rtol=1e-10)
    bound = np.max([np.concatenate(each).max(0) for each in drawn], 0)
    np.testing.assert_allclose(found.bound, bound, rtol=1e-10)
    # Features together: shares of the summed variance.
    weights = x.flatten(0, 1).var(0, correction=0).numpy()
    whole = max(float((share @ weights).max() / weights.sum()) for each in drawn for share in each)
    assert found.together_bound == pytest.approx(whole, rel=1e-10)
    np.testing.assert_allclose(found.together["b"], found.share["b"].numpy() @ weights / weights.sum())


def test_coordinates_of_equal_size_are_relabelled_alike():
    first, second = relabelling(fourier.Grid({"a": 9, "b": 9}), 3)
    assert torch.equal(first, second)
    assert not torch.equal(first, relabelling(fourier.Grid({"a": 9, "b": 9}), 3, 1)[0])
    assert sorted(first.tolist()) == list(range(9))


def test_planted_frequencies_are_found_and_no_others():
    p = 31
    x = torch.arange(p) * 2 * math.pi / p
    a, b = torch.meshgrid(x, x, indexing="ij")
    planted = torch.stack(
        [(3 * a).cos() + (3 * b).cos(), (5 * (a + b)).cos(), (3 * a).cos() + (5 * b).sin(), 0 * a + 2], -1
    )
    found = fourier.active(planted.flatten(0, 1), (p, p))
    assert found.each[:, 0].nonzero().flatten().tolist() == [2]
    assert found.each[:, 1].nonzero().flatten().tolist() == [4]
    # A frequency of either coordinate counts, once.
    assert found.counts.tolist() == [1, 1, 2, 0]
    assert found.keys == (3, 5)
    assert "19 random relabellings" in found.statement


def test_arbitrary_functions_of_the_digits_have_none_but_by_chance():
    """f(a) + g(b) has most of its variance in few pairs of frequencies, and none of it from the order of digits."""
    stream = torch.Generator().manual_seed(0)
    table = torch.randn(2, 29, 400, generator=stream)
    values = (table[0][:, None] + table[1]).relu().flatten(0, 1)
    found = fourier.active(values, (29, 29), seed=1)
    share = float((found.counts > 0).double().mean())
    # 5% by the rule; binomial bounds of 400, one chance in 10,000 each.
    assert 0.015 < share < 0.1
    assert found.keys == ()


@pytest.mark.parametrize("p", [7, 12])
def test_a_feature_of_one_input_has_none(p):
    """All its frequencies have one share, in any order of the digits: rounding must not tell them apart."""
    one_hot = torch.eye(p * p, dtype=torch.float64)
    found = fourier.active(one_hot * torch.linspace(0.1, 3, p * p), (p, p))
    top = found.share["x0"].amax(0)
    torch.testing.assert_close(top, found.bound, rtol=1e-12, atol=0)
    assert found.counts.tolist() == [0] * (p * p)
    assert fourier.active(one_hot[5], (p, p)).keys == ()


def test_features_come_in_parts_and_other_axes_are_flattened(monkeypatch):
    values = torch.randn(25, 3, 2, generator=torch.Generator().manual_seed(0))
    whole = fourier.active(values, (5, 5), draws=3)
    assert whole.bound.shape == (6,)
    monkeypatch.setattr("circuits.fourier._spectrum.FEATURES", 4)
    parts = fourier.active(values, (5, 5), draws=3)
    torch.testing.assert_close(parts.share["x1"], whole.share["x1"])
    assert parts.together_bound == pytest.approx(whole.together_bound)
    alone = fourier.active(values[:, 0, 0], (5, 5), draws=3)
    torch.testing.assert_close(alone.bound, whole.bound[:1])
