"""Builds an initialised model, of pre-norm or post-norm blocks, from the sizes that a task needs and its settings."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components import LayerNorm, TransformerBlock
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList, repeat_along_head_dimension

from tasks.model_settings import ModelSettings
from tasks.seeds_and_device_tensors import generator

#: Epsilon that BERT and the published model of matrix completion add to the variance.
EPS = 1e-12


@dataclass
class PostNormConfig(HookedTransformerConfig):
    """The config of a :class:`PostNormTransformer`, recognised by its field ``norm``, in stored configs too."""

    norm: str = "post"

    def __post_init__(self) -> None:
        # The blocks here compute nothing else.
        for name, only in {"norm": "post", "normalization_type": "LN"}.items():
            if getattr(self, name) != only:
                raise ValueError(f"a post-norm model has {name} = {only!r}, not {getattr(self, name)!r}")
        super().__post_init__()


class PostNormBlock(TransformerBlock):
    """One layer: LayerNorm after each residual sum, and none before attention and MLP."""

    # Read by the fast engine of sweeps, which runs no other classes outside of TransformerLens.
    tokens_enter_by_embeddings_alone = True

    def __init__(self, cfg: PostNormConfig, block_index: int) -> None:
        super().__init__(cfg, block_index)
        self.hook_normalized_resid_post = HookPoint()  # [batch pos d_model]

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the stream after the block: attention is added and the sum normalised, then the MLP likewise."""
        cfg = self.cfg
        resid_pre = self.hook_resid_pre(resid_pre)
        read = resid_pre
        if cfg.use_attn_in:
            read = self.hook_attn_in(repeat_along_head_dimension(resid_pre, n_heads=cfg.n_heads))
        query = key = value = read
        if cfg.use_split_qkv_input:
            query, key, value = (
                hook(repeat_along_head_dimension(resid_pre, n_heads=cfg.n_heads))
                for hook in (self.hook_q_input, self.hook_k_input, self.hook_v_input)
            )
        attn_out = self.hook_attn_out(
            self.attn(
                query_input=query,
                key_input=key,
                value_input=value,
                past_kv_cache_entry=past_kv_cache_entry,
                attention_mask=attention_mask,
            )
        )
        if cfg.attn_only:
            resid_post = self.hook_resid_post(resid_pre + attn_out)
            return self.hook_normalized_resid_post(self.ln1(resid_post))
        normalized_resid_mid = self.ln1(self.hook_resid_mid(resid_pre + attn_out))
        mlp_in = normalized_resid_mid
        if cfg.use_hook_mlp_in:
            mlp_in = self.hook_mlp_in(normalized_resid_mid.clone())
        resid_post = self.hook_resid_post(normalized_resid_mid + self.apply_mlp(mlp_in))
        return self.hook_normalized_resid_post(self.ln2(resid_post))


class PostNormTransformer(HookedTransformer):
    """A post-norm ``HookedTransformer``, as BERT is: each sum of stream and sublayer is normalised, as the new stream.

        embed + pos_embed -> ln_embed -> resid_pre -> + attn_out = resid_mid -> ln1 -> + mlp_out = resid_post -> ln2

    Names are those of ``HookedTransformer``, and of TransformerLens' ``HookedEncoder`` where it has more: ``resid_mid``
    and ``resid_post`` are the sums before their LayerNorm, ``hook_normalized_resid_post`` is a block's output. There
    is no final LayerNorm: ``ln_final`` is the identity, without parameters.
    """

    cfg: PostNormConfig
    tokens_enter_by_embeddings_alone = True

    def __init__(self, cfg: PostNormConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.blocks = TypedModuleList([PostNormBlock(self.cfg, layer) for layer in range(self.cfg.n_layers)])
        self.ln_embed = LayerNorm(self.cfg)
        self.ln_final = torch.nn.Identity()
        if self.cfg.init_weights:
            self.init_weights()
        self.to(self.cfg.device, print_details=False)
        self.setup()

    def get_residual(
        self, embed: Float[Tensor, "batch pos d_model"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "batch pos d_model"] | tuple[Tensor, None]:
        """Returns the first residual stream: the normalised sum of the embeddings."""
        return_pair = kwargs.pop("return_shortformer_pos_embed", True)
        residual = super().get_residual(embed, *args, **kwargs, return_shortformer_pos_embed=False)
        residual = self.ln_embed(residual)
        return (residual, None) if return_pair else residual

    def load_and_process_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: LayerNorms can be folded and weights centred only where LayerNorms stand before sublayers."""
        raise NotImplementedError(
            "weights of a post-norm model cannot be folded or centred: use load_state_dict"
        )


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


def build_from_config(config: HookedTransformerConfig) -> HookedTransformer:
    """Builds the model of a config, without its deprecation notice (it is pinned) or random side effects."""
    with warnings.catch_warnings(), global_randomness_untouched():
        warnings.filterwarnings("ignore", message=".*HookedTransformer.*", category=DeprecationWarning)
        if isinstance(config, PostNormConfig):
            return PostNormTransformer(config)
        return HookedTransformer(config)


def make_model_config(
    settings: ModelSettings, n_ctx: int, d_vocab: int, d_vocab_out: int
) -> HookedTransformerConfig:
    """Returns the config of a model of these settings."""
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


def init_params_and_freeze_biases(
    model: HookedTransformer, settings: ModelSettings, seed: int, n_read_outs: int = 1
) -> None:
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
            elif settings.init == "torch" and (bound := uniform_init_bound(kind, settings)) is not None:
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
                std = normal_init_std(kind, settings, model.cfg.d_vocab_out)
                parameter.normal_(0.0, std, generator=random_stream)
            if kind.startswith("b_") and (
                settings.biases == "frozen" or (settings.biases == "mlp" and ".mlp." not in name)
            ):
                parameter.requires_grad_(False)


def is_post_norm(model: HookedTransformer) -> bool:
    """Tells whether LayerNorms stand after the residual sums, as ``model.norm = post`` builds them."""
    return getattr(model.cfg, "norm", "pre") == "post"


def normal_init_std(kind: str, settings: ModelSettings, d_vocab_out: int) -> float:
    """Returns the standard deviation that a matrix of this kind is drawn with."""
    if settings.init == "gpt2" and kind in ("W_O", "W_out"):
        return float(settings.init_std * (2 * settings.n_layers) ** -0.5)
    if settings.init in ("normal", "gpt2"):
        return settings.init_std
    if settings.init == "torch":
        return 1.0  # the embeddings, for which uniform_init_bound is None
    return float((d_vocab_out if kind == "W_U" else settings.d_model) ** -0.5)


def uniform_init_bound(kind: str, settings: ModelSettings) -> float | None:
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
