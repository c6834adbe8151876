"""One bound of the rows in a forward, for every verb; halved where memory runs out."""

import pytest
import torch

from circuits import ablate, circuit, lens, patch, patterns, probe, run, sweep
from circuits.model import batch_size
from circuits.model.batch_size import run_within_memory
from circuits.model.hooked_model import HookedModel


def test_half_as_many_rows_where_memory_runs_out():
    tried = []

    def run(size):
        tried.append(size)
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    assert run_within_memory(40, run) == 5
    assert tried == [40, 20, 10, 5]
    with pytest.raises(torch.OutOfMemoryError):
        run_within_memory(3, lambda size: run(9))


def metric(output):
    return output[:, -1, 3]


FEW, NODE = {"draws": 2, "flips": 2}, circuit.nodes(["0.1"])
VERBS = {
    "sweep": lambda model, a, b, **size: sweep(model, a, {"a": ablate.zero("0.1")}, metric, **FEW, **size),
    "lens": lambda model, a, b, **size: lens(model, a, metric, **size),
    "attribution": lambda model, a, b, **size: patch.attribution(model, a, b, metric, **FEW, **size),
    "screen": lambda model, a, b, **size: patch.screen(model, a, b, metric, exact=2, **FEW, **size),
    "edges": lambda model, a, b, **size: patch.edges(model, a, b, metric, exact=2, **FEW, **size),
    "evaluate": lambda model, a, b, **size: circuit.evaluate(
        model, NODE, a, b, metric, random=2, subsets=1, draws=2, **size
    ),
    "curve": lambda model, a, b, **size: circuit.curve(model, ["0.1", "1.2"], a, b, metric, draws=2, **size),
    "probe": lambda model, a, b, **size: probe.linear(model, a, a[:, 0].double(), draws=2, **size),
}


def test_every_verb_takes_it_and_says_what_it_was(make_model, tokens, other_tokens):
    model, rows = make_model(0), []
    handle = HookedModel(model).on_forward("hook_embed", lambda x: rows.append(len(x)))
    for name, verb in VERBS.items():
        assert verb(model, tokens, other_tokens).settings["batch_size"] >= len(tokens), name
        rows.clear()
        assert verb(model, tokens, other_tokens, batch_size=3).settings["batch_size"] == 3, name
        assert max(rows) <= 3, name
    held = batch_size.choose_batch_size(HookedModel(model), 6, None, "held", kept=batch_size.NUMBERS)
    assert held == 1
    rows.clear()
    patterns.attention(model, tokens, batch_size=3)
    assert max(rows) <= 3
    handle.remove()


@pytest.mark.parametrize("verb", ["sweep", "lens", "evaluate", "probe"])
def test_a_verb_goes_on_with_half(make_model, tokens, other_tokens, verb, monkeypatch):
    model, call = make_model(0), HookedModel.run_forward

    def full(self, prompts):
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, prompts)

    whole = VERBS[verb](model, tokens, other_tokens, batch_size=8)
    monkeypatch.setattr(HookedModel, "run_forward", full)
    halved = VERBS[verb](model, tokens, other_tokens, batch_size=8)
    assert (whole.settings["batch_size"], halved.settings["batch_size"]) == (8, 2)
    numbers = whole.frame.select_dtypes("number").columns
    torch.testing.assert_close(
        *(torch.tensor(one.frame[numbers].to_numpy(float, na_value=0)) for one in (whole, halved))
    )


@pytest.mark.parametrize(("bound", "most", "step"), [("TOKENS", 14, 2), ("IN_CACHE", 0, 1)])
def test_clean_passes_keep_to_the_bounds(causal, tokens, other_tokens, monkeypatch, bound, most, step):
    edits, rows = (ablate.mean("0.1", other_tokens), patch.activations("z.1", other_tokens)), []
    whole = run(causal, tokens, *edits)
    monkeypatch.setattr(batch_size, bound, most)
    causal.embed.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    torch.testing.assert_close(run(causal, tokens, *edits), whole)
    assert rows == [step] * (8 // step) + [8]
