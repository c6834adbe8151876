"""A post-norm ``HookedTransformer``, as BERT is: each sum of stream and sublayer is normalised, as the new stream.

    embed + pos_embed -> ln_embed -> resid_pre -> + attn_out = resid_mid -> ln1 -> + mlp_out = resid_post -> ln2 -> ...

Names are those of ``HookedTransformer``, and of TransformerLens' ``HookedEncoder`` where it has more: ``resid_mid`` and
``resid_post`` are the sums before their LayerNorm, ``hook_normalized_resid_post`` is a block's output. There is
no final LayerNorm: ``ln_final`` is the identity, without parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components import LayerNorm, TransformerBlock
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import TypedModuleList, repeat_along_head_dimension

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
    """A ``HookedTransformer`` of :class:`PostNormBlock` s, with a LayerNorm after the embeddings."""

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
