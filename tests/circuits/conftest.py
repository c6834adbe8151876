"""Tiny float64 models whose every part matters, and a forward pass written by hand to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"attention_dir": "causal", "normalization_type": "LN", "n_layers": 2},
    "bidirectional": {"attention_dir": "bidirectional", "normalization_type": None, "n_layers": 3},
    "attention-only": {
        "attention_dir": "causal",
        "normalization_type": "LNPre",
        "attn_only": True,
        "n_layers": 1,
    },
}


def build(seed: int = 0, **changes: Any) -> HookedTransformer:
    """Weights are scaled so that attention is far from uniform and heads and MLPs move the output visibly."""
    sizes: dict[str, Any] = {"d_model": 16, "n_ctx": 6, "d_head": 4, "n_heads": 4, "d_mlp": 24, "d_vocab": 11}
    settings = {
        "n_layers": 2,
        "act_fn": "relu",
        "normalization_type": "LN",
        "device": "cpu",
        **sizes,
        **changes,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HookedTransformer(HookedTransformerConfig(dtype=torch.float64, **settings))
    generator = torch.Generator().manual_seed(seed)
    scale = {
        "W_Q": 0.4,
        "W_K": 0.4,
        "W_V": 0.3,
        "W_O": 0.4,
        "W_in": 0.3,
        "W_out": 0.2,
        "W_E": 1.0,
        "W_pos": 0.7,
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, scale.get(name.split(".")[-1], 0.3), generator=generator)
            if name.endswith(".w"):
                parameter.add_(1.0)
    return model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., HookedTransformer]:
    return build


@pytest.fixture(params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    return build(**SHAPES[request.param])


@pytest.fixture
def causal() -> HookedTransformer:
    return build(**SHAPES["causal"])


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def other_tokens() -> Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def by_hand() -> Callable[..., Tensor]:
    return forward


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """Equal to 1e-10 of the edit's own effect, which must be at least 1% of the output's s.d."""

    def check(found: Tensor, expected: Tensor, clean: Tensor, tolerance: float = 1e-10) -> None:
        effect = (expected - clean).square().mean().sqrt()
        assert effect >= 0.01 * clean.std(), f"the edit moves the output by {effect:.2g} only"
        assert (found - expected).abs().max() <= tolerance * effect

    return check


def _unchanged(site: str, layer: int | None, value: Tensor) -> Tensor:
    return value


@torch.no_grad()
def forward(
    model: HookedTransformer, tokens: Tensor, edit: Callable[[str, int | None, Tensor], Tensor] = _unchanged
) -> Tensor:
    """The logits, from parameters alone; `edit(site, layer, value)` sees and may replace every site."""
    weights, cfg = dict(model.named_parameters()), model.cfg
    length = tokens.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        if cfg.normalization_type is None:
            return x
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + cfg.eps).sqrt()
        return x if cfg.normalization_type == "LNPre" else x * weights[f"{name}.w"] + weights[f"{name}.b"]

    resid = edit("embed", None, weights["embed.W_E"][tokens])
    resid = resid + edit("pos_embed", None, weights["pos_embed.W_pos"][:length].expand(len(tokens), -1, -1))
    for layer in range(cfg.n_layers):
        attn = {
            name.split(".")[-1]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.attn.")
        }
        mlp = {
            name.split(".")[-1]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.mlp.")
        }
        resid = edit("resid_pre", layer, resid)
        x = norm(resid, f"blocks.{layer}.ln1")
        q, k, v = (
            edit(s.lower(), layer, torch.einsum("bpd,hde->bphe", x, attn[f"W_{s}"]) + attn[f"b_{s}"])
            for s in "QKV"
        )
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / cfg.d_head**0.5
        if cfg.attention_dir == "causal":
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        pattern = edit("pattern", layer, edit("scores", layer, scores).softmax(-1))
        z = edit("z", layer, torch.einsum("bhqk,bkhe->bqhe", pattern, v))
        out = edit("attn_out", layer, torch.einsum("bqhe,hed->bqd", z, attn["W_O"]) + attn["b_O"])
        resid = resid + out
        if not cfg.attn_only:
            resid = edit("resid_mid", layer, resid)
            pre = edit("mlp_pre", layer, norm(resid, f"blocks.{layer}.ln2") @ mlp["W_in"] + mlp["b_in"])
            post = edit("mlp_post", layer, pre.relu())
            resid = resid + edit("mlp_out", layer, post @ mlp["W_out"] + mlp["b_out"])
        resid = edit("resid_post", layer, resid)
    return norm(resid, "ln_final") @ weights["unembed.W_U"] + weights["unembed.b_U"]
