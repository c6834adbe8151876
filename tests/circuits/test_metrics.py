import functools

import numpy as np
import pytest
import torch

from circuits import CircuitsError
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
