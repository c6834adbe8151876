"""Builds an initialised ``HookedTransformer`` from the sizes that a task needs and its architecture settings."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy
import torch

from tasks.seeds import generator
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

# JAX draws "he_normal" from a normal cut at two standard deviations, rescaled to the variance asked for.
STD_OF_NORMAL_CUT_AT_2 = 0.87962566103423978


@contextlib.contextmanager
def global_randomness_untouched() -> Iterator[None]:
    """Restores the global random state of torch, numpy and random, which ``HookedTransformer`` may reseed."""
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])


def construct(config: HookedTransformerConfig) -> HookedTransformer:
    """Builds the model of a config, without its deprecation notice (it is pinned) or random side effects."""
    from transformer_lens import HookedTransformer

    from tasks.post_norm import PostNormConfig, PostNormTransformer

    with warnings.catch_warnings(), global_randomness_untouched():
        warnings.filterwarnings("ignore", message=".*HookedTransformer.*", category=DeprecationWarning)
        if isinstance(config, PostNormConfig):
            return PostNormTransformer(config)
        return HookedTransformer(config)


def hooked_config(
    settings: ModelSettings, n_ctx: int, d_vocab: int, d_vocab_out: int
) -> HookedTransformerConfig:
    """Returns the config of a model of these settings."""
    from transformer_lens import HookedTransformerConfig

    from tasks.post_norm import EPS, PostNormConfig

    described = partial(PostNormConfig, eps=EPS) if settings.norm == "post" else HookedTransformerConfig
    return described(
        n_layers=settings.n_layers,
        n_heads=settings.n_heads,
        d_model=settings.d_model,
        d_head=settings.d_head or settings.d_model // settings.n_heads,
        d_mlp=None if settings.attn_only else settings.d_mlp or 4 * settings.d_model,
        n_ctx=n_ctx,
        d_vocab=d_vocab,
        d_vocab_out=d_vocab_out,
        attn_only=settings.attn_only,
        act_fn=settings.act_fn,
        normalization_type=settings.normalization,
        attention_dir=settings.attention,
        device="cpu",
        init_weights=False,
    )


def initialise(model: HookedTransformer, settings: ModelSettings, seed: int, n_read_outs: int = 1) -> None:
    """Draws the parameters of a model, each with a generator of its own, so that none depends on the others, and
    freezes the biases that do not train.

    Args:
        n_read_outs: separate answers that the output axis holds side by side, for the fan-in of ``"he"``.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.split(".")[-1]
            random_stream = generator(seed, "init", name)
            if kind == "w":
                parameter.fill_(1.0)
            elif settings.init == "torch" and (bound := torch_bound(kind, settings)) is not None:
                parameter.uniform_(-bound, bound, generator=random_stream)
            elif kind.startswith("b"):
                parameter.zero_()
            elif settings.init == "he":
                # JAX's fan-in of the tensor as the MIIII code shapes it: all but its last axis, heads included.
                width = parameter.shape[0] * n_read_outs if kind == "W_U" else parameter[..., 0].numel()
                std = (2 / width) ** 0.5 / STD_OF_NORMAL_CUT_AT_2
                torch.nn.init.trunc_normal_(
                    parameter, std=std, a=-2 * std, b=2 * std, generator=random_stream
                )
            else:
                std = normal_std(kind, settings, model.cfg.d_vocab_out)
                parameter.normal_(0.0, std, generator=random_stream)
            if kind.startswith("b_") and (
                settings.biases == "frozen" or (settings.biases == "mlp" and ".mlp." not in name)
            ):
                parameter.requires_grad_(False)


def is_post_norm(model: HookedTransformer) -> bool:
    """Tells whether LayerNorms stand after the residual sums, as ``model.norm = post`` builds them."""
    return getattr(model.cfg, "norm", "pre") == "post"


def normal_std(kind: str, settings: ModelSettings, d_vocab_out: int) -> float:
    """Returns the standard deviation that a matrix of this kind is drawn with."""
    if settings.init == "gpt2" and kind in ("W_O", "W_out"):
        return float(settings.init_std * (2 * settings.n_layers) ** -0.5)
    if settings.init in ("normal", "gpt2"):
        return settings.init_std
    if settings.init == "torch":
        return 1.0  # the embeddings, for which torch_bound is None
    return float((d_vocab_out if kind == "W_U" else settings.d_model) ** -0.5)


def torch_bound(kind: str, settings: ModelSettings) -> float | None:
    """Returns the ±bound of tensors that ``nn.Linear`` and ``nn.MultiheadAttention`` draw uniformly; ``None`` for
    others.

    The bound of a fan-in n is 1/√n; of W_Q, W_K, W_V the Xavier bound of the one matrix that torch keeps them in.
    """
    d_model, mlp = settings.d_model, settings.d_mlp or 4 * settings.d_model
    heads = settings.n_heads * (settings.d_head or d_model // settings.n_heads)
    if kind in ("W_Q", "W_K", "W_V"):
        return float((6 / (d_model + 3 * heads)) ** 0.5)
    if kind in ("b_in", "b_out") and settings.biases == "frozen":
        return None
    fans = {"W_O": heads, "W_in": d_model, "b_in": d_model, "W_out": mlp, "b_out": mlp, "W_U": d_model}
    return float(fans[kind] ** -0.5) if kind in fans else None
