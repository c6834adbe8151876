"""Outputs given as they are: the table that a sweep makes of the same outputs."""

import pytest

from circuits import CircuitsError, ablate, compare, heads, logit_difference, run


class Batch:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        return Batch(self.values[rows])


def squared(output, batch):
    return (output[:, -1, 0] - batch.values).square()


@pytest.fixture
def made(make_model, family, tokens):
    """A model, variants, and the outputs that they give."""
    model = make_model(0, family)
    variants = ablate.each(ablate.zero, heads("0.0-3", model))
    outputs = {name: run(model, tokens, one) for name, one in variants.items()}
    return model, variants, run(model, tokens), outputs


def test_answers_of_another_number_of_examples_are_refused(make_model, tokens):
    """Each chunk takes its own, so that too many, or one left for several examples, would pass."""
    output = run(make_model(0), tokens)
    parts = [(output[:5], {"x": 2 * output[:5]}), (output[5:], {"x": 2 * output[5:]})]
    assert len(compare(parts, logit_difference(list(range(8)), 9)).frame) == 1
    for count in (6, 9):
        with pytest.raises(CircuitsError, match=f"right is given for {count} examples, there are 8"):
            compare(parts, logit_difference(list(range(count)), 9))
