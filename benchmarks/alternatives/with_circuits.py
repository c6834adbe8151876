"""What `circuits` does, and what it takes: `python with_circuits.py [REPEATS]`, in an environment of this package."""

from __future__ import annotations

import random
from importlib.metadata import version

import torch
from common import grouped_model, multiples, other_family, pairs, random_model, saved, start, tried
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge

import circuits
from circuits import ablate, cache, circuit, heads, intervene, patch, prompts, run, splice, sweep

repeats = start()
print(
    "circuits",
    circuits.__version__,
    "transformer-lens",
    version("transformer-lens"),
    "torch",
    torch.__version__,
)


def boot(model):
    bridge = TransformerBridge.boot_transformers(saved(model), device="cpu", dtype=torch.float32)
    return bridge.eval()


def metric(logits):
    return logits[:, -1, 5] - logits[:, -1, 6]


small = boot(random_model(2, 32, 4))
base, source = pairs()


def by_layer_and_position():
    found = patch.screen(small, base, source, metric, sites="resid_pre", by="position", exact="all")
    return f"{len(found.frame)} rows, columns {', '.join(found.frame.columns)}"


def exact_paths():
    edit = patch.path("0.0", ("q", "1.1"), source)
    return (
        f"0.0 to the query of 1.1: changed by {float((run(small, base, edit) - small(base)).abs().max()):.2g}"
    )


def edges():
    return patch.edges(small, base, source, metric, exact=20)


def integrated():
    found = patch.edges(small, base, source, metric, method="integrated", steps=5, exact=1)
    return f"{len(found.frame)} edges, the largest {found.frame['estimate'].abs().max():.3f}"


def kept():
    found = edges()
    tested = circuit.evaluate(small, {"top 20": found.top(20)}, base, source, metric)
    return tested.frame.iloc[0].to_dict()


def padded():
    short = base[0, :10]
    given = prompts(small, [short, base[1]])
    alone, both = run(small, short[None])[0, -1], run(small, given)[0]
    return f"{float(min((both[-1] - alone).abs().max(), (both[9] - alone).abs().max())):.1e}"


def intervals():
    found = sweep(small, base, ablate.each(ablate.zero, heads("all", small)), metric)
    return ", ".join(found.frame.columns)


def beyond():
    return run(small, base, ablate.zero("0.1", positions=range(30, 40)))


def never_met():
    with intervene(small, ablate.zero("0.1")):
        pass
    return "accepted"


def generated():
    how = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    clean = small.generate(base[:1], **how)
    with intervene(small, ablate.zero("0.1")):
        edited = small.generate(base[:1], **how)
    return f"tokens {clean[0, 16:].tolist()} and {edited[0, 16:].tolist()}"


def grouped():
    llama = boot(grouped_model())
    found = patch.edges(llama, base, source, metric, exact=20)
    value = float(metric(run(llama, base, found.top(20).keep(source))).mean())
    return f"{len(found.frame)} edges; 20 of them kept give {value:.3f} of {float(metric(llama(base)).mean()):.3f}"


def another_family():
    bloom = boot(other_family())
    edited = run(bloom, base, ablate.zero("0.1"))
    return f"changed by {float((edited - bloom(base)).abs().max()):.2g}"


tried("activation patching by layer and position", by_layer_and_position)
tried("exact path patching", exact_paths)
tried("edges by gradients, a kept circuit", kept)
tried("integrated gradients of edges", integrated)
tried("left-padded prompt against the prompt alone, greatest difference", padded)
tried("a site that is not there", lambda: run(small, base, circuits.edit("hook_zz", lambda act: act)))
tried("positions past the end", beyond)
tried("an edit that met no forward", never_met)
tried("while generating", generated)
tried("grouped heads", grouped)
tried("another family: a random Bloom", another_family)
tried("intervals and p-values", intervals)
tried("SAE features", lambda: splice.__doc__.splitlines()[0])

if repeats:
    sizes = {
        "n_layers": 12,
        "n_heads": 12,
        "d_model": 768,
        "d_head": 64,
        "d_mlp": 3072,
        "n_ctx": 32,
        "seed": 0,
    }
    config = HookedTransformerConfig(**sizes, d_vocab=200, act_fn="gelu_new", device="cpu")
    for name, model in (
        ("HookedTransformer", HookedTransformer(config).eval()),
        ("bridge", boot(random_model())),
    ):
        variants = ablate.each(ablate.zero, heads("all", model))

        def clean(model=model):
            return run(model, base)

        def all_heads(model=model, variants=variants):
            return sweep(model, base, variants, metric, draws=1, flips=1)

        multiples(f"{name}: all 144 heads, {all_heads().settings['engine']}", clean, all_heads, repeats)
        theirs = dict(cache(model, source, ["embed", "pos_embed", "z", "mlp_out"]))
        graph = list(circuit.full(model))
        half = circuit.edges(random.Random(0).sample(graph, len(graph) // 2), model).keep(theirs)
        multiples(
            f"{name}: keep of {len(graph) // 2} of {len(graph)} edges, the source pass apart",
            clean,
            lambda model=model, half=half: run(model, base, half),
            repeats,
        )
