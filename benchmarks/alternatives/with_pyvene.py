"""What pyvene does, and what it takes: `python with_pyvene.py [REPEATS]`."""

from __future__ import annotations

from importlib.metadata import version

import pyvene
import torch
from common import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    SPARSE,
    STATISTICS,
    grouped_model,
    mentions,
    multiples,
    other_family,
    pairs,
    random_model,
    start,
    tried,
)
from pyvene import (
    IntervenableConfig,
    IntervenableModel,
    LowRankRotatedSpaceIntervention,
    RepresentationConfig,
    VanillaIntervention,
    ZeroIntervention,
)

repeats = start()
print("pyvene", version("pyvene"), "torch", torch.__version__)

plain = random_model(2, 32, 4)
base, source = pairs()


def one(model, layer, site, unit, kind):
    found = RepresentationConfig(layer, site, unit, 1)
    return IntervenableModel(IntervenableConfig([found], kind), model=model)


def outputs(pair):
    return pair[1].logits


def by_layer_and_position():
    found = torch.zeros(2, 16)
    for layer in range(2):
        patched = one(plain, layer, "block_output", "pos", VanillaIntervention)
        for position in range(16):
            where = {"sources->base": (position, position)}
            edited = patched({"input_ids": source}, [{"input_ids": base}], where)
            found[layer, position] = outputs(edited)[:, -1, 5].mean()
    return f"written as two loops: {tuple(found.shape)}, spread {found.std():.2g}"


def head_zeroed(model, head=0, layer=0):
    edit = one(model, layer, "head_attention_value_output", "h", ZeroIntervention)
    return edit({"input_ids": base}, unit_locations={"base": [[[head]]] * BATCH})


def a_head():
    return f"changed by {float((outputs(head_zeroed(plain)) - plain(base).logits).abs().max()):.2g}"


def padded():
    short = base[:1, :10]
    batch = torch.cat([torch.cat([torch.zeros(1, 6, dtype=int), short], 1), base[1:2]])
    mask = (batch != 0).long()
    edit = one(plain, 0, "block_output", "pos", ZeroIntervention)
    alone = outputs(edit({"input_ids": short}, unit_locations={"base": 3}))[0, -1]
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": batch, "attention_mask": mask, "position_ids": counted}
    by_row = outputs(edit(inputs, unit_locations={"base": [[[9], [3]]]}))[0, -1]
    same = outputs(edit(inputs, unit_locations={"base": 3}))[0, -1]
    return (
        f"position 3 zeroed: {float((alone - same).abs().max()):.2g} with one position for all rows, "
        f"{float((alone - by_row).abs().max()):.1e} with the padding counted by hand"
    )


def misspelt():
    one(plain, 0, "block_outputs", "pos", ZeroIntervention)
    return "accepted"


def beyond():
    edit = one(plain, 0, "block_output", "pos", ZeroIntervention)
    edited = outputs(edit({"input_ids": base}, unit_locations={"base": 30}))
    return f"accepted; outputs equal: {torch.equal(edited, plain(base).logits)}"


def no_such_head():
    edited = outputs(head_zeroed(plain, head=9))
    return f"accepted; outputs equal: {torch.equal(edited, plain(base).logits)}"


def generated():
    edit = one(plain, 0, "block_output", "pos", ZeroIntervention)
    how = {"max_new_tokens": 4, "do_sample": False}
    clean, edited = edit.generate(
        {"input_ids": base[:1]},
        unit_locations={"base": 3},
        intervene_on_prompt=True,
        output_original_output=True,
        **how,
    )
    return f"tokens {clean[0, 16:].tolist()} and {edited[0, 16:].tolist()}"


def grouped():
    model = grouped_model()
    edited = outputs(head_zeroed(model))
    return f"head 0.0 zeroed: changed by {float((edited - model(base).logits).abs().max()):.2g}"


def another_family():
    model = other_family()
    found = {"component": "transformer.h[0].mlp.output", "intervention": ZeroIntervention()}
    edit = IntervenableModel([found], model=model)
    edited = outputs(edit({"input_ids": base}, unit_locations={"base": list(range(16))}))
    return f"changed by {float((edited - model(base).logits).abs().max()):.2g}"


def trained():
    found = RepresentationConfig(0, "block_output", "pos", 1, low_rank_dimension=2)
    edit = IntervenableModel(IntervenableConfig([found], LowRankRotatedSpaceIntervention), model=plain)
    count = sum(each.numel() for each in edit.get_trainable_parameters())
    edited = outputs(edit({"input_ids": base}, [{"input_ids": source}], {"sources->base": (3, 3)}))
    edited[:, -1, 5].sum().backward()
    return f"{count} parameters of a rotated subspace get gradients"


tried("activation patching by layer and position", by_layer_and_position)
tried("a head zeroed", a_head)
tried("a left-padded prompt against the prompt alone", padded)
tried("a misspelt component", misspelt)
tried("positions past the end", beyond)
tried("a head that is not there", no_such_head)
tried("while generating", generated)
tried("a head under grouped heads", grouped)
tried("another family: a random Bloom", another_family)
tried("training a subspace", trained)
tried("in its source", lambda: mentions(pyvene, *STATISTICS, *SPARSE))
tried("its interventions", lambda: [name for name in dir(pyvene) if name.endswith("Intervention")])

if repeats:
    gpt2 = random_model()

    def clean():
        with torch.no_grad():
            return gpt2(base).logits

    edits = [
        one(gpt2, layer, "head_attention_value_output", "h", ZeroIntervention) for layer in range(LAYERS)
    ]

    def sweep():
        found = []
        with torch.no_grad():
            for edit in edits:
                for head in range(HEADS):
                    where = {"base": [[[head]] * BATCH]}
                    found.append(outputs(edit({"input_ids": base}, unit_locations=where))[:, LENGTH - 1, 5])
        return found

    multiples("all 144 heads, one at a time", clean, sweep, repeats)
