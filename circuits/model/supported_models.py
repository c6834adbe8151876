"""Says which models and sites are supported: those whose every site was compared with a forward written by hand.

tests/circuits/model holds the comparisons: of each setting of a HookedTransformer in `PROVED`, and of each row of
`FAMILIES` on both versions of transformer-lens. Of any other model its user decides: `check` compares its sites with
plain torch hooks, `unchecked` serves it without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from circuits.errors import CircuitsError
from circuits.model.edit_state import list_modules
from circuits.model.sites import KINDS

# Settings of a HookedTransformer that change what happens at a site, with the values that have been tested.
PROVED: dict[str, tuple[Any, ...]] = {
    "attention_dir": ("causal", "bidirectional"),
    "normalization_type": (None, "LN", "LNPre", "RMS", "RMSPre"),
    "positional_embedding_type": ("standard", "rotary", "alibi", "shortformer"),
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
NORMS_AFTER_ONLY = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")

#: Releases of both packages with which every row was tested.
PROVED_VERSIONS: dict[str, tuple[str, ...]] = {"transformer-lens": ("3.9", "4.3"), "transformers": ("5.23",)}

_EVERY = frozenset(KINDS)
# The bridge of a rotary model lists a hook point of position embeddings that never fires.
_ROTARY = _EVERY - {"pos_embed"}
#: The sites around the softmax of attention.
AT_SOFTMAX = frozenset({"scores", "pattern"})


@dataclass(frozen=True)
class ModelFamily:
    """A class of Hugging Face models, and what bridges around it support.

    Attributes:
        wrapped: the name of the class.
        parallel: whether attention and MLP of a block read the same stream.
        paths: whether `patch.path` and `patch.edges` were compared with a forward by hand too.
        places: hook points by site, where that under the site's own name is at another place.
        softmax: whether the wrapped module computes attention itself, so that the bridge shows its pattern only when it
            has been used; scores and pattern are then met at the softmax that the module calls.
        flat_mlp: whether the wrapped MLP gets batch and positions on one axis.
        settings: entries of the wrapped model's config that change what a site means, with the values tested.
    """

    name: str
    wrapped: str
    sites: frozenset[str]
    parallel: bool = False
    paths: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    softmax: bool = False
    flat_mlp: bool = False
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_NEOX = {"attention_bias": (True,)}
_QWEN = {"use_sliding_window": (False,)}

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily(
        "GPT-2",
        "GPT2LMHeadModel",
        _EVERY,
        paths=True,
        settings={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        },
    ),
    ModelFamily("GPT-NeoX", "GPTNeoXForCausalLM", _ROTARY, paths=True, settings=_NEOX),
    ModelFamily(
        "GPT-NeoX, parallel (Pythia)",
        "GPTNeoXForCausalLM",
        _ROTARY - {"resid_mid"},
        parallel=True,
        paths=True,
        settings=_NEOX,
    ),
    ModelFamily("Llama", "LlamaForCausalLM", _ROTARY, paths=True),
    ModelFamily("Qwen2", "Qwen2ForCausalLM", _ROTARY, paths=True, settings=_QWEN),
    ModelFamily("Qwen3", "Qwen3ForCausalLM", _ROTARY, paths=True, settings=_QWEN),
    ModelFamily("Mistral", "MistralForCausalLM", _ROTARY, paths=True),
    ModelFamily("Gemma 2", "Gemma2ForCausalLM", _ROTARY, paths=True),
    ModelFamily(
        "Phi", "PhiForCausalLM", _ROTARY - {"resid_mid"}, parallel=True, settings={"qk_layernorm": (False,)}
    ),
    ModelFamily("GPT-J", "GPTJForCausalLM", _ROTARY - {"resid_mid"}, parallel=True, softmax=True),
    ModelFamily(
        "OPT",
        "OPTForCausalLM",
        _EVERY,
        softmax=True,
        flat_mlp=True,
        settings={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
    ),
    ModelFamily(
        "BERT",
        "BertForMaskedLM",
        _EVERY,
        softmax=True,
        # ln1 and ln2 stand on the sums, which the block's own hook points do not show.
        places={
            "embed": "embed.hook_out",
            "attn_out": "blocks.{}.attn.o.hook_out",
            "resid_mid": "blocks.{}.ln1.hook_in",
            "resid_post": "blocks.{}.ln2.hook_in",
        },
        settings={"is_decoder": (False,), "add_cross_attention": (False,)},
    ),
)

_UNCHECKED = "unchecked"
#: The models in no table that their users decided about, with the sites that `check` found the same, or "unchecked".
decided: WeakKeyDictionary[nn.Module, frozenset[str] | str] = WeakKeyDictionary()


def unchecked(model: nn.Module) -> nn.Module:
    """Returns the model, marked as one whose sites need not have been compared with any other way to write to them.

    For a family of bridges or a setting that is refused. Results show it in their settings as "unchecked".
    """
    check_not_compiled(model)
    decided[model] = _UNCHECKED
    return model


def is_unchecked(model: nn.Module) -> bool:
    return decided.get(model) == _UNCHECKED


def find_model_family(model: nn.Module, wrapped: nn.Module, parallel: bool) -> ModelFamily:
    """Returns what the bridge `model` around `wrapped` supports, by the table or by its user's decision."""
    listed = listed_family(wrapped, parallel)
    if listed is not None:
        return listed
    kind = type(wrapped).__name__
    sites = sites_of_unlisted_model(model, f"a TransformerBridge around {kind} with these settings")
    attention = getattr(next(iter(model.get_submodule("blocks").children())), "attn", None)
    delegated = type(attention).__name__ == "AttentionBridge"
    return ModelFamily(kind, kind, sites, parallel, paths=is_unchecked(model), softmax=delegated)


def listed_family(wrapped: nn.Module, parallel: bool) -> ModelFamily | None:
    """Returns the row of a wrapped model; None for a class that is not in the table, or other settings."""
    config = getattr(wrapped, "config", None)
    # Embeddings of another width are projected into the stream (OPT-350m).
    narrow = getattr(config, "word_embed_proj_dim", None)
    for family in FAMILIES:
        if (
            family.wrapped == type(wrapped).__name__
            and narrow in (None, getattr(config, "hidden_size", None))
            and family.parallel == parallel
            and all(getattr(config, name, values[0]) in values for name, values in family.settings.items())
        ):
            return family
    return None


def untested_setting(model: nn.Module) -> str | None:
    """Returns a setting of a HookedTransformer with which no site was compared; None where there is none."""
    cfg: Any = model.cfg
    for setting, proved in PROVED.items():
        value = getattr(cfg, setting, proved[0])
        if value not in proved:
            return f"{setting}={value!r}"
    if getattr(cfg, "gated_mlp", False) and str(getattr(cfg, "act_fn", "")).endswith("_ln"):
        return f"gated_mlp with act_fn={cfg.act_fn!r}"
    return None


def sites_of_unlisted_model(model: nn.Module, what: str) -> frozenset[str]:
    """Returns the sites of a model in no table that are supported; refuses it where its user has not decided."""
    found = decided.get(model)
    if found is None:
        raise CircuitsError(
            f"{what} was not tested: circuits.check(model) compares its sites with plain torch hooks, "
            "circuits.unchecked(model) uses it without"
        )
    return _EVERY if isinstance(found, str) else found


# The class of what torch.compile makes of a module.
_COMPILED = "OptimizedModule"


def check_not_compiled(model: nn.Module) -> None:
    """Refuses what is no model, and one that torch.compile has changed in part, which passes over later hooks."""
    if not isinstance(model, nn.Module):
        raise CircuitsError(f"expected a hooked model, got {type(model).__name__}")
    if type(model).__name__ == _COMPILED:
        raise CircuitsError(
            "this model is compiled, and what is compiled passes over hooks; give the one that torch.compile was given"
        )
    for module in list_modules(model):
        forward = vars(module).get("forward")  # torch.compile(module.forward) in its place
        own = module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
        if own or type(module).__name__ == _COMPILED:
            name = next((name for name, one in model.named_modules() if one is module), "") or "the model"
            raise CircuitsError(
                f"{name} is compiled, and what is compiled passes over hooks; give a model that is not"
            )


def missing_weights_hint(names: Iterable[str]) -> str:
    """Returns what to do about weights that are missing under TransformerLens' names, for the end of an error."""
    names = list(names)
    by_layer = [name for name in names if any(part.isdecimal() for part in name.split("."))]
    if any(".base_layer." in name for name in names):
        return "; LoRA adapters stand in weights' places: merge them (merge_and_unload), then make the bridge"
    if by_layer and not any(name.startswith("blocks.") for name in by_layer):
        return "; of a Hugging Face model, give a bridge around it, or that bridge's state_dict"
    return ""
