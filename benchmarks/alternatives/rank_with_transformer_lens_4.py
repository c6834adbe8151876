"""Ranks edges with TransformerLens 4.3: `rank_with_transformer_lens_4.py FOLDER [PATTERN]`.

It takes bridges around models of transformers, so that Llamas alone are ranked; keys and values that heads share are
given as a copy for each head, whose scores are summed. Its edges are of one token; their scores are summed too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common import saved
from ranking import Problem, each_problem, measured
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools import analysis
from transformers import LlamaConfig, LlamaForCausalLM


def as_llama(problem: Problem) -> LlamaForCausalLM:
    config, given = problem.config, problem.weights
    kinds = config["normalization_type"], config["positional_embedding_type"], config["gated_mlp"]
    if kinds != ("RMS", "rotary", True):
        raise ValueError("the model is none of transformers' that a bridge takes")
    heads, layers = config["n_heads"], config["n_layers"]
    sizes = {
        "hidden_size": config["d_model"],
        "intermediate_size": config["d_mlp"],
        "vocab_size": config["d_vocab"],
    }
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    more = {
        "max_position_embeddings": config["n_ctx"],
        "rms_norm_eps": config["eps"],
        "tie_word_embeddings": False,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **more, rope_theta=config["rotary_base"]))
    weights = {"model.embed_tokens.weight": given["embed.W_E"], "lm_head.weight": given["unembed.W_U"].T}
    weights["model.norm.weight"] = given["ln_final.w"]
    for layer in range(layers):
        block, at = f"blocks.{layer}", f"model.layers.{layer}"
        for letter in "qkv":
            read = given[f"{block}.attn.W_{letter.upper()}"]
            weights[f"{at}.self_attn.{letter}_proj.weight"] = read.transpose(1, 2).flatten(0, 1)
        weights[f"{at}.self_attn.o_proj.weight"] = given[f"{block}.attn.W_O"].flatten(0, 1).T
        for name, theirs in (("W_gate", "gate"), ("W_in", "up"), ("W_out", "down")):
            weights[f"{at}.mlp.{theirs}_proj.weight"] = given[f"{block}.mlp.{name}"].T
        weights[f"{at}.input_layernorm.weight"] = given[f"{block}.ln1.w"]
        weights[f"{at}.post_attention_layernorm.weight"] = given[f"{block}.ln2.w"]
    llama.load_state_dict(weights)
    return llama.eval()


def our_name(problem: Problem, sender: Any, receiver: Any) -> str:
    from_ = {"embed": "embed", "mlp_out": f"mlp{sender.layer}"}.get(
        sender.kind, f"{sender.layer}.{sender.head}"
    )
    to = {"logits": "output", "mlp_in": f"mlp{receiver.layer}"}.get(receiver.kind)
    return f"{from_} -> {to or problem.receiver(receiver.layer, receiver.head, receiver.kind[0])}"


def rank(grouped: Problem) -> None:
    problem = grouped.ungrouped()
    model = TransformerBridge.boot_transformers(
        saved(as_llama(problem)), device="cpu", dtype=torch.float32
    ).eval()
    base, source, _ = problem.half("found")
    config = analysis.EdgeAttributionConfig(granularity="edge")

    def attribute() -> dict[str, float]:
        edges: dict[str, float] = {}
        # One prompt at a time, as it does itself; the answers differ between prompts.
        for clean, other, weight in zip(base, source, problem.tensors["found.weight"], strict=True):
            metric = partial(weighted, weight)
            found = analysis.attribution_patch(model, clean[None], other[None], metric, config)
            for ends, score in found.edge_scores.items():
                name = our_name(problem, *ends)
                edges[name] = edges.get(name, 0.0) + score
        return edges

    edges, spent = measured(model, len(base), attribute)
    tested, _, metric = problem.half("tested")
    with torch.no_grad():
        clean = metric(model(tested), torch.arange(len(tested))).mean().item()
    # Its own measure of a circuit takes one pair; that the bridge is the same model is checked instead.
    own = {"size": len(edges), "value": clean}
    problem.write("TransformerLens 4.3: edge attribution", edges, **spent, own=own)


def weighted(weight: Tensor, output: Tensor) -> Tensor:
    return (output * weight).sum()


if __name__ == "__main__":
    each_problem(rank)
