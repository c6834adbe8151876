"""GIM's backward pass against a forward written by hand whose softmax, norms and products have other gradients."""

import pytest
import torch

from circuits import patch
from tests.circuits.conftest import build


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


class Share(torch.autograd.Function):
    """The identity, which passes a part of its gradient back."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.part * gradient, None


def norm(x, module, eps):
    x = x - x.mean(-1, keepdim=True)
    return module.w * x / (x.square().mean(-1, keepdim=True) + eps).sqrt().detach() + module.b


def logits(model, stream):
    """The forward pass from the sum of the embeddings [batch pos d_model] on."""
    cfg = model.cfg
    causal = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool).tril()
    for block in model.blocks:
        attention, read = block.attn, norm(stream, block.ln1, cfg.eps)
        q, k, v = (
            Share.apply(
                torch.einsum("bpd,hde->bphe", read, getattr(attention, f"W_{name}"))
                + getattr(attention, f"b_{name}"),
                part,
            )
            for name, part in (("Q", 0.25), ("K", 0.25), ("V", 0.5))
        )
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / attention.attn_scale
        pattern = SoftmaxAtTwo.apply(scores.masked_fill(~causal, -torch.inf))
        z = torch.einsum("bhqk,bkhe->bqhe", pattern, v)
        stream = stream + torch.einsum("bqhe,hed->bqd", z, attention.W_O) + attention.b_O
        hidden = norm(stream, block.ln2, cfg.eps) @ block.mlp.W_in + block.mlp.b_in
        stream = stream + hidden.relu() @ block.mlp.W_out + block.mlp.b_out
    return norm(stream, model.ln_final, cfg.eps) @ model.unembed.W_U + model.unembed.b_U


def metric(output):
    return output[:, -1, 3] - output[:, -1, 5]


@pytest.fixture
def model(hooked_only):
    return build(attention_dir="causal", normalization_type="LN", act_fn="relu", family=hooked_only)


@pytest.mark.parametrize(("steps", "share"), [(1, 0.5), (0, 0.0)])
def test_all_edges_of_the_embedding_together_carry_its_gradient_by_hand(
    model, tokens, other_tokens, steps, share
):
    """Every path from the embedding begins with one of its edges; one step is the gradient halfway to the source."""
    with torch.no_grad():
        here, there = (model.embed(each) for each in (tokens, other_tokens))
        stream = here + share * (there - here) + model.pos_embed(tokens)
        torch.testing.assert_close(logits(model, here + model.pos_embed(tokens)), model(tokens))
    stream.requires_grad_()
    (gradient,) = torch.autograd.grad(metric(logits(model, stream)).sum(), stream)
    expected = ((there - here) * gradient).sum((1, 2)).mean().item()
    found = {
        method: patch.edges(
            model, tokens, other_tokens, metric, method=method, steps=steps, exact=1, draws=2, flips=2
        ).frame
        for method in ("gim", "integrated")
    }
    total = {method: frame[frame["sender"] == "embed"]["estimate"].sum() for method, frame in found.items()}
    assert total["gim"] == pytest.approx(expected, rel=1e-6)
    assert total["integrated"] != pytest.approx(expected, rel=1e-2)
