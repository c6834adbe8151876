"""Fourier components of activations against numpy's FFT over the complete grid."""

import itertools

import numpy as np
import pytest
import torch

from circuits import ablate, run


def complete(period, coordinates=2, length=3):
    """Every combination once, in shuffled order, and a last token that is the same in all."""
    rows = torch.tensor(list(itertools.product(range(period), repeat=coordinates)))
    rest = torch.full((len(rows), length - coordinates), period)
    rows = torch.cat([rows, rest], 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def spectrum_of(values, keys, period, directions):
    """The part of `values` [grid..., anything] that lies in the bins of `keys`, by FFT over the grid's axes."""
    axes = tuple(range(values.ndim - 1))
    transformed = np.fft.fftn(values, axes=axes)
    kept = np.zeros(values.shape[:-1], dtype=bool)
    for key, bins in ((k, itertools.product((k, 0, period - k), repeat=len(axes))) for k in keys):
        for at in bins:
            along_the_sum = len(set(at)) == 1
            if any(at) and (directions == "all" or along_the_sum):
                kept[tuple(index % period for index in at)] = True
        assert key <= period // 2
    return np.fft.ifftn(np.where(kept[..., None], transformed, 0), axes=axes).real


def shares(by_hand, model, grid, period, keys, directions, coordinates=2):
    """By (site, layer): the mean [...] and the waves' part [grid..., ...] of every activation."""
    seen = {}
    by_hand(model, grid, lambda s, at, x: seen.setdefault((s, at), x))
    found = {}
    for place, value in seen.items():
        table = np.zeros((period,) * coordinates + (value[0].numel(),))
        table[tuple(grid[:, :coordinates].T.numpy())] = value.flatten(1).nan_to_num(neginf=0.0).numpy()
        part = spectrum_of(table, keys, period, directions).reshape(*[period] * coordinates, *value.shape[1:])
        found[place] = value.mean(0), torch.from_numpy(part)
    return found


@pytest.fixture
def small(family, make_model):
    """[period, directions of attention] -> a model that reads "a b ="."""

    def make(period, **changes):
        return make_model(family=family, d_vocab=period + 1, **{"n_ctx": 3, **changes})

    return make


def some(period, count=12):
    """Any examples of the grid, in any order, one of them twice."""
    rows = torch.randint(0, period, (count, 3), generator=torch.Generator().manual_seed(4))
    rows[:, 2] = period
    rows[3] = rows[7]
    return rows


@pytest.mark.parametrize(
    ("period", "keys", "directions", "keep"),
    [
        (5, [2], "all", False),
        (7, [1, 3], "all", True),
        (7, [2, 3], "sum", False),
        (5, [1, 2], "sum", True),
        (6, [3, 1], "all", False),
        (6, [3], "sum", True),
    ],
)
def test_against_the_fft_of_the_complete_grid(small, by_hand, assert_same, period, keys, directions, keep):
    model, grid, tokens = small(period), complete(period), some(period)
    known = shares(by_hand, model, grid, period, keys, directions)
    clean = by_hand(model, tokens)
    for site, layer in (("mlp_post", 1), ("z", 0), ("embed", None), ("pattern", 1)):

        def edited(s, at, x, site=site, layer=layer):
            if (s, at) != (site, layer):
                return x
            mean, part = known[site, layer]
            part = part[tokens[:, 0], tokens[:, 1]]
            return mean + part if keep else x - part

        given = ablate.frequencies(
            site if layer is None else f"{site}.{layer}",
            keys,
            [0, 1],
            period,
            keep,
            grid=grid,
            directions=directions,
        )
        # What one position embeds is a function of one coordinate: there is nothing along the sum.
        if (site, directions) != ("embed", "sum"):
            assert_same(run(model, tokens, given), by_hand(model, tokens, edited), clean)


def test_masked_scores_stay_masked(small):
    model, grid, tokens = small(5, attention_dir="causal"), complete(5), some(5)
    for keep in (False, True):
        given = ablate.frequencies("scores.0", [1], [0, 1], 5, keep, grid=grid)
        output, seen = run(model, tokens, given, cache=["scores.0", "pattern.0"])
        assert bool(output.isfinite().all())
        assert not bool(torch.isclose(output, run(model, tokens)).all())
        upper = torch.ones(3, 3, dtype=torch.bool).triu(1)
        assert bool((seen["pattern.0"][..., upper] == 0).all())
        assert bool(seen["scores.0"][..., ~upper].isfinite().all())
