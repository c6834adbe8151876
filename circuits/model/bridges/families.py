"""The families of Hugging Face models whose bridges are supported, and the sites of each.

A row says: on a `TransformerBridge` around this class, in these versions, a random write at each of these sites, at
every layer, in float64, is what a forward pass written by hand over the same weights gives, to 1e-5 of its effect
(tests/circuits/model/test_families.py, which makes every row red that is not so). Raw weights, compatibility mode and
processed weights alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from circuits.model.sites import KINDS

#: Releases of both packages with which every row was proved.
PROVED_VERSIONS: dict[str, tuple[str, ...]] = {
    "transformer-lens": ("3.9", "4.3"),
    "transformers": ("5.23",),
}

_EVERY = frozenset(KINDS)
# The bridge of a rotary model lists a hook point of position embeddings that never fires.
_ROTARY = _EVERY - {"pos_embed"}
#: The sites around the softmax of attention.
AT_SOFTMAX = frozenset({"scores", "pattern"})


@dataclass(frozen=True)
class Family:
    """One row: a class of Hugging Face models, and what was proved of bridges around it."""

    name: str
    wrapped: str  # the class
    sites: frozenset[str]
    parallel: bool = False  # attention and MLP of a block read the same stream
    #: Whether `patch.path` and `patch.edges` are supported: they too were compared with the forward by hand.
    paths: bool = False
    #: Hook points by site, where that under the site's own name is at another place.
    places: Mapping[str, str] = field(default_factory=dict)
    #: The wrapped module computes attention itself, and the bridge shows its pattern when it has been used: scores and
    #: pattern are met at the softmax that the module calls.
    softmax: bool = False
    #: The wrapped MLP gets batch and positions on one axis.
    flat_mlp: bool = False
    #: Entries of the wrapped model's config that change what a site means, with the values proved.
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_NEOX = {"attention_bias": (True,)}
_QWEN = {"use_sliding_window": (False,)}

FAMILIES: tuple[Family, ...] = (
    Family(
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
    Family("GPT-NeoX", "GPTNeoXForCausalLM", _ROTARY, paths=True, settings=_NEOX),
    Family(
        "GPT-NeoX, parallel (Pythia)",
        "GPTNeoXForCausalLM",
        _ROTARY - {"resid_mid"},
        parallel=True,
        paths=True,
        settings=_NEOX,
    ),
    Family("Llama", "LlamaForCausalLM", _ROTARY, paths=True),
    Family("Qwen2", "Qwen2ForCausalLM", _ROTARY, paths=True, settings=_QWEN),
    Family("Qwen3", "Qwen3ForCausalLM", _ROTARY, paths=True, settings=_QWEN),
    Family("Mistral", "MistralForCausalLM", _ROTARY, paths=True),
    Family("Gemma 2", "Gemma2ForCausalLM", _ROTARY, paths=True),
    Family(
        "Phi",
        "PhiForCausalLM",
        _ROTARY - {"resid_mid"},
        parallel=True,
        settings={"qk_layernorm": (False,)},
    ),
    Family("GPT-J", "GPTJForCausalLM", _ROTARY - {"resid_mid"}, parallel=True, softmax=True),
    Family(
        "OPT",
        "OPTForCausalLM",
        _EVERY,
        softmax=True,
        flat_mlp=True,
        settings={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
    ),
    Family(
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


def family_of(wrapped: nn.Module, parallel: bool) -> Family | None:
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


@cache
def unproved_version() -> str | None:
    """Returns the installed package, with its version, with which no row was proved; None where there is none."""
    for package, proved in PROVED_VERSIONS.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if ".".join(installed.split(".")[:2]) not in proved:
            return f"{package} {installed}"
    return None
