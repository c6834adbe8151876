"""What TransformerLens 4.3 does, and what it takes: `python with_transformer_lens_4.py [REPEATS]`."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import torch
import transformer_lens
from common import (
    HEADS,
    LAYERS,
    SPARSE,
    STATISTICS,
    grouped_model,
    mentions,
    multiples,
    other_family,
    pairs,
    random_model,
    saved,
    start,
    tried,
)
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools import analysis
from transformer_lens.tools.analysis import attribution_patching

repeats = start()
print("transformer-lens", version("transformer-lens"), "torch", torch.__version__)


def boot(model):
    bridge = TransformerBridge.boot_transformers(saved(model), device="cpu", dtype=torch.float32)
    return bridge.eval()


def metric(logits):
    return logits[:, -1, 5].mean() - logits[:, -1, 6].mean()


small = boot(random_model(2, 32, 4))
base, source = pairs()
one, other = base[:1], source[:1]


def by_layer_and_position():
    _, cache = small.run_with_cache(base)
    return tuple(patching.get_act_patch_resid_pre(small, source, cache, metric).shape)


def per_example(logits):
    return logits[:, -1, 5] - logits[:, -1, 6]


def intervals():
    _, cache = small.run_with_cache(base)
    how = {"reduce": "none", "baseline": True}
    found = patching.get_act_patch_resid_pre(small, source, cache, per_example, **how)
    low, _ = found.bootstrap_ci(of_effect=True)
    return f"intervals {tuple(low.shape)}, p-values {tuple(found.permutation_pvalue().shape)} of {found.values.shape}"


def exact_paths():
    _, cache = small.run_with_cache(base)
    _, corrupted = small.run_with_cache(source)
    found = patching.get_act_patch_direct_path(small, source, cache, corrupted, metric, 0, 0, verbose=False)
    return f"from head 0.0 to each head's query: {tuple(found.shape)}"


def edges():
    config = analysis.EdgeAttributionConfig(granularity="edge")
    return analysis.attribution_patch(small, one, other, metric, config)


def kept():
    found = edges()
    result = analysis.faithfulness(small, one, other, metric, found.top_edges(20))
    return f"{len(found.edge_scores)} edges with positions scored; 20 of them recover {result.recovered:.3f}"


def several_pairs():
    return analysis.faithfulness(small, base, source, metric, edges().top_edges(20)).recovered


def padded():
    short = base[:1, :10]
    batch = torch.cat([torch.cat([torch.zeros(1, 6, dtype=int), short], 1), base[1:2]])
    mask = (batch != 0).long()
    alone = small(short)[0, -1]
    return [
        f"{name} {float((small(batch, **how)[0, -1] - alone).abs().max()):.1e}"
        for name, how in (("as it comes", {}), ("with attention_mask", {"attention_mask": mask}))
    ]


def misspelt():
    small.run_with_hooks(base, fwd_hooks=[("blocks.0.attn.hook_zz", lambda act, hook: act * 0)])
    return "accepted"


def never_met():
    clean = small(base)
    edited = small.run_with_hooks(
        base, fwd_hooks=[(lambda name: name.endswith("hook_zz"), lambda act, hook: 0)]
    )
    return f"a filter that meets nothing is accepted; outputs equal: {torch.equal(clean, edited)}"


def beyond():
    def edit(act, hook):
        act[:, 30:40] = 0
        return act

    return torch.equal(small(base), small.run_with_hooks(base, fwd_hooks=[("blocks.0.attn.hook_z", edit)]))


def no_forward():
    with small.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda act, hook: act * 0)]):
        pass
    return "nothing is said"


def generated():
    def edit(act, hook):
        calls.append(act.shape[1])
        return act * 0

    calls: list[int] = []
    how = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    clean = small.generate(one, **how)
    with small.hooks(fwd_hooks=[("blocks.0.attn.hook_z", edit)]):
        edited = small.generate(one, **how)
    return (
        f"lengths that the hook saw: {calls}; tokens {clean[0, 16:].tolist()} and {edited[0, 16:].tolist()}"
    )


def grouped():
    llama = boot(grouped_model())
    config = analysis.EdgeAttributionConfig(granularity="edge")
    analysis.attribution_patch(llama, one, other, metric, config)
    return "edges scored"


def grouped_patching():
    llama = boot(grouped_model())
    _, cache = llama.run_with_cache(base)
    return tuple(patching.get_act_patch_attn_head_out_all_pos(llama, source, cache, metric).shape)


def grouped_faithfulness():
    llama = boot(grouped_model())
    return analysis.faithfulness(llama, one, other, metric, []).recovered


def another_family():
    bridge = boot(other_family())
    clean = bridge(base)
    edited = bridge.run_with_hooks(base, fwd_hooks=[("blocks.0.attn.hook_out", lambda act, hook: act * 0)])
    return f"changed by {float((clean - edited).abs().max()):.2g}"


tried("activation patching by layer and position", by_layer_and_position)
tried("intervals and p-values of a patching grid", intervals)
tried("exact path patching", exact_paths)
tried("edges by gradients, a kept circuit", kept)
tried("faithfulness of several pairs at once", several_pairs)
tried("integrated gradients", lambda: analysis.EdgeAttributionConfig(granularity="edge", ig_steps=5))
tried("left-padded prompt against the prompt alone, greatest difference", padded)
tried("a misspelt hook", misspelt)
tried("a filter that meets no hook", never_met)
tried("positions past the end: output unchanged, and nothing said", beyond)
tried("an edit that met no forward", no_forward)
tried("while generating", generated)
tried("edges under grouped heads", grouped)
tried("patching under grouped heads", grouped_patching)
tried("faithfulness under grouped heads", grouped_faithfulness)
tried("in its source", lambda: mentions(transformer_lens, *STATISTICS, *SPARSE))
tried(
    "its statistics", lambda: [n for n in dir(transformer_lens.utilities.statistics) if not n.startswith("_")]
)
tried("another family: a random Bloom", another_family)
tried("training a subspace", lambda: analysis.fit_das.__name__)

if repeats:
    gpt2 = boot(random_model())
    with torch.no_grad():

        def zero(act, hook, head):
            act[:, :, head] = 0
            return act

        def sweep():
            found = []
            for layer in range(LAYERS):
                for head in range(HEADS):
                    hooks = [(f"blocks.{layer}.attn.hook_z", partial(zero, head=head))]
                    found.append(gpt2.run_with_hooks(base, fwd_hooks=hooks)[:, -1, 5])
            return found

        multiples("all 144 heads, one at a time", lambda: gpt2(base), sweep, repeats)

    _, cache = gpt2.run_with_cache(one)
    names = attribution_patching._edge_hook_names(LAYERS) + attribution_patching._attn_write_hook_names(
        LAYERS
    )
    with attribution_patching._edge_hook_flags(gpt2):
        cache = attribution_patching.cache_activation_and_gradient(
            gpt2, one, metric, names_filter=names, compute_gradient=False
        )
        every = attribution_patching.enumerate_edges(gpt2, cache)
    with torch.no_grad():
        for kept in (every[:100], every[::2]):
            multiples(
                f"faithfulness() of {len(kept)} of {len(every)} edges, one pair of 16 tokens",
                lambda: gpt2(one),
                lambda kept=kept: analysis.faithfulness(gpt2, one, other, metric, kept),
                repeats,
            )
