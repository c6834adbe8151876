"""Measurements of a research notebook, each written once for every model class, against loops of torch's own hooks.

Prompts have unequal lengths and are padded in the measurements; the loops run each alone, on the model as its modules
are: for bridges around Hugging Face models, the Hugging Face model without a bridge.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from circuits import heads, logit_difference, patch, sweep
from tests.circuits import conftest

LAYERS, HEADS = 3, 4
POSITIONS = (-3, -2, -1)
RECEIVERS = [("q", "1.0, 2.3"), "mlp_pre.2", "output"]

# Ids that every model knows; on Hugging Face models they are texts, and a first token comes before them.
CLEAN = [[3, 4, 5, 3, 4], [8, 9, 6, 8], [10, 7, 5, 10, 7, 3]]
CORRUPTED = [[3, 4, 5, 6, 4], [8, 9, 6, 3], [10, 7, 5, 9, 7, 3]]
OF_OTHER_LENGTHS = [[3, 9, 4, 5, 6, 4], [9, 6, 3], [7, 5, 9, 7, 3]]
RIGHT, WRONG = [5, 9, 5], [6, 4, 8]


# The snippets. Prompts are texts or lists of ids.


def patched_by_head(model, clean, corrupted, metric):
    variants = {
        str(head): patch.activations("z", corrupted, heads=[head], positions=[-1], source_positions=[-1])
        for head in heads("all", model)
    }
    return sweep(model, clean, variants, metric).frame


def paths_to_receivers(model, clean, corrupted, metric):
    at = {"positions": POSITIONS, "source_positions": POSITIONS}
    variants = {
        f"L0H{head}": patch.path(f"0.{head}", RECEIVERS, corrupted, **at) for head in range(model.cfg.n_heads)
    }
    return sweep(model, clean, variants, metric).frame


def attributed(model, clean, corrupted, metric):
    return patch.screen(model, clean, corrupted, metric, method="gradient", exact=5).frame


# The loops.


class HookedTransformerModules:
    """A HookedTransformer's modules: the one to hook for an activation, and the side of it ("in", "out")."""

    def __init__(self, model):
        self.model = model

    def logits(self, tokens):
        return self.model(tokens)

    def at(self, site, layer):
        if site == "embed":
            return self.model.embed, "out"
        block = self.model.blocks[layer]
        return {"resid_pre": (block, "in"), "z": (self.z(block), "in"), "mlp_out": (block.mlp, "out")}[site]

    def z(self, block):
        return block.attn.hook_z


class NativeBridgeModules(HookedTransformerModules):
    def z(self, block):
        return block.attn.o


class GPT2Modules:
    def __init__(self, model):
        self.model = model

    def logits(self, tokens):
        return self.model(tokens).logits

    def at(self, site, layer):
        if site == "embed":
            return self.model.transformer.wte, "out"
        block = self.model.transformer.h[layer]
        return {"resid_pre": (block, "in"), "z": (block.attn.c_proj, "in"), "mlp_out": (block.mlp, "out")}[
            site
        ]


class LlamaModules(GPT2Modules):
    def at(self, site, layer):
        if site == "embed":
            return self.model.model.embed_tokens, "out"
        block = self.model.model.layers[layer]
        z = block.self_attn.o_proj
        return {"resid_pre": (block, "in"), "z": (z, "in"), "mlp_out": (block.mlp, "out")}[site]


def hooked_logits(modules, ids, functions):
    """The logits of one prompt at its last token; `functions` {(site, layer): fn} change activations, z by head."""
    handles = []
    for (site, layer), function in functions.items():

        def changed(x, function=function, site=site):
            if site != "z" or x.ndim == 4:
                return function(x)
            return function(x.unflatten(-1, (HEADS, -1))).flatten(-2)

        def before(_, given, changed=changed):
            return changed(given[0]), *given[1:]

        def after(_, given, output, changed=changed):
            return changed(output)

        module, side = modules.at(site, layer)
        register = module.register_forward_pre_hook if side == "in" else module.register_forward_hook
        handles.append(register(before if side == "in" else after))
    try:
        return modules.logits(torch.tensor([ids]))[0, -1]
    finally:
        for handle in handles:
            handle.remove()


def recorded(modules, ids, *place):
    seen = []

    def keep(x):
        seen.append(x.detach().clone())
        return x

    with torch.no_grad():
        hooked_logits(modules, ids, {place: keep})
    return seen[0]


def put(values, *index):
    """Writes `values` at `index`; a position from the end is that of each, whatever their lengths."""

    def replaced(x):
        x = x.clone()
        x[index] = values[index]
        return x

    return replaced


class Notebook:
    """A model with the form in which it takes prompts, its modules, and its forward by hand."""

    def __init__(self, model, modules, forward, texts):
        self.model, self.modules, self.forward, self._texts = model, modules, forward, texts
        self.metric = logit_difference(
            *(([f" {word}" for word in self._words(x)] if texts else x) for x in (RIGHT, WRONG))
        )

    def _words(self, ids):
        return [f"w{i - 3}" for i in ids]

    def ids(self, rows):
        return [[1, *row] for row in rows] if self._texts else rows

    def measured(self, snippet, source):
        clean, source = (
            [" ".join(self._words(row)) for row in x] if self._texts else x for x in (CLEAN, source)
        )
        return snippet(self.model, clean, source, self.metric)

    def pairs(self, source):
        """Each clean prompt's ids and those that it takes from, with the metric of logits at its last token."""
        for row, ids in enumerate(zip(self.ids(CLEAN), self.ids(source), strict=True)):
            yield *ids, lambda logits, row=row: logits[RIGHT[row]] - logits[WRONG[row]]

    def effect(self, source, edited):
        """The mean over prompts of what `edited(ids, partner)`, {(site, layer): fn}, does to the metric."""
        changes = []
        with torch.no_grad():
            for ids, partner, metric in self.pairs(source):
                new, old = (hooked_logits(self.modules, ids, f) for f in (edited(ids, partner), {}))
                changes.append(float(metric(new) - metric(old)))
        return np.mean(changes)


_MADE: dict[str, Notebook] = {}


@pytest.fixture(params=[*conftest.FAMILIES, "gpt2", "llama"])
def notebook(request, hf_model):
    """On transformer-lens 4.3 there are only bridges."""
    name = request.param
    if name not in _MADE:
        _MADE[name] = own(name) if name in conftest.FAMILIES else huggingface(name, hf_model)
    return _MADE[name]


def own(family):
    model = conftest.build(family=family, n_layers=LAYERS, n_ctx=8)
    modules = HookedTransformerModules if family == conftest.HOOKED else NativeBridgeModules
    return Notebook(model, modules(model), conftest.forward, texts=False)


def huggingface(name, hf_model):
    transformers = pytest.importorskip("transformers")
    from tests.circuits import families

    folder = hf_model.folder(name, num_hidden_layers=LAYERS)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    modules = {"gpt2": GPT2Modules, "llama": LlamaModules}[name]
    return Notebook(families.boot(folder), modules(plain.eval()), families.forward, texts=True)


def same(found, expected):
    """Rotary tables are in single precision."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


SOURCES = pytest.mark.parametrize("source", [CORRUPTED, OF_OTHER_LENGTHS], ids=["partners", "other lengths"])


@SOURCES
def test_patching_by_head(notebook, source):
    def effect(layer, head):
        def edited(ids, partner):
            return {("z", layer): put(recorded(notebook.modules, partner, "z", layer), 0, -1, head)}

        return notebook.effect(source, edited)

    frame = notebook.measured(patched_by_head, source)
    same(frame["effect"], [effect(*place) for place in np.ndindex(LAYERS, HEADS)])


def test_attribution_with_exact_effects_of_the_top(notebook):
    places = [("embed", None), *((s, layer) for layer in range(LAYERS) for s in ("z", "mlp_out"))]
    parts = {}  # row -> place, index of the part
    for site, layer in places:
        for head in range(HEADS) if site == "z" else [None]:
            label = f"{layer}.{head}" if site == "z" else site if layer is None else f"{site}.{layer}"
            parts[label] = (site, layer), (...,) if head is None else (slice(None), slice(None), head)
    estimates = {label: [] for label in parts}
    for ids, partner, metric in notebook.pairs(CORRUPTED):
        change, leaves = {}, {}
        for place in places:
            theirs, own = (recorded(notebook.modules, x, *place) for x in (partner, ids))
            change[place], leaves[place] = theirs - own, torch.zeros_like(own).requires_grad_()
        added = {place: (lambda x, leaf=leaf: x + leaf) for place, leaf in leaves.items()}
        metric(hooked_logits(notebook.modules, ids, added)).backward()
        for label, (place, index) in parts.items():
            estimates[label].append(float((change[place] * leaves[place].grad)[index].sum()))

    def effect(label):
        place, index = parts[label]

        def edited(ids, partner):
            return {place: put(recorded(notebook.modules, partner, *place), *index)}

        return notebook.effect(CORRUPTED, edited)

    frame = notebook.measured(attributed, CORRUPTED).set_index("variant")
    assert sorted(frame.index) == sorted(parts)
    same(frame["estimate"], [np.mean(estimates[label]) for label in frame.index])
    top = frame.index[frame["effect"].notna()]
    assert set(top) == set(sorted(parts, key=lambda label: -abs(np.mean(estimates[label])))[:5])
    same(frame["effect"][top], [effect(label) for label in top])


@SOURCES
@torch.no_grad()
def test_path_patching_to_a_set_of_receivers(notebook, source):
    """By forwards by hand: each receiver reads the stream with the sender's change, in the order of the layers."""
    model = notebook.model

    def forward(ids, edits):
        seen = {}

        def at(site, layer, x):
            seen[site, layer] = edits.get((site, layer), lambda x: x)(x)
            return seen[site, layer]

        return notebook.forward(model, torch.tensor([ids]), at)[0, -1], seen

    def along_paths(ids, partner, head):
        z = forward(partner, {})[1]["z", 0]
        sent = {("z", 0): put(z, slice(None), list(POSITIONS), head)}
        change = forward(ids, sent)[1]["attn_out", 0] - forward(ids, {})[1]["attn_out", 0]
        edits = {}
        # What reads, the stream that it reads from, and the part of it that does.
        for reader, stream, index in [
            (("q", 1), ("resid_pre", 1), (slice(None), slice(None), 0)),
            (("q", 2), ("resid_pre", 2), (slice(None), slice(None), 3)),
            (("mlp_post", 2), ("resid_mid", 2), (...,)),
        ]:
            read = forward(ids, {**edits, stream: lambda x: x + change})[1][reader]
            edits[reader] = put(read, *index)
        edits["resid_post", 2] = lambda x: x + change
        return forward(ids, edits)[0]

    expected = [
        np.mean(
            [
                float(metric(along_paths(ids, partner, head)) - metric(forward(ids, {})[0]))
                for ids, partner, metric in notebook.pairs(source)
            ]
        )
        for head in range(HEADS)
    ]
    same(notebook.measured(paths_to_receivers, source)["effect"], expected)
