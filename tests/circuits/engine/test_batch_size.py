"""One bound of the rows in a forward, for every verb; halved where memory runs out."""

import pytest
import torch

from circuits import ablate, circuit, lens, patch, patterns, probe, sweep
from circuits.engine.batch_size import within_memory
from circuits.model.hooked_model import HookedModel


def test_half_as_many_rows_where_memory_runs_out():
    tried = []

    def run(size):
        tried.append(size)
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    assert within_memory(40, run) == 5
    assert tried == [40, 20, 10, 5]
    with pytest.raises(torch.OutOfMemoryError):
        within_memory(3, lambda size: run(9))


def test_every_verb_takes_it_and_says_what_it_was(make_model, tokens, other_tokens):
    model = make_model(0)

    def metric(output):
        return output[:, -1, 3]

    few = {"draws": 2, "flips": 2}
    c = circuit.nodes(["0.1"])
    verbs = {
        "sweep": lambda **size: sweep(model, tokens, {"a": ablate.zero("0.1")}, metric, **few, **size),
        "lens": lambda **size: lens(model, tokens, metric, **size),
        "attribution": lambda **size: patch.attribution(model, tokens, other_tokens, metric, **few, **size),
        "screen": lambda **size: patch.screen(model, tokens, other_tokens, metric, exact=2, **few, **size),
        "edges": lambda **size: patch.edges(model, tokens, other_tokens, metric, exact=2, **few, **size),
        "evaluate": lambda **size: circuit.evaluate(
            model, c, tokens, other_tokens, metric, random=2, subsets=1, draws=2, **size
        ),
        "curve": lambda **size: circuit.curve(
            model, ["0.1", "1.2"], tokens, other_tokens, metric, draws=2, **size
        ),
        "probe": lambda **size: probe.linear(model, tokens, tokens[:, 0].double(), draws=2, **size),
    }
    rows = []
    handle = HookedModel.of(model).on_forward("hook_embed", lambda x: rows.append(len(x)))
    for name, verb in verbs.items():
        assert verb().settings["batch_size"] >= len(tokens), name
        rows.clear()
        assert verb(batch_size=3).settings["batch_size"] == 3, name
        assert max(rows) <= 3, name
    rows.clear()
    patterns.attention(model, tokens, batch_size=3)
    assert max(rows) <= 3
    handle.remove()


@pytest.mark.parametrize("verb", ["sweep", "lens", "evaluate", "probe"])
def test_a_verb_goes_on_with_half(make_model, tokens, other_tokens, verb, monkeypatch):
    model = make_model(0)
    call = HookedModel.call

    def full(self, prompts):
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, prompts)

    def metric(output):
        return output[:, -1, 3]

    verbs = {
        "sweep": lambda: sweep(model, tokens, {"a": ablate.zero("0.1")}, metric, batch_size=8),
        "lens": lambda: lens(model, tokens, metric, batch_size=8),
        "evaluate": lambda: circuit.evaluate(
            model, circuit.nodes(["0.1"]), tokens, other_tokens, metric, random=1, draws=9, batch_size=8
        ),
        "probe": lambda: probe.linear(model, tokens, tokens[:, 0].double(), draws=9, batch_size=8),
    }
    whole = verbs[verb]()
    monkeypatch.setattr(HookedModel, "call", full)
    halved = verbs[verb]()
    assert (whole.settings["batch_size"], halved.settings["batch_size"]) == (8, 2)
    numbers = whole.frame.select_dtypes("number").columns
    torch.testing.assert_close(
        *(torch.tensor(one.frame[numbers].to_numpy(float, na_value=0)) for one in (whole, halved))
    )
