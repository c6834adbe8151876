"""Refuses transformers whose sites have not all been compared with a forward pass written by hand.

tests/circuits/model/test_surface.py holds the comparisons, and checks that each setting of the model class is
either tested there, refused here, or without influence on what a site means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from circuits.errors import CircuitsError
from circuits.model.state import modules_of

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
# Architectures for which HookedTransformer has its norms after attention and MLP, and none before.
_NORMS_AFTER_ONLY = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
# The class of what torch.compile makes of a module.
_COMPILED = "OptimizedModule"


def refuse_unproved(model: nn.Module) -> None:
    """Refuses settings of a HookedTransformer that have not been tested."""
    cfg: Any = model.cfg
    for setting, proved in PROVED.items():
        value = getattr(cfg, setting, proved[0])
        if value not in proved:
            served = ", ".join(repr(one) for one in proved)
            raise CircuitsError(
                f"{setting}={value!r} is not supported: its sites were not compared with a forward written by "
                f"hand (supported: {served})"
            )
    if getattr(cfg, "gated_mlp", False) and str(getattr(cfg, "act_fn", "")).endswith("_ln"):
        raise CircuitsError(f"gated_mlp with act_fn={cfg.act_fn!r} is not supported; either alone is")


def refuse_compiled(model: nn.Module) -> None:
    """Refuses a model of which torch.compile has made or changed a part: it passes over hooks that come later."""
    if type(model).__name__ == _COMPILED:
        raise CircuitsError(
            "this model is compiled, and what is compiled passes over hooks; give the one that torch.compile was given"
        )
    for module in modules_of(model):
        forward = vars(module).get("forward")  # torch.compile(module.forward) in its place
        own = module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
        if own or type(module).__name__ == _COMPILED:
            name = next((name for name, one in model.named_modules() if one is module), "") or "the model"
            raise CircuitsError(
                f"{name} is compiled, and what is compiled passes over hooks; give a model that is not"
            )


def foreign_names(names: Iterable[str]) -> str:
    """Returns what to do about weights that are missing under TransformerLens' names, for the end of an error."""
    names = list(names)
    by_layer = [name for name in names if any(part.isdecimal() for part in name.split("."))]
    if any(".base_layer." in name for name in names):
        return "; LoRA adapters stand in weights' places: merge them (merge_and_unload), then make the bridge"
    if by_layer and not any(name.startswith("blocks.") for name in by_layer):
        return "; of a Hugging Face model, give a bridge around it, or that bridge's state_dict"
    return ""


def is_post_norm(hooks: Mapping[str, nn.Module], n_layers: int) -> bool:
    """Tells whether norms stand on the residual stream itself, by the hook point of a block's normalised output.

    TransformerLens has that hook point in the blocks of its HookedEncoder. Mixed models are refused.
    """
    normed = [f"blocks.{layer}.hook_normalized_resid_post" in hooks for layer in range(n_layers)]
    if len(set(normed)) > 1:
        raise CircuitsError(
            f"blocks {normed.index(True)} and {normed.index(False)} differ: one hands on its residual stream "
            "normalised, one does not; circuits supports models whose blocks are all of one kind"
        )
    return all(normed)


def is_parallel(hooks: Mapping[str, nn.Module], n_layers: int) -> bool:
    """Tells whether the MLP of each block reads the stream that attention reads: there is then no sum between them.

    Mixed models are refused.
    """
    layers = [layer for layer in range(n_layers) if f"blocks.{layer}.mlp.hook_pre" in hooks]
    parallel = [f"blocks.{layer}.hook_resid_mid" not in hooks for layer in layers]
    if len(set(parallel)) > 1:
        raise CircuitsError(
            f"blocks {layers[parallel.index(True)]} and {layers[parallel.index(False)]} differ: one runs attention and "
            "MLP in parallel, one does not; circuits supports models whose blocks are all of one kind"
        )
    return any(parallel)


def has_norms_after_only(model: nn.Module) -> bool:
    """Tells whether attention and MLP of a HookedTransformer read the stream as it is, and ln1 and ln2 stand after
    them.
    """
    return getattr(model.cfg, "original_architecture", None) in _NORMS_AFTER_ONLY
