"""What auto-circuit does, and what it takes: `python with_auto_circuit.py [REPEATS]`."""

from __future__ import annotations

import random
from functools import partial
from importlib.metadata import version

import auto_circuit
import torch
from auto_circuit.types import AblationType
from auto_circuit.utils.ablation_activations import src_ablations
from auto_circuit.utils.graph_utils import patch_mode, patchable_model
from common import HEADS, LAYERS, SPARSE, STATISTICS, mentions, multiples, pairs, start, tried
from transformer_lens import HookedTransformer, HookedTransformerConfig

repeats = start()
print("auto-circuit", version("auto-circuit"), "transformer-lens", version("transformer-lens"), end=" ")
print("torch", torch.__version__)


def random_hooked(layers=2, width=32, heads=4, **other):
    sizes = {"n_layers": layers, "d_model": width, "n_heads": heads, "d_head": width // heads}
    more = {"d_mlp": 4 * width, "n_ctx": 32, "d_vocab": 200, "act_fn": "gelu_new", "seed": 0, "device": "cpu"}
    wide = {} if width > 100 else {"initializer_range": 0.4}
    model = HookedTransformer(HookedTransformerConfig(**sizes, **more, **wide, **other)).eval()
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    for each in model.parameters():
        each.requires_grad = False
    return model


def patchable(model, length=None):
    return patchable_model(model, factorized=True, slice_output="last_seq", seq_len=length, separate_qkv=True)


base, source = pairs()
plain = random_hooked()
clean = plain(base)[:, -1]
small = patchable(plain)
theirs = src_ablations(small, source, AblationType.RESAMPLE)


def value(logits):
    return logits[:, -1] if logits.ndim == 3 else logits


def kept():
    """Patches all edges but some; all of them must give the run on the source."""
    edges = list(small.edges)
    with patch_mode(small, theirs, edges), torch.inference_mode():
        every = value(small(base))
    with patch_mode(small, theirs, edges[::2]), torch.inference_mode():
        half = value(small(base))
    with torch.no_grad():
        ends = value(small(source)), value(small(base))
    return (
        f"{len(edges)} edges; all patched against the run on the source {float((every - ends[0]).abs().max()):.1e}; "
        f"half of them against the clean run {float((half - ends[1]).abs().max()):.2g}"
    )


def one_edge():
    with patch_mode(small, theirs, ["A0.0->A1.1.Q"]), torch.inference_mode():
        edited = value(small(base))
    return f"0.0 to the query of 1.1: changed by {float((edited - clean).abs().max()):.2g}"


def misspelt():
    with patch_mode(small, theirs, ["A0.0->A1.9.Q"]), torch.inference_mode():
        edited = value(small(base))
    return f"accepted; outputs equal: {torch.equal(edited, clean) or float((edited - clean).abs().max())}"


def positions():
    model = patchable(random_hooked(), 16)
    return f"{len(model.edges)} edges, one for each position"


def padded():
    model = patchable(random_hooked())
    short = base[:1, :10]
    batch = torch.cat([torch.cat([torch.zeros(1, 6, dtype=int), short], 1), base[1:2]])
    alone, both = value(model(short))[0], value(model(batch))[0]
    return f"{float((alone - both).abs().max()):.1e}"


def grouped():
    model = patchable(random_hooked(n_key_value_heads=2))
    outs = src_ablations(model, source, AblationType.RESAMPLE)
    with patch_mode(model, outs, list(model.edges)), torch.inference_mode():
        every = value(model(base))
    with torch.no_grad():
        end = value(model(source))
    return f"{len(model.edges)} edges; all patched against the run on the source {float((every - end).abs().max()):.1e}"


def gradients():
    from auto_circuit.data import PromptDataLoader, PromptDataset
    from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
    from auto_circuit.prune_algos.random_edges import random_prune_scores

    answers = [torch.tensor([5]) for _ in base], [torch.tensor([6]) for _ in base]
    data = PromptDataset(list(base), list(source), *answers)
    loader = PromptDataLoader(data, seq_len=16, diverge_idx=0, batch_size=4, shuffle=False)
    rank = partial(mask_gradient_prune_scores, small, loader, None, "logit", "avg_diff")
    found = {
        "gradients": rank(mask_val=0.0),
        "integrated gradients": rank(integrated_grad_samples=5),
        "random": random_prune_scores(small, loader, None),
    }
    return {name: sum(each.numel() for each in scores.values()) for name, scores in found.items()}


def no_forward():
    with patch_mode(small, theirs, ["A0.0->A1.1.Q"]):
        pass
    return "nothing is said"


tried("exact path patching, one edge", one_edge)
tried("edges by gradients", gradients)
tried("a kept circuit", kept)
tried("edges with positions", positions)
tried("left-padded prompt against the prompt alone, greatest difference", padded)
tried("an edge that is not there", misspelt)
tried("an edit that met no forward", no_forward)
tried("grouped heads", grouped)
tried("while generating", lambda: small.generate(base[:1], max_new_tokens=2))
tried("in its source", lambda: mentions(auto_circuit, *STATISTICS, *SPARSE))

if repeats:
    untouched = random_hooked(LAYERS, 768, HEADS)
    untouched.set_use_attn_result(False)
    untouched.set_use_split_qkv_input(False)
    untouched.set_use_hook_mlp_in(False)
    gpt2 = patchable(random_hooked(LAYERS, 768, HEADS))
    outs = src_ablations(gpt2, source, AblationType.RESAMPLE)
    zeros = torch.zeros_like(outs)
    edges = sorted(gpt2.edges, key=lambda edge: edge.name)
    cut = random.Random(0).sample(edges, len(edges) // 2)

    def forward():
        with torch.inference_mode():
            return untouched(base)

    # Entered once: setting the masks of many edges is slow, and stays when only tokens change.
    with patch_mode(gpt2, outs, set(cut)), torch.inference_mode():
        what = f"half of {len(edges)} edges patched, masks and source pass apart"
        multiples(what, forward, lambda: gpt2(base), repeats)

    by_sender: dict[str, set] = {}
    for edge in gpt2.edges:
        by_sender.setdefault(edge.src.name, set()).add(edge)
    few = 3

    def some():
        with torch.inference_mode():
            for head in range(few):
                with patch_mode(gpt2, zeros, by_sender[f"A{LAYERS // 2}.{head}"]):
                    gpt2(base)

    multiples(f"{few} heads, all their edges zero (all 144: 48 times that)", forward, some, repeats)
