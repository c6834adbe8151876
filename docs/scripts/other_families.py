"""Tries every class that TransformerLens' bridges list on a small random model, and prints what becomes of it.

    python docs/scripts/other_families.py [CLASS ...]

With transformer-lens 4.3; six minutes. The table in docs/circuits/families.md is its last part: classes by outcome.
"""

import contextlib
import signal
import sys
import warnings
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import circuits
from circuits.model.sites import KINDS

#: What makes a config small, under the names that configs of transformers have for it.
SMALL: dict[str, Any] = {
    "vocab_size": 17,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 4),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_ff",
            "n_inner",
            "ffn_hidden_size",
        ),
        24,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "rotary_dim": 4,
    "word_embed_proj_dim": 16,
    "sliding_window": 4,
}
#: Settings without which a class has another form than its published models.
SETTINGS: dict[str, dict[str, Any]] = {
    "GraniteForCausalLM": {
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
    },
    "FalconForCausalLM": {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
}
SECONDS = 60


def small_config(wrapped: Any) -> Any:
    """Returns the config of a class with two small layers, of two kinds where it has several."""
    config = wrapped.config_class()
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        kinds = getattr(part, "layer_types", None) or []
        attention = next((kind for kind in kinds if "attention" in kind and "linear" not in kind), None)
        if attention is not None:
            part.layer_types = [kinds[0], attention]
        for name, value in {**SMALL, **SETTINGS.get(wrapped.__name__, {})}.items():
            if getattr(part, name, None) is not None or name == "n_inner":
                with contextlib.suppress(AttributeError):  # a property of others, or one for each layer
                    setattr(part, name, value)
    config._attn_implementation = "eager"
    return config


def verdict(name: str) -> str:
    """Returns what becomes of a class: served, served after a check, or refused."""
    wrapped = getattr(transformers, name, None)
    if wrapped is None:
        return "not tried: its code is not in transformers"
    torch.manual_seed(0)
    try:
        config = small_config(wrapped)
        model = wrapped(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.3)
        bridge = build_bridge_from_module(model, name, hf_config=config)
    except Exception as error:
        return f"not tried: no small model ({type(error).__name__}: {str(error)[:60]!r})"
    tokens = torch.arange(1, 11)[None]
    try:
        circuits.run(bridge, tokens, circuits.ablate.zero("1.0"))
        return "served"
    except circuits.CircuitsError as error:
        if "was not tested" not in str(error):
            return f"refused: {error}"
    try:
        model(tokens)
    except Exception as error:
        return f"not tried: the model does not run on tokens alone ({type(error).__name__})"
    try:
        found = circuits.check(bridge)
    except circuits.CircuitsError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"check fails: {type(error).__name__}: {str(error)[:60]!r}"
    same = found["verdict"].eq("same").groupby(found["site"]).all()
    missing = [site for site in KINDS if not same.get(site, False)]
    return "after check, but for " + ", ".join(f"`{site}`" for site in missing) if missing else "after check"


def out_of_time(signum: int, frame: object) -> None:
    raise TimeoutError(f"over {SECONDS} s")


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, out_of_time)
    print("transformer-lens", version("transformer-lens"), "transformers", transformers.__version__)
    found: dict[str, list[str]] = {}
    for name in sys.argv[1:] or sorted(SUPPORTED_ARCHITECTURES):
        signal.alarm(SECONDS)
        try:
            outcome = verdict(name)
        except TimeoutError as error:
            outcome = f"not tried: {error}"
        signal.alarm(0)
        print(name, outcome, sep=" | ", flush=True)
        found.setdefault(outcome, []).append(name)
    for outcome, names in sorted(found.items()):
        print(f"| {outcome} | {', '.join(f'`{name}`' for name in names)} |")


if __name__ == "__main__":
    main()
