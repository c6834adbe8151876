"""What nnsight does, and what it takes: `python with_nnsight.py [REPEATS]`."""

from __future__ import annotations

from importlib.metadata import version

import nnsight
import torch
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
from nnsight import LanguageModel, NNsight
from transformers import AutoTokenizer

repeats = start()
print("nnsight", version("nnsight"), "torch", torch.__version__)

plain = random_model(2, 32, 4)
small = NNsight(plain)
base, source = pairs()
one = base[:1]


def logits(model, tokens, **how):
    return model(tokens, **how).logits


def by_layer_and_position():
    found = torch.zeros(2, 16)
    for layer in range(2):
        with small.trace(base):
            kept = small.transformer.h[layer].output.save()
        theirs = kept[0] if isinstance(kept, tuple) else kept
        for position in range(16):
            with small.trace(source):
                output = small.transformer.h[layer].output
                hidden = output[0] if isinstance(output, tuple) else output
                hidden[:, position] = theirs[:, position]
                value = small.output.logits[:, -1, 5].mean().save()
            found[layer, position] = value
    return f"written as two loops: {tuple(found.shape)}, spread {found.std():.2g}"


def padded():
    folder = saved(plain)
    model = LanguageModel(folder, tokenizer=AutoTokenizer.from_pretrained(folder), dispatch=True)
    model.tokenizer.padding_side = "left"
    words = [" ".join(f"w{int(each) - 3}" for each in row) for row in (base[0, :10], base[1])]
    with model.trace(words[0]):
        alone = model.output.logits[0, -1].save()
    with model.trace(words):
        both = model.output.logits[0, -1].save()
    return f"{float((alone - both).abs().max()):.1e}"


def misspelt():
    with small.trace(base):
        small.transformer.h[0].attention.output[0][:] = 0
    return "accepted"


def on_a_copy():
    with small.trace(base):
        edited = small.transformer.h[0].attn.output[0].clone()
        edited[:] = 0
        output = small.output.logits.save()
    return f"an edit of a copy is accepted; outputs equal: {torch.equal(output, logits(plain, base))}"


def beyond():
    with small.trace(base):
        small.transformer.h[0].attn.c_proj.input[:, 30:40] = 0
        output = small.output.logits.save()
    return torch.equal(output, logits(plain, base))


def generated():
    folder = saved(plain)
    model = LanguageModel(folder, tokenizer=AutoTokenizer.from_pretrained(folder), dispatch=True)
    words = " ".join(f"w{int(each) - 3}" for each in one[0])
    how = {"max_new_tokens": 4, "do_sample": False}
    with model.generate(words, **how):
        clean = model.generator.output.save()
    with model.generate(words, **how) as tracer:
        for _ in tracer.iter[:4]:
            model.transformer.h[0].attn.c_proj.input[:] = 0
        edited = tracer.result.save()
    return f"tokens {clean[0, 16:].tolist()} and {edited[0, 16:].tolist()}"


def grouped():
    model = NNsight(grouped_model())
    clean = model._module(base).logits
    with model.trace(base):
        model.model.layers[0].self_attn.o_proj.input[..., :8] = 0
        output = model.output.logits.save()
    return f"head 0.0 zeroed at its module's input: changed by {float((output - clean).abs().max()):.2g}"


def gradients():
    with small.trace(base):
        hidden = small.transformer.h[0].attn.c_proj.input
        hidden.requires_grad_()
        value = small.output.logits[:, -1, 5].sum()
        with value.backward():
            slope = hidden.grad.save()
    return f"gradients at any module: {tuple(slope.shape)}; edges are left to the reader"


def another_family():
    plain_bloom = other_family()
    model = NNsight(plain_bloom)
    with model.trace(base):
        model.transformer.h[0].mlp.dense_h_to_4h.output[:] = 0
        output = model.output.logits.save()
    return f"changed by {float((output - logits(plain_bloom, base)).abs().max()):.2g}"


def public():
    return [name for name in dir(nnsight) if not name.startswith("_")]


tried("activation patching by layer and position", by_layer_and_position)
tried("gradients", gradients)
tried("left-padded prompt against the prompt alone, greatest difference", padded)
tried("a misspelt module", misspelt)
tried("an edit of a copy", on_a_copy)
tried("positions past the end: output unchanged, and nothing said", beyond)
tried("while generating", generated)
tried("a head under grouped heads", grouped)
tried("another family: a random Bloom", another_family)
tried("in its source", lambda: mentions(nnsight, *STATISTICS, *SPARSE))
tried("its names", public)

if repeats:
    gpt2 = NNsight(random_model())

    def clean():
        with torch.no_grad():
            return gpt2._module(base).logits

    def sweep():
        found = []
        with torch.no_grad():
            for layer in range(LAYERS):
                for head in range(HEADS):
                    with gpt2.trace(base):
                        gpt2.transformer.h[layer].attn.c_proj.input[..., 64 * head : 64 * (head + 1)] = 0
                        value = gpt2.output.logits[:, -1, 5].save()
                    found.append(value)
        return found

    multiples("all 144 heads, a trace for each", clean, sweep, repeats)
