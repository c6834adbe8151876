"""Refuses transformers whose sites have not all been compared with a forward pass written by hand.

tests/circuits/model/test_surface.py holds the comparisons, and checks that each setting of the model class is
either tested there, refused here, or without influence on what a site means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from circuits.errors import CircuitsError

# Settings of a HookedTransformer that change what happens at a site, with the values that have been tested.
PROVED: dict[str, tuple[Any, ...]] = {
    "attention_dir": ("causal", "bidirectional"),
    "normalization_type": (None, "LN", "LNPre", "RMS", "RMSPre"),
    "positional_embedding_type": ("standard", "rotary", "alibi"),
    "num_experts": (None, 0),
    "clip_qkv": (None,),
    "post_embedding_ln": (False,),
    "use_attention_sinks": (False,),
    "use_logn_attn": (False,),
    "use_dynamic_ntk_rope": (False,),
    "use_yarn_rope": (False,),
    "load_in_4bit": (False,),
    "quantization_method": (None,),
}
# Architectures for which HookedTransformer itself computes something else.
_OTHER_MODELS = ("Olmoe", "Olmo2", "Olmo3")


def refuse_unproved(model: nn.Module) -> None:
    """Refuses settings of a HookedTransformer that have not been tested."""
    cfg: Any = model.cfg
    for setting, proved in PROVED.items():
        value = getattr(cfg, setting, proved[0])
        if value not in proved:
            served = ", ".join(repr(one) for one in proved)
            raise CircuitsError(
                f"{setting}={value!r} is not served: its sites were not compared with a forward written by "
                f"hand (served: {served})"
            )
    if getattr(cfg, "gated_mlp", False) and str(getattr(cfg, "act_fn", "")).endswith("_ln"):
        raise CircuitsError(f"gated_mlp with act_fn={cfg.act_fn!r} is not served; either alone is")


def is_post_norm(hooks: Mapping[str, nn.Module], n_layers: int) -> bool:
    """Tells whether norms stand on the residual stream itself, by the hook point of a block's normalised output.

    TransformerLens has that hook point in the blocks of its HookedEncoder. Mixed models are refused.
    """
    normed = [f"blocks.{layer}.hook_normalized_resid_post" in hooks for layer in range(n_layers)]
    if len(set(normed)) > 1:
        raise CircuitsError(
            f"blocks {normed.index(True)} and {normed.index(False)} differ: one hands on its residual stream "
            "normalised, one does not; circuits serves models whose blocks are all of one kind"
        )
    return all(normed)


def refuse_other_blocks(model: nn.Module, hooks: Mapping[str, nn.Module], n_layers: int) -> None:
    """Refuses blocks in which sites mean something else: with attention and MLP in parallel, or with a norm after
    either.
    """
    architecture = str(getattr(model.cfg, "original_architecture", None) or "")
    for layer in range(n_layers):
        block = model.get_submodule(f"blocks.{layer}")
        if f"blocks.{layer}.mlp.hook_pre" in hooks and f"blocks.{layer}.hook_resid_mid" not in hooks:
            raise CircuitsError(
                f"block {layer} runs attention and MLP in parallel; circuits serves serial blocks only"
            )
        if hasattr(block, "ln1_post") or architecture.startswith(_OTHER_MODELS):
            raise CircuitsError(
                f"block {layer} normalises what attention adds, or q and k together; circuits serves blocks with "
                "norms before attention and MLP, or after the residual sums"
            )
