"""``interp-run modular prime-order``: ranks and permutations within strata."""

import math

import numpy as np
import pytest

from interp_tasks.papers.miiii.order_correlations import centred_ranks, permuted_ranks, stratified_correlation


def test_ranks_are_within_strata_and_ties_share_them():
    strata = np.array([0, 0, 0, 1, 1])
    np.testing.assert_allclose(
        centred_ranks(np.array([5.0, math.inf, math.inf, 9, 1]), strata), [-1, 0.5, 0.5, 0.5, -0.5]
    )


def test_a_strict_order_is_found_and_its_p_value_counts_permutations():
    def correlation(x, y, strata):
        return stratified_correlation(x, permuted_ranks(y, strata, 0), strata)

    x, y = np.arange(4.0), np.arange(4.0) * 3
    value_, p_value = correlation(x, y, np.zeros(4))
    assert value_ == pytest.approx(1)
    # Two of 24 orders are as extreme.
    assert p_value == pytest.approx(2 / 24, abs=0.01)
    assert all(math.isnan(one) for one in correlation(x, np.ones(4), np.zeros(4)))
    # Between strata nothing is compared.
    assert all(math.isnan(one) for one in correlation(x, y, np.arange(4)))
