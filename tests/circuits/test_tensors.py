"""Copies that are shared while nothing has changed, and never after."""

import math

import torch

from circuits.frozen_tensors_and_positions import Snapshot


def test_what_has_changed_in_between_is_copied_anew():
    for change in (
        lambda x: x.add_(1),
        lambda x: x.data.neg_(),
        lambda x: x[0].copy_(torch.tensor([-0.0, 1, 2])),
    ):
        values = torch.tensor([[0.0, 1.0, 2.0]])
        before = Snapshot(values)
        change(values)
        after = Snapshot(values)
        assert after.tensor is not before.tensor
        assert after != before
        assert after.tensor.tolist() == values.tolist()
        assert before.tensor.tolist() == [[0.0, 1.0, 2.0]]
        assert math.copysign(1, float(before.tensor[0, 0])) == 1
