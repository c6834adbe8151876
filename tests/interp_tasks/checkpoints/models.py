"""A small model for the tests of this folder."""

import torch
from transformer_lens import HookedTransformerConfig

from tasks.model_building import PostNormConfig, build_from_config

SIZES = {"n_layers": 1, "d_model": 4, "n_ctx": 3, "d_head": 2, "n_heads": 2, "d_vocab": 5, "device": "cpu"}


def build(value=None, **changes):
    """A small model whose weights are all one value, or drawn."""
    described = PostNormConfig if "norm" in changes else HookedTransformerConfig
    model = build_from_config(described(**{**SIZES, "act_fn": "relu", "init_weights": False, **changes}))
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=stream)
            parameter.copy_(drawn if value is None else torch.full_like(drawn, value))
    return model
