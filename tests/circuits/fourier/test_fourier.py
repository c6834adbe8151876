"""Spectra against numpy's FFT, and clusters and key frequencies against what was planted."""

import math

import numpy as np
import pytest
import torch

from circuits import fourier
from circuits.frozen_tensors_and_positions import Snapshot
from circuits.interventions.fitted_removal import fourier_functions

PERIODS = [1, 2, 3, 8, 13, 113]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def powers_by_fft(values, axes):
    """Power per combination of folded frequencies, by numpy's complex FFT over the first `axes` axes."""
    transformed = np.abs(np.fft.fftn(values, axes=tuple(range(axes)))) ** 2
    cells = math.prod(values.shape[:axes])
    found = np.zeros([n // 2 + 1 for n in values.shape[:axes]] + list(values.shape[axes:]))
    for at in np.ndindex(*values.shape[:axes]):
        folded = tuple(min(k, n - k) for k, n in zip(at, values.shape, strict=False))
        found[folded] += transformed[at]
    return found / cells**2


@pytest.mark.parametrize("period", PERIODS)
def test_the_basis_is_orthonormal_and_ordered(period):
    rows = fourier.basis(period)
    assert (rows.dtype, rows.shape) == (torch.float64, (period, period))
    torch.testing.assert_close(rows @ rows.T, torch.eye(period, dtype=torch.float64), rtol=0, atol=1e-13)
    x = np.arange(period)
    expected = [np.ones(period)]
    for k in range(1, period // 2 + 1):
        expected.append(np.cos(2 * np.pi * k * x / period))
        if 2 * k < period:
            expected.append(np.sin(2 * np.pi * k * x / period))
    expected = [row / np.linalg.norm(row) for row in expected]
    np.testing.assert_allclose(rows, expected, atol=1e-13)
    assert (
        fourier.frequencies(period).tolist() == [0, *(k for k in range(1, period) for _ in (0, 1))][:period]
    )


@pytest.mark.parametrize("sizes", [(13,), (8,), (7, 7), (5, 8), (4, 3, 5)])
def test_power_is_that_of_the_fft(sizes):
    x = noise(*sizes, 6) + 0.7
    found = fourier.spectrum(x.flatten(0, len(sizes) - 1), sizes)
    np.testing.assert_allclose(found.power, powers_by_fft(x.numpy(), len(sizes)), atol=1e-13)
    # Parseval: the whole is the mean square, all but the constant the variance.
    flat = x.flatten(0, -2)
    np.testing.assert_allclose(found.power.flatten(0, -2).sum(0), flat.square().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, flat.var(0, correction=0), rtol=1e-12)
    np.testing.assert_allclose(found.share.flatten(0, -2).sum(0), np.ones(6), rtol=1e-12)
    assert bool((found.share[(0,) * len(sizes)] == 0).all())
    assert "share norm" in " ".join(repr(found).split())


def test_the_axis_of_weights():
    weights = torch.nn.Parameter(noise(6, 12, 2, 3))
    grid = fourier.Grid({"a": 3, "b": 4})
    for axis in (1, -3):
        found = fourier.spectrum(weights, grid, axis).power
        for i, j, k in np.ndindex(6, 2, 3):
            alone = fourier.spectrum(weights[i, :, j, k], grid).power
            torch.testing.assert_close(found[:, :, i, j, k], alone)
    assert not found.requires_grad
    assert fourier.transform(weights, 1).requires_grad


def inputs(period, order):
    rows = torch.cartesian_prod(torch.arange(period), torch.arange(period))
    rows = torch.cat([rows, torch.full((len(rows), 1), period)], 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(order))]


def test_a_grid_of_inputs_puts_examples_in_their_cells():
    tokens = inputs(5, 3)
    grid = fourier.Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=5)
    arranged = grid.arrange(tokens)
    assert (grid.axes, grid.sizes, grid.cells) == ({"a": 5, "b": 5}, (5, 5), 25)
    torch.testing.assert_close(arranged[..., :2].flatten(0, 1), grid.coordinates())
    torch.testing.assert_close(grid.arrange(tokens.T, axis=1), arranged)
    swapped = fourier.Grid.of_inputs(tokens, {"b": 1, "a": -3}, values=5).arrange(tokens)
    torch.testing.assert_close(swapped, arranged.transpose(0, 1))


def test_ids_in_another_order():
    """A cycle of ids, such as the powers of a generator modulo 5; examples with other ids are not on the grid."""
    tokens = inputs(5, 4)
    powers = [1, 2, 4, 3]
    grid = fourier.Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=[powers, powers])
    arranged = grid.arrange(tokens)
    assert grid.sizes == (4, 4)
    for i, j in np.ndindex(4, 4):
        assert arranged[i, j].tolist() == [powers[i], powers[j], 5]
    # The product is a function of the sum of exponents: its spectrum has (k, k) only.
    logs = torch.tensor([0, 0, 1, 3, 2])
    product = torch.cos(2 * math.pi / 4 * logs[tokens[:, 0] * tokens[:, 1] % 5].double())
    found = fourier.spectrum(product, grid)
    assert float(found.share[1, 1]) == pytest.approx(1)


def test_positions_of_a_matrix():
    row, column = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    by_row = torch.cos(2 * math.pi * row / 4).flatten()
    by_column = torch.sin(2 * math.pi * 2 * column / 6).flatten()
    x = torch.stack([by_row, 3 + by_column, by_row * by_column], 1)
    found = fourier.spectrum(x, {"row": 4, "column": 6})
    for feature, at in enumerate([(1, 0), (0, 2), (1, 2)]):
        assert float(found.share[(*at, feature)]) == pytest.approx(1)
    assert fourier.clusters(found).frame["frequency"].tolist()[:2] == [1, 2]
    # With the examples in front, each has a spectrum of its own.
    batch = x.float().expand(2, -1, -1)
    several = fourier.spectrum(batch, {"row": 4, "column": 6}, axis=1)
    torch.testing.assert_close(several.power[:, :, 0], found.power, atol=1e-6, rtol=1e-6)


def test_blocks_by_hand():
    found = fourier.spectrum(noise(49, 3), (7, 7))
    bands = found.bands()
    assert (bands.labels, bands.degrees) == ((1, 2, 3), (8, 8, 8))
    for place, k in enumerate(bands.labels):
        block = found.power[k, 0] + found.power[0, k] + found.power[k, k]
        torch.testing.assert_close(bands.power[place], block)
    torch.testing.assert_close(bands.share, bands.power / found.variance)
    cross = found.power[1, 2] + found.power[2, 1]
    assert bool((bands.power.sum(0) + cross <= found.variance + 1e-12).all())
    # At half of an even period there is no sine.
    assert fourier.spectrum(noise(16), (4, 4)).bands().degrees == (8, 3)
    assert fourier.spectrum(noise(24), (4, 6)).bands().degrees == (8, 5, 1)
    whole = bands.total()
    torch.testing.assert_close(whole.share, bands.power.sum(1) / found.variance.sum())
    torch.testing.assert_close(found.total().power, found.power.sum(-1))


@pytest.mark.parametrize(("period", "keys"), [(7, [2]), (12, [1, 5]), (8, [3, 4])])
def test_components_are_what_frequencies_removes(period, keys):
    grid = fourier.Grid({"a": period, "b": period})
    found = fourier.components(grid, keys)
    of_grid = Snapshot(grid.coordinates())
    positions = tuple(range(len(grid.sizes)))
    waves = fourier_functions(of_grid, positions, period, tuple(keys), "all", "test").values.tensor
    torch.testing.assert_close(found, waves / period, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        found.T @ found, torch.eye(found.shape[1], dtype=torch.float64), atol=1e-12, rtol=0
    )
    x = noise(period * period, 5)
    bands = fourier.spectrum(x, (period, period)).bands()
    at = [bands.labels.index(key) for key in keys]
    torch.testing.assert_close((found.T @ x).square().sum(0) / grid.cells, bands.power[at].sum(0))


def planted(period=29, noise_level=0.05):
    """Neurons that follow keys 3, 4 and 11 on a grid, one that mixes two, one without, one that is dead."""
    a, b = fourier.Grid({"a": period, "b": period}).coordinates().T.double()
    w = 2 * math.pi / period
    rows = []
    for place, k in enumerate([3, 3, 4, 11, 3]):
        phase = place * 0.8
        rows.append(torch.relu(torch.cos(w * k * a + phase) + torch.cos(w * k * b + phase) + 0.3))
    rows.append(1.2 * torch.cos(w * 3 * a) + torch.cos(w * 4 * b))
    rows.append(noise(period * period, seed=1))
    rows.append(torch.full((period * period,), 0.3, dtype=torch.float64))
    values = torch.stack(rows, 1)
    values[:, :6] += noise_level * noise(period * period, 6, seed=2)
    return fourier.spectrum(values, {"a": period, "b": period})


def test_planted_frequencies_are_recovered():
    found = fourier.clusters(planted())
    frame = found.frame
    assert frame["frequency"].tolist()[:5] == [3, 3, 4, 11, 3]
    assert frame["assigned"].tolist() == [True] * 5 + [False] * 3
    assert found.sizes == {3: 3, 4: 1, 11: 1}
    assert found.neurons(3).tolist() == [0, 1, 4]
    assert frame["share"][5] == pytest.approx(1.44 / 2.44, abs=0.02)
    assert frame["share"][6] < 0.1
    # The dead neuron has no frequency, not one that rounding chose.
    assert frame["frequency"].isna().tolist() == [False] * 7 + [True]
    assert (frame["share"][7], int(found.best[7])) == (0, -1)
    loose = fourier.clusters(planted(), threshold=0.4)
    assert loose.sizes == {3: 4, 4: 1, 11: 1}
    ties = fourier.clusters(planted(), threshold=float(found.share[0]))
    assert not bool(ties.frame["assigned"][0]), "the share must exceed the threshold"


def test_noise_has_key_frequencies_as_seldom_as_stated():
    """One feature is the case that the level is exact for; many different ones only make it rarer."""
    draws, level = 400, 0.2
    for features, low, high in ((1, 0.13, 0.27), (30, 0, 0.02)):
        found = [
            len(fourier.key_frequencies(fourier.spectrum(noise(113, features, seed=s)), "noise", level))
            for s in range(draws)
        ]
        assert low <= np.mean(np.array(found) > 0) <= high


def test_rules_by_hand():
    norms = np.array([3.0, 1, 4, 0.9, 0.5, 0.1])  # of frequency 0 to 5
    basis = fourier.basis(11)
    weights = sum(norm * basis[max(0, 2 * k - 1)] for k, norm in enumerate(norms))
    spectrum = fourier.spectrum(weights)
    np.testing.assert_allclose(spectrum.frame["norm"], norms, rtol=1e-10)
    np.testing.assert_allclose(
        spectrum.frame["share"], [0, *norms[1:] ** 2 / (norms[1:] ** 2).sum()], rtol=1e-10
    )
    sizes = np.abs(np.fft.rfft(weights.numpy())) * np.sqrt(2 / 11)
    cut = sizes.mean() + sizes.std()
    for rule, keys in [
        (("of-largest",), (2,)),
        (("of-largest", 0.2), (1, 2, 3)),
        (("above-mean",), tuple(k for k in range(1, 6) if norms[k] > cut)),
        (("above-mean", 0), (2,)),
        # With norms in the place of amplitudes the cut would be 3.85.
        (("above-mean", 1.6), ()),
        (("above-mean", 2), ()),
        (("preferred",), (2,)),
    ]:
        assert tuple(fourier.key_frequencies(spectrum, *rule)) == keys, rule
    assert "0.2 of the largest" in fourier.key_frequencies(spectrum, "of-largest", 0.2).rule
    # Frequency 0 counts in mean and deviation, √2-fold: without it, and as much as the others, the cut is lower.
    np.testing.assert_allclose(sizes, norms * [np.sqrt(2), 1, 1, 1, 1, 1], rtol=1e-10)
    assert cut > norms.mean() + norms.std() > norms[1:].mean() + norms[1:].std()
    neurons = fourier.spectrum(torch.stack([basis[1] + 0.5 * basis[3], basis[9], 0 * basis[1]], 1))
    assert fourier.key_frequencies(neurons, "preferred").keys == (1, 5)
    assert fourier.key_frequencies(neurons, "preferred", 0.9).keys == (5,)
    flat = fourier.spectrum(torch.full((11, 2), 0.7))
    for rule in ("noise", "of-largest", "above-mean", "preferred"):
        assert len(fourier.key_frequencies(flat, rule)) == 0


def test_gini():
    assert fourier.gini([1, 1, 1, 1]) == pytest.approx(0)
    assert fourier.gini([0, 0, 0, 1]) == pytest.approx(1 - 1 / 4)
    values = noise(50).abs()
    n = len(values)
    pairs = float((values[:, None] - values).abs().sum()) / (2 * n * n * float(values.mean()))
    assert fourier.gini(values) == pytest.approx(pairs)  # half the relative mean difference
    assert fourier.gini(7 * values) == pytest.approx(pairs)
    assert fourier.gini([0.0, 0.0]) == 0
