"""Gradients: logits are computed where they are read, memory is bounded, and what is detached has no effect."""

import sys
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from circuits import logit_difference, patch, prompts
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import FAMILIES, build
from tests.circuits.patch.by_hand import FEW


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_computed_where_answers_are_read(causal, tokens, other_tokens, monkeypatch, side):
    lengths, shapes = [4, 6, 5, 6], []
    pairs = [
        [row[:n].tolist() for row, n in zip(each, lengths, strict=False)] for each in (tokens, other_tokens)
    ]
    base, source = (prompts(causal, rows, side) for rows in pairs)
    metric = logit_difference(3, 1)
    module = sys.modules["circuits.sweeps.logit_difference"]
    whole = module.answer_logit_difference

    def seen(output, answers):
        shapes.append(output.shape[1])
        return whole(output, answers)

    monkeypatch.setattr(module, "answer_logit_difference", seen)
    patch.attribution(causal, base, source, metric, **FEW)
    assert set(shapes) == {1 if side == "left" else 3}


def test_what_a_hook_detaches_from_the_output_has_no_effect(causal, tokens, other_tokens):
    handle = HookedModel(causal).on_forward("blocks.1.hook_resid_pre", torch.detach)
    found = patch.attribution(causal, tokens, other_tokens, logit_difference(3, 1), "z", **FEW).frame
    handle.remove()
    assert (found["effect"][found["layer"] == 0] == 0).all()
    assert found["effect"][found["layer"] == 1].abs().max() > 0


class LargestTensor(TorchDispatchMode):
    """Keeps the most bytes of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel() * one.element_size())
        return made


@pytest.mark.parametrize("verb", ["attribution", "screen", "edges"])
def test_the_default_batch_bounds_the_largest_tensor(verb, monkeypatch):
    """Logits of all 16 prompts of 16 tokens over 1,000 words are 1 MB; the bound is smaller here, to be met by few."""
    monkeypatch.setattr(import_module("circuits.model.batch_size"), "NUMBERS", 2**20)
    model = build(family=FAMILIES[0], d_model=64, n_layers=1, n_ctx=16, d_vocab=1000).to(torch.float32)
    base, source = torch.randint(1000, (2, 16, 16))

    def loss(output, rows):
        return output.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None]).sum((1, 2))

    options = {} if verb == "attribution" else {"exact": 1, "method": "gradient"}
    with LargestTensor() as seen:
        getattr(patch, verb)(model, base, source, loss, batch=base, draws=1, flips=1, **options)
    assert 1e5 < seen.largest < 0.9e6
