"""Outputs given as they are: the table that a sweep makes of the same outputs."""

import pytest
import torch

from circuits import CircuitsError, ablate, compare, heads, logit_difference, run, sweep


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
    return (
        model,
        variants,
        run(model, tokens),
        {name: run(model, tokens, one) for name, one in variants.items()},
    )


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.parametrize("with_metric", [True, False])
def test_the_table_of_a_sweep(made, tokens, size, with_metric):
    model, variants, clean, outputs = made
    batch = Batch(torch.arange(8.0)) if with_metric else None
    metric = squared if with_metric else None
    lots = (
        (
            clean[start : start + size],
            {name: output[start : start + size] for name, output in outputs.items()},
        )
        for start in range(0, 8, size)
    )
    found = compare(lots, metric, batch)
    expected = sweep(model, tokens, variants, metric=metric, batch=batch, engine="naive")
    shared = (
        "variant metric value value_ci_low n baseline effect effect_ci_low p_value p_adjusted null_effect"
    )
    for column in shared.split():
        ours, theirs = found.frame[column], expected.frame[column]
        if ours.dtype.kind == "f":
            assert torch.allclose(
                torch.tensor(ours.to_numpy()), torch.tensor(theirs.to_numpy()), equal_nan=True
            )
        else:
            assert ours.tolist() == theirs.tolist(), column
    assert found.baseline["value"].tolist() == pytest.approx(expected.baseline["value"].tolist())


def test_columns_say_what_it_is(made):
    _, _, clean, outputs = made
    found = compare(
        [(clean, outputs)], columns={"0.1": {"site": "z", "layer": 0, "head": 1, "intervention": "own"}}
    )
    row = found.frame.set_index("variant").loc["0.1"].iloc[0]
    assert (row["site"], row["layer"], row["head"], row["intervention"]) == ("z", 0, 1, "own")
    assert set(found.frame["engine"]) == {"given"}


def test_answers_of_another_number_of_examples_are_refused(make_model, tokens):
    """Each chunk takes its own, so that too many, or one left for several examples, would pass."""
    output = run(make_model(0), tokens)
    parts = [(output[:5], {"x": 2 * output[:5]}), (output[5:], {"x": 2 * output[5:]})]
    assert len(compare(parts, logit_difference(list(range(8)), 9)).frame) == 1
    for count in (6, 9):
        with pytest.raises(CircuitsError, match=f"right is given for {count} examples, there are 8"):
            compare(parts, logit_difference(list(range(count)), 9))
