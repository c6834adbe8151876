"""Read-outs and direct contributions against the residual stream of a forward written by hand."""

import pytest
import torch

from circuits import CircuitsError, ablate, edit, lens, run
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import activations, weights_of


def read_out(model, stream, part=None):
    """Final norm and unembedding of `stream`; of `part` alone, with the norm's scale that of the whole, no biases."""
    weights, cfg = weights_of(model), model.cfg
    kind = cfg.normalization_type
    if getattr(cfg, "final_rms", False) and kind is not None:
        kind = kind.replace("LN", "RMS")
    x = stream if part is None else part
    if kind in ("LN", "LNPre"):
        x = x - x.mean(-1, keepdim=True)
        stream = stream - stream.mean(-1, keepdim=True)
    if kind is not None:
        x = x / (stream.square().mean(-1, keepdim=True) + cfg.eps).sqrt()
    if kind in ("LN", "RMS"):
        x = x * weights["ln_final.w"]
    if kind == "LN" and part is None:
        x = x + weights["ln_final.b"]
    x = (x @ weights["unembed.W_U"]).detach()
    bias = weights.get("unembed.b_U")
    return x if bias is None or part is not None else (x + bias).detach()


def parts_by_hand(model, seen):
    """What is added to the residual stream, in order."""
    weights = {name: weight.detach() for name, weight in weights_of(model).items()}
    found = {"embed": seen["embed", None]}
    if ("pos_embed", None) in seen and model.cfg.positional_embedding_type != "shortformer":
        found["pos_embed"] = seen["pos_embed", None].expand_as(found["embed"])
    olmo = str(getattr(model.cfg, "original_architecture", "")).startswith("Olmo2")
    for layer in range(model.cfg.n_layers):
        out, bias = (weights[f"blocks.{layer}.attn.{name}"] for name in ("W_O", "b_O"))
        each = torch.einsum("bphe,hed->hbpd", seen["z", layer], out)
        added = {f"{layer}.{head}": part for head, part in enumerate(each)}
        added[f"b_O.{layer}"] = bias.expand_as(found["embed"])
        gain = weights.get(f"blocks.{layer}.{'ln1' if olmo else 'ln1_post'}.w")
        if gain is not None:
            scale = (sum(added.values()).square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()
            added = {name: part / scale * gain for name, part in added.items()}
        found |= added
        if not model.cfg.attn_only:
            found[f"mlp_out.{layer}"] = seen["mlp_out", layer]
    return found


def test_every_kind_of_block_against_the_residual_stream_by_hand(featured, tokens, by_hand):
    """Also where a norm stands between the heads and the stream, and where the logits pass a soft cap."""
    if getattr(featured.cfg, "norm", "pre") == "post":
        pytest.skip("test_post_norm.py")
    seen, output = activations(by_hand, featured, tokens)
    found, cap = lens(featured, tokens), getattr(featured.cfg, "output_logits_soft_cap", 0)
    # The bridge's RMS norm computes in single precision, whatever the model's.
    cfg = featured.cfg
    single = HookedModel(featured).bridged and ("RMS" in str(cfg.normalization_type) or cfg.final_rms)
    close = {"rtol": 0, "atol": 1e-4 if single else 1e-10}
    torch.testing.assert_close(found.output, output, **close)
    assert list(found.readouts) == ["embed", *(f"layer {layer}" for layer in range(cfg.n_layers))]
    places = [("resid_pre", 0), *(("resid_post", layer) for layer in range(cfg.n_layers))]
    for name, place in zip(found.readouts, places, strict=True):
        expected = read_out(featured, seen[place])
        expected = cap * torch.tanh(expected / cap) if cap > 0 else expected
        torch.testing.assert_close(found.readouts[name], expected, **close)
    parts, last = parts_by_hand(featured, seen), seen["resid_post", cfg.n_layers - 1]
    assert list(found.contributions) == list(parts)
    for name, part in parts.items():
        torch.testing.assert_close(found.contributions[name], read_out(featured, last, part), **close)
    total = sum(found.contributions.values()) + found.constant
    without = total - found.contributions["0.1"]
    assert found.soft_cap == (cap if cap > 0 else None)
    if found.soft_cap is not None:
        total, without = (cap * torch.tanh(x / cap) for x in (total, without))
    torch.testing.assert_close(total, output, **close)
    torch.testing.assert_close(found.without("0.1"), without, **close)
    assert float((without - output).abs().max()) > 1e-3
    if cfg.d_vocab_out < 6:
        return
    # Shares of a metric are contributions times its gradient; a soft cap is the one thing that is not linear.
    slope = 1 - (output / cap).square() if cap > 0 else torch.ones_like(output)
    shares = lens(featured, tokens, difference, batch_size=3)
    for name, part in found.contributions.items():
        torch.testing.assert_close(shares.shares[name], difference(part * slope), **close)
    torch.testing.assert_close(sum(shares.shares.values()), difference(output), **close)
    assert ("nonlinear" in shares.shares) == (cap > 0)


def test_a_class_that_is_ruled_out(hooked_only, make_model, tokens):
    model = make_model(family=hooked_only)
    model.unembed.b_U.data[3] = -torch.inf
    found = lens(model, tokens)
    total = sum(found.contributions.values()) + found.constant
    torch.testing.assert_close(total, found.output, rtol=0, atol=1e-12)
    assert bool(total[..., 3].isneginf().all())


def test_what_edits_put_into_the_stream_itself_is_named(causal, tokens, by_hand):
    push = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for site, layer in (("resid_mid", 0), ("attn_out", 1), ("resid_post", 1)):
        seen, output = activations(
            by_hand, causal, tokens, lambda s, at, x, p=(site, layer): x + push if (s, at) == p else x
        )
        found = lens(causal, tokens, edit(f"{site}.{layer}", lambda x: x + push))
        torch.testing.assert_close(found.output, output, rtol=0, atol=1e-12)
        expected = read_out(causal, seen["resid_post", 1], push.expand_as(seen["resid_post", 1]))
        torch.testing.assert_close(found.contributions["edits"], expected, rtol=0, atol=1e-11)
        total = sum(found.contributions.values()) + found.constant
        torch.testing.assert_close(total, found.output, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "layers"), [(torch.bfloat16, 2), (torch.float16, 1)])
def test_half_precision_does_not_hide_what_does_not_add_up(make_model, tokens, dtype, layers):
    """Ten thousand roundings of bfloat16 are 78 times the number: a bound that nothing exceeds."""
    bent = make_model(n_layers=layers).to(dtype)
    bent.get_submodule("unembed").register_forward_hook(lambda m, inputs, output: output.abs())
    with pytest.raises(CircuitsError, match="not a linear function"):
        lens(bent, tokens)
    found = lens(make_model(n_layers=layers).to(dtype), tokens)
    total = sum(part.float() for part in found.contributions.values()) + found.constant.float()
    # Rounding at each of some twenty additions.
    eps = torch.finfo(dtype).eps
    assert (total - found.output.float()).abs().max() < 20 * eps * found.output.float().abs().max()


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, None)]
)
@pytest.mark.parametrize("width", [64, 512])
def test_a_small_part_that_no_component_adds_is_noticed(
    hooked_only, make_model, tokens, width, dtype, share, sandwich
):
    """Of 1e-4 of the largest entry, in one entry; what the components add up to by rounding is no part of its own."""
    features = {"normalization_type": "RMS", "use_normalization_before_and_after": True} if sandwich else {}
    model = make_model(
        family=hooked_only, d_model=width, n_heads=8, d_head=width // 8, d_mlp=width, **features
    )
    model.to(dtype)
    assert "edits" not in lens(model, tokens, ablate.zero("0.1")).contributions
    if share is None:
        return
    largest = float(run(model, tokens, cache=["resid_post.0"])[1]["resid_post.0"].abs().max())
    part = torch.zeros(width, dtype=dtype)
    part[7] = share * largest
    edited = lens(model, tokens, edit("resid_post.0", lambda x: x + part))
    assert "edits" in edited.contributions
    handle = model.blocks[0].register_forward_hook(lambda module, inputs, output: output + part)
    with pytest.raises(CircuitsError, match="not the sum of its embeddings, heads and MLPs"):
        lens(model, tokens)
    handle.remove()


# ---- A few positions, in several forwards, and shares of a metric


def difference(output):
    """The logit of 3 less that of 5 at the last position, and twice that at position 1."""
    return output[:, -1, 3] - output[:, -1, 5] + 2 * (output[:, 1, 3] - output[:, 1, 5])


def test_shares_of_a_metric_that_is_not_linear_are_of_first_order(causal, tokens):
    """The loss is −logit + logsumexp; of the second term the shares take Σ p·logit, and the rest is the entropy."""

    def loss(output, rows):
        assert causal.training != output.requires_grad
        return -output[:, -1].log_softmax(-1).gather(1, rows[:, :1])[:, 0]

    found, output = lens(causal, tokens, metric=loss, batch=tokens), run(causal, tokens)[:, -1]
    entropy = -(output.softmax(-1) * output.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found.shares["nonlinear"], entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(found.shares.values()), found.metric, rtol=0, atol=1e-12)
    assert found.frame["share"].sum() == pytest.approx(float(loss(run(causal, tokens), tokens).mean()))
    # Twice what counts as rounding, in one example of eight.
    slight = 2e-5 / output[:, 3].abs().max()
    bent = lens(causal, tokens, lambda output: output[:, -1, 3] + slight * output[:, -1, 3].square())
    assert "nonlinear" in bent.shares
