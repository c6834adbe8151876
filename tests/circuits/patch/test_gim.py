"""GIM's backward pass against a forward written by hand whose softmax, norms and products have other gradients."""

from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.circuits.conftest import FAMILIES, build, forward
from tests.circuits.patch.by_hand import ONE, edges

SHARES = {"q": 0.25, "k": 0.25, "v": 0.5}


class SoftmaxAtTwo(torch.autograd.Function):
    """A softmax whose backward pass has the probabilities of scores / 2."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        (scores,) = ctx.saved_tensors
        soft = (scores / 2).softmax(-1)
        return soft * (gradient - (gradient * soft).sum(-1, keepdim=True))


def share(x, part):
    """The same, which passes a part of its gradient back."""
    passed = x.clone()
    passed.register_hook(lambda gradient: part * gradient)
    return passed


def embedded(by_hand, model, tokens):
    """The embeddings [batch pos d_model], positions left out, and the logits of a forward by hand."""
    seen = []
    logits = by_hand(model, tokens, lambda site, layer, x: seen.append(x) or x if site == "embed" else x)
    return seen[0], logits


def gim(by_hand, model, tokens, stream):
    """The logits of a forward by hand from the embeddings on, with GIM's gradients."""
    scores = {}

    def edit(site, layer, x):
        if site == "scores":
            scores[layer] = x
        if site == "pattern":
            return SoftmaxAtTwo.apply(scores[layer])
        return stream if site == "embed" else share(x, SHARES[site]) if site in SHARES else x

    # In both forwards only norms take squares.
    with mock.patch.object(Tensor, "square", lambda x: x.detach() * x.detach()):
        return by_hand.__wrapped__(model, tokens, edit)


def metric(output):
    return output[:, -1, 3] - output[:, -1, 5]


def check(model, by_hand, tokens, other, steps=1):
    """Every path from the embedding begins with one of its edges; one step is the gradient halfway to the source."""
    (here, logits), (there, _) = (embedded(by_hand, model, each) for each in (tokens, other))
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-5)
    stream = (here + (0.5 * (there - here) if steps else 0.0)).requires_grad_()
    (gradient,) = torch.autograd.grad(metric(gim(by_hand, model, tokens, stream)).sum(), stream)
    expected = ((there - here) * gradient).sum((1, 2)).mean().item()
    for method, rounding in (("gim", 1e-5), ("integrated", 1e-4)):
        frame = edges(model, tokens, other, metric, method=method, steps=steps, **ONE).frame
        total = frame[frame["sender"] == "embed"]["estimate"].sum()
        assert (total == pytest.approx(expected, rel=rounding)) == (method == "gim")


@pytest.mark.parametrize("norm", ["LN", "LNPre", "RMS"])
@pytest.mark.parametrize("steps", [1, 0])
def test_all_edges_of_the_embedding_carry_its_gradient_by_hand(family, tokens, other_tokens, norm, steps):
    check(build(normalization_type=norm, family=family), forward, tokens, other_tokens, steps)


@pytest.mark.parametrize("name", ["gpt2", "pythia", "neox", "llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_the_same_on_a_bridge_around_hugging_face(hf_model, tokens, other_tokens, name):
    check(hf_model(name), import_module("tests.circuits.families").forward, tokens + 3, other_tokens + 3)


def test_bridges_rank_edges_as_the_same_weights_in_a_hooked_transformer(hooked_only, tokens, other_tokens):
    found = [edges(build(family=one), tokens, other_tokens, metric, method="gim", **ONE) for one in FAMILIES]
    assert found[0].ranking(by="estimate") == found[1].ranking(by="estimate")
