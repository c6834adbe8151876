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
