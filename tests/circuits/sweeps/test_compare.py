import pytest

from circuits import CircuitsError, compare, logit_difference, run


def test_answers_of_another_number_of_examples_are_refused(make_model, tokens):
    """Each chunk takes its own, so that too many, or one left for several examples, would pass."""
    output = run(make_model(0), tokens)
    parts = [(output[:5], {"x": 2 * output[:5]}), (output[5:], {"x": 2 * output[5:]})]
    assert len(compare(parts, logit_difference(list(range(8)), 9)).frame) == 1
    for count in (6, 9):
        with pytest.raises(CircuitsError, match=f"right is given for {count} examples, there are 8"):
            compare(parts, logit_difference(list(range(count)), 9))
