"""What is particular to post-norm models: several writes at once, read-outs and direct contributions, by hand.

The tests of the operations run on a post-norm model as on others (conftest: SHAPES, FEATURES).
"""

import pytest
import torch

from circuits import ablate, edit, lens
from tests.circuits.conftest import activations

NORMED = "blocks.{}.hook_normalized_resid_post"


@pytest.fixture(params=["MLPs", "attention only"])
def post_norm(request, make_model, hooked_only):
    changes = {"act_fn": "gelu"} if request.param == "MLPs" else {"attn_only": True}
    return make_model(family=hooked_only, norm="post", n_layers=3, attention_dir="bidirectional", **changes)


def through(model, path, x, scale):
    """A norm whose scale is given."""
    weights = dict(model.named_parameters())
    return (x - x.mean(-1, keepdim=True)) / scale * weights[f"{path}.w"] + weights[f"{path}.b"]


def scale_of(model, x):
    centred = x - x.mean(-1, keepdim=True)
    return (centred.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()


@torch.no_grad()
def output_without(model, seen, name=None):
    """The output by hand with heads and MLPs and all scales of norms as seen, and one component's addition left out."""
    weights = dict(model.named_parameters())

    def of(component, x):
        return torch.zeros_like(x) if component == name else x

    seen_sum = seen["embed", None] + seen["pos_embed", None]
    x = of("embed", seen["embed", None]) + of("pos_embed", seen["pos_embed", None])
    x = through(model, "ln_embed", x, scale_of(model, seen_sum))
    x = x - (weights["ln_embed.b"] if name == "ln_embed" else 0)
    layers, attn_only = model.cfg.n_layers, model.cfg.attn_only
    for layer in range(layers):
        for head in range(4):
            z, out = seen["z", layer][:, :, head], weights[f"blocks.{layer}.attn.W_O"][head]
            x = x + of(f"{layer}.{head}", z @ out)
        x = x + of(f"b_O.{layer}", weights[f"blocks.{layer}.attn.b_O"].expand_as(x))
        for norm, site in (("ln1", "resid_mid"), ("ln2", "resid_post"))[attn_only:]:
            norm = "ln1" if attn_only else norm
            if norm == "ln2":
                x = x + of(f"mlp_out.{layer}", seen["mlp_out", layer])
            x = through(model, f"blocks.{layer}.{norm}", x, scale_of(model, seen[site, layer]))
            x = x - (weights[f"blocks.{layer}.{norm}.b"] if name == f"{norm}.{layer}" else 0)
    return x @ weights["unembed.W_U"] + weights["unembed.b_U"]


def test_contributions_are_what_is_missing_without_them_and_add_up(post_norm, tokens, by_hand):
    seen, output = activations(by_hand, post_norm, tokens)
    torch.testing.assert_close(output_without(post_norm, seen), output, rtol=0, atol=1e-12)
    found = lens(post_norm, tokens)
    total = sum(found.contributions.values()) + found.constant
    torch.testing.assert_close(total, output, rtol=0, atol=1e-12)
    norms = ["ln_embed", "ln1.0", "ln1.1", *([] if post_norm.cfg.attn_only else ["ln1.2", "ln2.0"])]
    assert set(norms) <= set(found.contributions)
    for name, part in found.contributions.items():
        expected = output - output_without(post_norm, seen, name)
        assert float(expected.abs().max()) > 1e-4, name
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-12, msg=name)
    shares = lens(post_norm, tokens, lambda output: output[:, 1, 0] - output[:, -1, 2], batch_size=3).shares
    assert "nonlinear" not in shares
    for name, part in found.contributions.items():
        torch.testing.assert_close(shares[name], part[:, 1, 0] - part[:, -1, 2], rtol=0, atol=1e-12, msg=name)


def test_read_outs_are_the_unembedding_of_what_is_handed_on(post_norm, tokens):
    _, cache = post_norm.run_with_cache(tokens)
    found = lens(post_norm, tokens)
    handed = {"embed": cache["blocks.0.hook_resid_pre"]}
    handed |= {f"layer {layer}": cache[NORMED.format(layer)] for layer in range(3)}
    assert list(found.readouts) == list(handed)
    for name, stream in handed.items():
        expected = stream @ post_norm.unembed.W_U + post_norm.unembed.b_U
        torch.testing.assert_close(found.readouts[name], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.readouts["layer 2"], found.output, rtol=0, atol=0)


def test_what_edits_put_into_the_stream_is_followed_to_the_output(post_norm, tokens, by_hand):
    push = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for site, layer in (("resid_pre", 1), ("resid_mid", 0), ("resid_post", 0), ("resid_post", 2)):
        if site == "resid_mid" and post_norm.cfg.attn_only:
            continue
        found = lens(post_norm, tokens, edit(f"{site}.{layer}", lambda x: x + push), ablate.zero("1.2"))
        total = sum(found.contributions.values()) + found.constant
        torch.testing.assert_close(total, found.output, rtol=0, atol=1e-12)
        assert float(found.contributions["edits"].abs().max()) > 1e-3
        assert float(found.contributions["1.2"].abs().max()) == 0
    stream = activations(by_hand, post_norm, tokens)[0]["resid_post", 2] + push
    path = f"blocks.2.{'ln1' if post_norm.cfg.attn_only else 'ln2'}"
    bias = dict(post_norm.named_parameters())[f"{path}.b"]
    expected = through(post_norm, path, push.expand(stream.shape), scale_of(post_norm, stream)) - bias
    found = lens(post_norm, tokens, edit("resid_post.2", lambda x: x + push)).contributions["edits"]
    torch.testing.assert_close(found, expected @ post_norm.unembed.W_U, rtol=0, atol=1e-12)
