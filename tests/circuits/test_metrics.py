import functools

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, logit_difference, run, sweep
from circuits.metrics import metric_name, read_metric, read_values, unedited_metrics


def test_the_three_shapes_of_a_result():
    value, (total, count) = torch.tensor([1.0, 2.0]), (torch.tensor([3.0, 0.0]), torch.tensor([2, 0]))
    found = read_values({"a": value, "b": (total, count)}, "metric", 2, "x")
    np.testing.assert_array_equal(found["a"], [[1, 2], [1, 1]])
    np.testing.assert_array_equal(found["b"], [[3, 0], [2, 0]])
    assert found["b"][0].dtype == np.float64
    assert list(read_values(value, "loss", 2, "x")) == ["loss"]
    np.testing.assert_array_equal(
        read_values(torch.tensor([True, False]), "a", 2, "x")["a"], [[1, 0], [1, 1]]
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(1.0), r"returned \[\] for 2 examples"),
        (torch.zeros(3), r"returned \[3\] for 2 examples"),
        (torch.zeros(2, 1), r"returned \[2, 1\]"),
        (1.5, "returned float"),
        ((torch.zeros(2), torch.zeros(1)), r"returned \[1\]"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "returned tuple"),
        (torch.tensor([1.0, float("nan")]), "not finite for 1 of 2.*count of 0"),
        ((torch.tensor([1.0, float("inf")]), torch.ones(2)), "not finite"),
        ((torch.ones(2), torch.tensor([1.0, -1.0])), "negative"),
        ({}, "empty dict"),
    ],
)
def test_other_results_are_refused(value, message):
    with pytest.raises(CircuitsError, match=message) as caught:
        read_values(value, "loss", 2, "variant 'x'")
    assert "\n" not in str(caught.value)


def test_how_it_can_be_called_is_checked_first():
    read_metric(lambda output: output, has_batch=False)
    read_metric(lambda output, batch: output, has_batch=True)
    read_metric(functools.partial(lambda output, batch: output, batch=3), has_batch=False)
    with pytest.raises(CircuitsError, match="pass batch="):
        read_metric(lambda output, batch: output, has_batch=False)
    with pytest.raises(CircuitsError, match=r"cannot be called with \(output, batch\)"):
        read_metric(lambda output: output, has_batch=True)
    with pytest.raises(CircuitsError, match="function"):
        read_metric("accuracy", has_batch=False)
    assert metric_name(lambda output: output) == "metric"


def test_distance_from_the_unedited_output():
    generator = torch.Generator().manual_seed(0)
    clean, edited = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator)
    found = unedited_metrics(edited, clean)
    kl = torch.nn.functional.kl_div(
        edited.log_softmax(-1), clean.log_softmax(-1), reduction="none", log_target=True
    )
    torch.testing.assert_close(found["kl"][0] / found["kl"][1], kl.sum(-1).mean(-1))
    torch.testing.assert_close(found["mse"][0] / found["mse"][1], (edited - clean).square().mean((1, 2)))
    assert list(unedited_metrics(edited[..., :1], clean[..., :1])) == ["mse"]


def test_a_class_ruled_out_in_the_unedited_model_has_no_part_in_kl():
    clean = torch.tensor([[[0.0, 1.0, -torch.inf]]])
    kl = unedited_metrics(clean.clone() + torch.tensor([1.0, 0.0, 0.0]), clean)["kl"][0]
    assert bool((kl > 0.1).all())
    assert bool(kl.isfinite().all())


def test_infinite_logits_are_compared_where_they_move(family, make_model, tokens):
    """A bias of minus infinity rules a token out, before and after the edit."""
    model = make_model(family=family)
    model.add_hook("unembed.hook_out", _rule_out)
    clean, edited = run(model, tokens), run(model, tokens, ablate.zero("0.1"))
    assert bool(clean[..., 4].isneginf().all())
    frame = sweep(model, tokens, {"zero": ablate.zero("0.1")}).frame.set_index("metric")
    rest = [token for token in range(11) if token != 4]
    p, q = (logits[..., rest].softmax(-1) for logits in (clean, edited))
    np.testing.assert_allclose(frame["value"]["kl"], (p * (p / q).log()).sum(-1).mean())
    np.testing.assert_allclose(
        frame["value"]["mse"], (clean - edited)[..., rest].square().sum(-1).mean() / 11
    )


def _rule_out(logits, hook):
    logits[..., 4] = -torch.inf
    return logits


def test_first_choice_minus_second_by_hand():
    clean = torch.tensor([[[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]]])
    edited = torch.tensor([[[1.0, 9.0, 4.0], [7.0, 2.0, 2.5]]])
    total, count = unedited_metrics(edited, clean)["logit_diff"]
    # Position 0: token 0 before token 2; position 1: token 1 before token 2.
    assert total.tolist() == [(1 - 4) + (2 - 2.5)]
    assert count.tolist() == [2]


def test_logit_difference_of_given_answers():
    output = torch.arange(24.0).reshape(2, 3, 4) ** 2
    answers = torch.tensor([[1, 0], [2, 3]])
    assert logit_difference(output, answers).tolist() == [9.0**2 - 8.0**2, 22.0**2 - 23.0**2]
    assert logit_difference(output, answers.numpy(), position=0).tolist() == [1.0 - 0.0, 14.0**2 - 15.0**2]
    for given, position, message in (
        (answers[0], -1, r"answers are \[n 2\] = \(right, wrong\) ids, got \[2\]"),
        (answers.double(), -1, "float64"),
        (answers + 2, -1, "answers are ids of 0-3, got 2-5"),
        (answers, 3, r"no position 3 in an output \[2, 3, 4\]"),
    ):
        with pytest.raises(CircuitsError, match=message) as caught:
            logit_difference(output, given, position)
        assert "\n" not in str(caught.value)


def test_logit_difference_in_a_sweep(family, make_model, tokens):
    model = make_model(family=family)
    answers = torch.stack([tokens[:, 0], (tokens[:, 0] + 1) % 11], 1)
    frame = sweep(
        model, tokens, {"zero": ablate.zero("0.1")}, metric=logit_difference, batch=answers, chunk=18
    ).frame
    last, rows = run(model, tokens, ablate.zero("0.1"))[:, -1], torch.arange(8)
    expected = (last[rows, answers[:, 0]] - last[rows, answers[:, 1]]).mean()
    np.testing.assert_allclose(frame["value"][0], expected)
    assert frame["metric"][0] == "logit_difference"
