"""The fused forward is the HookedTransformer's own, gradients included, to 1e-10 in float64."""

import itertools

import pytest
import torch
from transformer_lens import HookedTransformerConfig

from interp_tasks.training.fused_forward import (
    DropoutMasks,
    FusedForward,
    HookedForward,
    fastest_forward,
    why_not_fused,
)
from tasks.model_building import PostNormConfig, build_from_config

N_POS = 5


def random_model(**changes):
    """A float64 model whose every parameter matters: all drawn, biases and LayerNorm included."""
    settings = {
        "n_layers": 2,
        "n_heads": 2,
        "d_model": 8,
        "d_head": 4,
        "d_mlp": 12,
        "n_ctx": N_POS + 2,
        "d_vocab": 7,
        "d_vocab_out": 3,
        "act_fn": "gelu",
        "normalization_type": "LN",
        "attention_dir": "bidirectional",
        "dtype": torch.float64,
        "device": "cpu",
        "init_weights": False,
    }
    config = PostNormConfig if "norm" in changes else HookedTransformerConfig
    model = build_from_config(config(**{**settings, **changes}))
    random_stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random_stream, dtype=torch.float64))
    return model


def output_and_gradients(model, forward, tokens, dropout):
    model.zero_grad()
    output = forward(tokens, dropout)
    weights = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).sin()
    (output * weights).sum().backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_forwards_agree(model, read, batch, dropout=None):
    tokens = torch.randint(model.cfg.d_vocab, (batch, N_POS), generator=torch.Generator().manual_seed(2))
    expected, gradients = output_and_gradients(model, HookedForward(model, read), tokens, dropout)
    got, fused_gradients = output_and_gradients(model, FusedForward(model, read), tokens, dropout)
    assert got.shape == (batch, len(read), model.cfg.d_vocab_out)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10 * expected.std().item())
    assert expected.std() > 0.01
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            fused_gradients[name], gradient, rtol=1e-10, atol=1e-10 * scale, msg=f"gradient of {name}"
        )


ARCHITECTURES = {
    "one layer": {"n_layers": 1},
    "two layers": {},
    "causal": {"attention_dir": "causal"},
    "no norm, relu": {"normalization_type": None, "act_fn": "relu", "n_layers": 1},
    "LNPre": {"normalization_type": "LNPre"},
    "attention only": {"attn_only": True, "d_mlp": None},
    "post-norm": {"norm": "post", "eps": 1e-12},
    "post-norm, attention only": {"norm": "post", "attn_only": True, "d_mlp": None},
    "tanh gelu": {"act_fn": "gelu_new", "attention_dir": "causal"},
    "silu, causal, one layer": {"act_fn": "silu", "attention_dir": "causal", "n_layers": 1},
}
READS = {"all": range(N_POS), "last": [N_POS - 1], "some": [1, 3]}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("batch", [4, 40], ids=["computed", "looked up"])
def test_fused_is_hooked(architecture, read, batch):
    assert_forwards_agree(random_model(**ARCHITECTURES[architecture]), list(READS[read]), batch)


@pytest.mark.parametrize(
    ("masks", "read", "attn_only", "changes"),
    [
        *itertools.product(["per-sample", "shared"], ["all", "last"], [False, True], [{}]),
        ("per-sample", "all", False, {"norm": "post"}),
    ],
)
def test_fused_is_hooked_under_the_same_dropout(masks, read, attn_only, changes):
    model = random_model(attn_only=attn_only, **changes)
    dropout = DropoutMasks(0.4, masks, N_POS, seed=3, step=17)
    assert_forwards_agree(model, list(READS[read]), 40, dropout)


def test_frozen_zero_biases_are_skipped_and_others_are_not():
    model = random_model()
    with torch.no_grad():
        model.blocks[0].attn.b_Q.zero_()
        model.blocks[0].mlp.b_in.zero_()
    model.blocks[0].attn.b_Q.requires_grad_(False)
    model.blocks[0].mlp.b_in.requires_grad_(False)
    model.blocks[1].attn.b_O.requires_grad_(False)  # frozen, but not zero
    fused = FusedForward(model, range(N_POS))
    assert fused.zero_biases == {"blocks.0.attn.b_Q", "blocks.0.mlp.b_in"}
    tokens = torch.randint(7, (4, N_POS), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(fused(tokens), model(tokens), rtol=1e-10, atol=1e-10)


def test_what_cannot_be_fused_runs_hooked_and_says_why():
    model = random_model(positional_embedding_type="rotary", rotary_dim=4)
    tokens = torch.zeros(2, N_POS, dtype=torch.long)
    forward, reason = fastest_forward(model, range(N_POS), tokens)
    assert forward.kind == "hooked"
    assert reason == "no fused forward: positions are not a learned table"
    torch.testing.assert_close(forward(tokens), model(tokens))
    assert why_not_fused(random_model()) is None


def test_a_fused_forward_that_differs_is_not_used(monkeypatch):
    model = random_model()
    tokens = torch.randint(7, (4, N_POS), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(FusedForward, "_mlp", lambda self, layer, resid: 0 * resid)
    forward, reason = fastest_forward(model, range(N_POS), tokens)
    assert forward.kind == "hooked"
    assert "differs" in reason


def test_dropout_masks_are_a_function_of_seed_step_layer_and_place():
    resid = torch.ones(3, N_POS, 64)
    dropout = DropoutMasks(0.25, "per-sample", N_POS, seed=0, step=0)
    mask = dropout(resid, 0, "resid_mid")
    assert torch.equal(mask, dropout(resid, 0, "resid_mid"))
    others = [
        DropoutMasks(0.25, "per-sample", N_POS, 1, 0)(resid, 0, "resid_mid"),
        DropoutMasks(0.25, "per-sample", N_POS, 0, 1)(resid, 0, "resid_mid"),
        dropout(resid, 1, "resid_mid"),
        dropout(resid, 0, "resid_post"),
    ]
    assert not any(torch.equal(mask, other) for other in others)
    assert not torch.equal(mask[0], mask[1])
    shared = DropoutMasks(0.25, "shared", N_POS, 0, 0)(resid, 0, "resid_mid")
    assert torch.equal(shared[0], shared[1])
    # 960 draws: five standard errors of a Bernoulli(0.75) mean.
    assert abs((mask > 0).double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / 960) ** 0.5
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
