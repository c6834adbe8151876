"""Shares of variance by classes, against least squares on one-hot columns and on waves."""

import numpy as np
import pytest
import torch

from circuits import variance

P = 13
X = torch.arange(P)
GRID = torch.cartesian_prod(X, X)
NUMBER = GRID[:, 0] + GRID[:, 1] * P


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def r_squared(columns, values):
    """Of least squares with an intercept, by numpy."""
    columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    fit = columns @ np.linalg.lstsq(columns, values, rcond=1e-10)[0]
    return 1 - ((values - fit) ** 2).sum(0) / ((values - values.mean(0)) ** 2).sum(0)


def one_hot(*kinds):
    return np.concatenate([np.eye(int(kind.max()) + 1)[kind.numpy()] for kind in kinds], 1)


@pytest.mark.parametrize("q", [2, 3, 5, 11])
def test_classes_modulo_q_explain_what_the_waves_of_q_explain(q):
    values = drawn(P * P, 4)
    angles = 2 * np.pi / q * np.outer(NUMBER.numpy(), np.arange(1, q // 2 + 1))
    waves = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    found = variance.explained(values, NUMBER % q)
    np.testing.assert_allclose(found, r_squared(waves, values.numpy()), atol=1e-12)


def test_parts_are_those_of_least_squares_alone_beyond_the_others_and_together():
    values = drawn(P * P, 2, 3)
    kinds = {"3": NUMBER % 3, "5": NUMBER % 5, "digit": GRID[:, 0] % 4}
    found = variance.partition(values, kinds)
    flat = values.flatten(1).numpy()
    whole = r_squared(one_hot(*kinds.values()), flat)
    np.testing.assert_allclose(found.together.flatten(), whole, atol=1e-10)
    for at, name in enumerate(kinds):
        others = [kind for other, kind in kinds.items() if other != name]
        np.testing.assert_allclose(
            found.alone[at].flatten(), r_squared(one_hot(kinds[name]), flat), atol=1e-10
        )
        beyond = whole - r_squared(one_hot(*others), flat)
        np.testing.assert_allclose(found.unique[at].flatten(), beyond, atol=1e-10)
    assert found.names == ("3", "5", "digit")
    assert found.degrees == (2, 4, 3)
    assert found.unique.shape == (3, 2, 3)


def test_several_kinds_at_once_are_each_for_itself():
    values = drawn(P * P, 3)
    kinds = torch.stack([NUMBER % 3, NUMBER % 7])
    each = variance.explained(values, kinds)
    assert torch.equal(each[0], variance.explained(values, NUMBER % 3))
    assert torch.equal(each[1], variance.explained(values, NUMBER % 7))
    of_all = variance.total(values, kinds)
    weights = (values - values.mean(0)).square().sum(0)
    assert of_all.tolist() == pytest.approx((each @ weights / weights.sum()).tolist(), abs=1e-12)
    assert variance.total(values, NUMBER % 3).shape == ()


def test_of_random_classes_the_adjusted_share_is_0_on_average():
    values = drawn(60, 1)
    shares = []
    for seed in range(400):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        shares.append(float(variance.total(values, (torch.arange(60) % 6)[order])))
    assert np.mean(shares) == pytest.approx(5 / 59, abs=0.01)
    assert np.mean([variance.adjusted(one, 60, 5) for one in shares]) == pytest.approx(0, abs=0.01)
    assert variance.adjusted(5 / 59, 60, 5) == pytest.approx(0, abs=1e-12)
    assert variance.adjusted(1.0, 60, 5) == 1
    assert np.isnan(variance.adjusted(1.0, 6, 5))


def test_what_does_not_vary_has_no_share():
    values = torch.cat([torch.full((30, 1), 0.1), drawn(30, 1)], 1)
    assert variance.explained(values, torch.arange(30) % 3)[0] == 0
    assert variance.total(torch.full((30, 2), 0.1), torch.arange(30) % 3) == 0
    assert variance.partition(values, {"3": torch.arange(30) % 3}).together[0] == 0
