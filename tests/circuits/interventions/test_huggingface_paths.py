"""Paths through the bridges of Hugging Face models, against forwards written by hand."""

import pytest
import torch

from circuits import CircuitsError, patch, run
from circuits.model.hooked_model import HookedModel
from circuits.model.supported_models import FAMILIES
from tests.circuits.conftest import activations

families = pytest.importorskip("tests.circuits.families")

SERVED = ["gpt2", "neox", "pythia", "llama", "qwen2", "qwen3", "mistral", "gemma2"]
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(3, families.WORDS, (3, 7), generator=GENERATOR)
SOURCE = torch.randint(3, families.WORDS, (3, 7), generator=GENERATOR)


def read(model, tokens, place, edits=()):
    """One activation of a forward by hand, under functions by place."""
    edits = dict(edits)

    def edited(site, layer, x):
        return edits[site, layer](x) if (site, layer) in edits else x

    seen, output = activations(families.forward, model, tokens, edited)
    return output if place is None else seen[place]


def change_of(model, sender):
    """What a sender's change, base to source, adds to the stream; senders are (site, layer, head or None)."""
    site, layer, head = sender
    source = read(model, SOURCE, (site, layer))
    if head is None:
        return source - read(model, TOKENS, (site, layer))

    def replaced(z):
        z = z.clone()
        z[:, :, head] = source[:, :, head]
        return z

    out = ("attn_out", layer)
    return read(model, TOKENS, out, {(site, layer): replaced}.items()) - read(model, TOKENS, out)


def stream_of(model, receiver):
    site, layer = receiver[:2]
    if site == "mlp_pre" and not families.Form.of(model).parallel:
        return "resid_mid", layer
    return (site, layer) if site == "resid_post" else ("resid_pre", layer)


def direct_paths(model, edges):
    """The output where each receiver reads the run's stream with its senders' changes, which nothing else hears."""
    changes = {}
    for sender, receiver in edges:
        changes[receiver] = changes.get(receiver, 0) + change_of(model, sender)
    functions = {}
    for receiver, total in changes.items():
        # An MLP hears a path in all that it reads, in its gate and in what is gated.
        place = ("mlp_post", receiver[1]) if receiver[0] == "mlp_pre" else receiver[:2]
        stream = stream_of(model, receiver)
        new = read(model, TOKENS, place, {**functions, stream: lambda x, total=total: x + total}.items())

        def put(x, new=new, head=receiver[2]):
            if head is None:
                return new
            x = x.clone()
            x[:, :, head] = new[:, :, head]
            return x

        functions[place] = put
    return read(model, TOKENS, None, functions.items())


EDGES = {
    "head to query": [(("z", 0, 1), ("q", 1, 2))],
    "head to value": [(("z", 0, 3), ("v", 1, 1))],
    "head to MLP": [(("z", 0, 0), ("mlp_pre", 1, None))],
    "MLP to key": [(("mlp_out", 0, None), ("k", 1, 0))],
    "embedding to query": [(("embed", None, None), ("q", 0, 2))],
    "head to output": [(("z", 0, 2), ("resid_post", 1, None))],
    "several": [
        (("z", 0, 1), ("q", 1, 2)),
        (("embed", None, None), ("q", 1, 2)),
        (("z", 0, 1), ("mlp_pre", 1, None)),
    ],
}


def path_of(model, sender, receiver):
    site, layer, head = sender
    sent = f"{layer}.{head}" if head is not None else site if layer is None else f"{site}.{layer}"
    site, layer, head = receiver
    if head is None:
        return patch.path(sent, f"{site}.{layer}", source=SOURCE)
    grouped = site != "q" and HookedModel(model).key_value_heads != model.cfg.n_heads
    return patch.path(sent, (site, f"{layer}.k{head}" if grouped else f"{layer}.{head}"), source=SOURCE)


@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("name", SERVED)
def test_paths_are_those_by_hand(hf_model, name, edges):
    model = hf_model(name)
    clean = families.forward(model, TOKENS)
    expected = direct_paths(model, edges)
    effect = (expected - clean).abs().max()
    assert float(effect) > 1e-3 * float(clean.std())
    found = run(model, TOKENS, *(path_of(model, *edge) for edge in edges))
    assert float((found - expected).abs().max()) <= 1e-5 * float(effect)


def test_served_are_the_rows_of_the_table_with_paths(hf_model):
    rows = {HookedModel(hf_model(name)).huggingface.family.name for name in SERVED}
    assert rows == {family.name for family in FAMILIES if family.paths}


@pytest.mark.parametrize("name", ["gptj", "opt"])
def test_paths_that_were_not_compared_are_refused(hf_model, name):
    model = hf_model(name)
    for call in (
        lambda: run(model, TOKENS, patch.path("0.1", "output", source=SOURCE)),
        lambda: patch.edges(model, TOKENS, SOURCE),
    ):
        with pytest.raises(CircuitsError, match="were not compared with a forward by hand"):
            call()
