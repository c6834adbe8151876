"""``interp-run tasks data``: answers of a few tasks against arithmetic by hand; what is refused."""

import numpy as np
import pytest

from interp_tasks.experiments import COLUMNS, data
from tests.interp_tasks.rows import row_of

P = 11


def value(frame, variant, metric):
    return row_of(frame, variant=variant, metric=metric)["value"]


def test_the_grid_and_its_answers_are_arithmetic():
    result = data("miiii", {"p": P})
    shown = result.data["maps"]
    x0, x1 = np.indices((P, P))
    for q in (2, 3, 5, 7):
        assert np.array_equal(shown[f"mod_{q}"], (x0 + P * x1) % q)
        assert value(result.frame, f"mod_{q}", "classes") == q
        assert value(result.frame, f"mod_{q}", "chance accuracy") == pytest.approx(1 / q)
        often = np.bincount(np.arange(P * P) % q).max()
        assert value(result.frame, f"mod_{q}", "accuracy of the commonest") == often / P**2
    assert tuple(result.frame.columns) == COLUMNS
    assert value(result.frame, "all answers", "chance accuracy") == pytest.approx(
        np.mean([1 / q for q in (2, 3, 5, 7)])
    )
    assert set(result.frame["n"]) == {P * P}


def test_the_mean_chance_over_all_primes_is_the_published_one():
    """6.3%: over the 29 primes below 113."""
    assert value(data("miiii").frame, "all answers", "chance accuracy") == pytest.approx(0.063, abs=5e-4)


def test_the_high_digit_first_is_drawn_as_it_stands_in_the_tokens():
    shown = data("miiii", {"p": P, "digits": "high-first", "primes": [3]}).data
    x1, x0 = np.indices((P, P))
    assert shown["axes"] == ["x1", "x0"]
    assert np.array_equal(shown["maps"]["mod_3"], (x0 + P * x1) % 3)


def test_multiplication_is_drawn_over_exponents():
    shown = data("modular-multiplication", {"p": P}).data["maps"]["product"]
    assert shown.shape == (P - 1, P - 1)
    # Along each diagonal the exponents add up to the same.
    assert len({shown[i, (5 - i) % (P - 1)] for i in range(P - 1)}) == 1
