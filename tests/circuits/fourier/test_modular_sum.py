"""Shares in the waves of a modular sum: closed forms, and least squares by numpy over all inputs and classes."""

import numpy as np
import pytest
import torch

from circuits import fourier
from circuits.fourier import ModularSum, share, variance_explained


def grid(p):
    return torch.cartesian_prod(torch.arange(p), torch.arange(p))


def remainders_by_hand(p, coefficients, q):
    return np.array([(coefficients[0] * a + coefficients[1] * b) % q for a in range(p) for b in range(p)])


def waves_by_hand(r, q, keys):
    """Columns cos and sin of 2πkr/q, those that are 0 everywhere left out."""
    columns = [f(2 * np.pi * k * r / q) for k in keys for f in (np.cos, np.sin)]
    return np.stack([column for column in columns if np.abs(column).max() > 1e-9], 1)


def random_logits(p, q, seed=0):
    return torch.randn(p * p, q, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosines(total, amplitudes, mean=0.0):
    """Σ α_k cos(2πk(r - c)/q) of every input and class, by loops."""
    q = total.period
    return torch.tensor(
        [
            [
                mean + sum(a * np.cos(2 * np.pi * k * (r - c) / q) for k, a in amplitudes.items())
                for c in range(q)
            ]
            for r in total.remainders.tolist()
        ]
    )


@pytest.mark.parametrize(("p", "q"), [(7, 7), (7, 5), (7, 3), (5, 2), (6, 6)])
def test_planted_cosines_come_back(p, q):
    """Whether q divides p or not: over all pairs of an input and a class cosines of r - c are orthogonal."""
    total = ModularSum(grid(p), (1, 1), q)
    planted = {k: 1.5 / k for k in total.frequencies}
    fit = total.cosines(cosines(total, planted, mean=0.25))
    assert fit.coefficients.tolist() == pytest.approx([0.25, *planted.values()])
    assert fit.explained(planted) == pytest.approx(1)
    torch.testing.assert_close(fit.fitted(planted), fit.logits)
    # One frequency alone: α²/2 of the variance, α² for the alternating one.
    power = {k: a**2 * (1 if 2 * k == q else 0.5) for k, a in planted.items()}
    assert fit.explained([1]) == pytest.approx(power[1] / sum(power.values()))


@pytest.mark.parametrize(("p", "q"), [(7, 7), (7, 5), (6, 4)])
def test_cosines_against_least_squares(p, q):
    total = ModularSum(grid(p), (1, 3), q)
    logits = random_logits(p, q)
    r = remainders_by_hand(p, (1, 3), q)
    difference = (r[:, None] - np.arange(q)).ravel()
    columns = [np.cos(2 * np.pi * k * difference / q) for k in range(q // 2 + 1)]
    expected, *_ = np.linalg.lstsq(np.stack(columns, 1), logits.numpy().ravel(), rcond=None)
    fit = total.cosines(logits)
    np.testing.assert_allclose(fit.coefficients, expected, atol=1e-12)
    fitted = np.stack(columns, 1) @ expected
    np.testing.assert_allclose(fit.fitted(total.frequencies).numpy().ravel(), fitted, atol=1e-12)
    r_squared = np.var(fitted) / np.var(logits.numpy())
    assert fit.explained(total.frequencies) == pytest.approx(r_squared)
    constant = torch.full((p * p, q), 0.3, dtype=torch.float64)
    assert total.cosines(constant).explained([1]) == 0


def test_restricted_and_excluded_are_nandas_on_the_complete_grid():
    """Per key two unit directions over (a, b): cos a cos b - sin a sin b, and sin a cos b + cos a sin b."""
    p, keys = 7, (1, 3)
    logits = random_logits(p, p)
    kept = np.zeros((p * p, p))
    for k in keys:
        w = 2 * np.pi * k * np.arange(p) / p
        cos, sin = np.cos(w), np.sin(w)
        for direction in (np.outer(cos, cos) - np.outer(sin, sin), np.outer(sin, cos) + np.outer(cos, sin)):
            unit = direction.ravel() / np.linalg.norm(direction)
            kept += np.outer(unit, unit @ logits.numpy())
    total = ModularSum(grid(p), (1, 1), p)
    np.testing.assert_allclose(total.restricted(logits, keys), logits.numpy().mean(0) + kept, atol=1e-12)
    np.testing.assert_allclose(total.excluded(logits, keys), logits.numpy() - kept, atol=1e-12)


@pytest.mark.parametrize(("q", "keys"), [(5, (1,)), (5, (1, 2)), (3, (1,)), (2, (1,)), (4, (1, 2))])
def test_shares_where_q_does_not_divide_p(q, keys):
    """Against regression on a constant and the waves by numpy."""
    p = 7
    total = ModularSum(grid(p), (1, p % q), q)
    logits = random_logits(p, q)
    waves = waves_by_hand(remainders_by_hand(p, (1, p % q), q), q, keys)
    design = np.concatenate([np.ones((p * p, 1)), waves], 1)
    fitted = design @ np.linalg.lstsq(design, logits.numpy(), rcond=None)[0]
    np.testing.assert_allclose(total.restricted(logits, keys), fitted, atol=1e-12)
    excluded = total.excluded(logits, keys)
    np.testing.assert_allclose(excluded, logits.numpy() - fitted + logits.numpy().mean(0), atol=1e-12)
    # The means stay.
    np.testing.assert_allclose(excluded.mean(0), logits.mean(0), atol=1e-12)
    directions = total.directions(keys)
    torch.testing.assert_close(directions.T @ directions, torch.eye(directions.shape[1], dtype=torch.float64))


def test_blocks_are_those_of_the_grid():
    """Of q = p the eight products per key that `components` and `ablate.frequencies` take."""
    p, keys = 7, [1, 3]
    total = ModularSum(grid(p), (1, 1), p)
    found = fourier.components(fourier.Grid({"a": p, "b": p}), keys)
    values = random_logits(p, 4)
    torch.testing.assert_close(share(values, total.block(keys)), found @ (found.T @ values))
    assert total.block(keys).shape[1] == 16


@pytest.mark.parametrize(
    "design",
    [
        lambda a, b, c: [a, b, c],
        lambda a, b, c: [a, a, b, c],
        lambda a, b, c: [a, b, a + b, c],
        lambda a, b, c: [a, a**0, b, c],
        lambda a, b, c: [0 * a, a, b, c],
        lambda a, b, c: [a, a, a, b, b, c],
        lambda a, b, c: [a ** (k + 1) for k in range(20)] + [b, c],
    ],
    ids=["independent", "twice", "sum", "constant", "zero", "thrice", "more than there are inputs"],
)
def test_what_comes_after_a_function_of_those_before_it_counts(design):
    """A column that depends on others has none of its own, and takes nothing of those behind it."""
    *functions, noise = np.random.default_rng(0).normal(size=(4, 12))
    regressors = np.stack(design(*functions), 1)
    values = functions[1] + 2 * functions[2] + noise
    columns = np.concatenate([np.ones((12, 1)), regressors], 1)
    expected = columns @ np.linalg.lstsq(columns, values, rcond=1e-9)[0]
    found = fourier.regression(torch.tensor(values[:, None]), torch.tensor(regressors))[:, 0]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)
    share_of = variance_explained(torch.tensor(values), torch.tensor(regressors))
    assert float(share_of) == pytest.approx(np.var(expected) / np.var(values))
