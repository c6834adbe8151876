"""Prints the sites that `circuits.check` finds different, for small random models of classes in no table.

    python docs/scripts/other_families.py

The table in docs/circuits/index.md under "Another class or setting" is what this prints with transformer-lens 3.9
and 4.3.
"""

import warnings
from importlib.metadata import version

import torch
import transformers
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import circuits
from circuits.model.sites import KINDS

SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
LLAMA = SIZES | {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}
FALCON = SIZES | {"new_decoder_architecture": False}
SCALED = {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Class, config class, its settings.
CASES = {
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | {"head_dim": 4}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "Falcon-RW": ("FalconForCausalLM", "FalconConfig", FALCON | {"alibi": True, "multi_query": False}),
    "Falcon 7B": ("FalconForCausalLM", "FalconConfig", FALCON | {"parallel_attn": True, "multi_query": True}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | EXPERTS),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", LLAMA | EXPERTS | {"head_dim": 4}),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", LLAMA | SCALED),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 17, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    ),
}


def main() -> None:
    warnings.simplefilter("ignore")
    print("transformer-lens", version("transformer-lens"), "transformers", transformers.__version__)
    for name, (wrapped, config, settings) in CASES.items():
        made = getattr(transformers, config)(**settings, attn_implementation="eager")
        if name == "Falcon-RW":
            made.parallel_attn = False
        torch.manual_seed(0)
        model = getattr(transformers, wrapped)(made).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.3)
        found = circuits.check(build_bridge_from_module(model, wrapped, hf_config=made))
        same = found["verdict"].eq("same").groupby(found["site"]).all()
        print(name, *(site for site in KINDS if not same.get(site, False)), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
