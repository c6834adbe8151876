"""How the tests of this folder judge a random quantity."""

import pytest


@pytest.fixture(scope="session")
def assert_mean():
    """The mean of independent samples is the expected one, to 5 of its own standard errors.

    A correct law fails that once in 1.7 million seeds, and the seeds are fixed; none was chosen.
    """

    def check(samples, expected):
        samples = samples.double()
        standard_error = samples.std().item() / len(samples) ** 0.5
        assert standard_error > 0
        assert abs(samples.mean().item() - expected) <= 5 * standard_error

    return check
