"""Batches of examples: their results are the undivided ones, and bound what is in memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from circuits import CircuitsError, logit_difference, patch, prompts
from circuits.model.hooked_model import HookedModel

FEW = {"draws": 20, "flips": 20}
VERBS = {
    "attribution": (patch.attribution, {}),
    "screen": (patch.screen, {"exact": 2, "steps": 2}),
    "screen along sites": (patch.screen, {"exact": 2, "steps": 2, "line": "site"}),
    "edges": (patch.edges, {"exact": 2, "steps": 2}),
    "edges of means": (patch.edges, {"exact": 2, "steps": 2, "how": "mean"}),
}


def reads_two(output, rows):
    """A pair whose counts differ between examples."""
    loss, kept = output.square().mean(-1)[:, [1, 4]], torch.stack([rows % 3 > 0, rows % 2 > 0], 1)
    return {"pair": ((loss * kept).sum(1), kept.sum(1)), "sum": loss.sum(1)}


def reads_everywhere(output, rows):
    return reads_two(output, rows)


reads_two.read_positions = (1, 4)


@pytest.fixture(params=VERBS)
def verb(request):
    function, options = VERBS[request.param]
    return lambda *args, **more: function(*args, **FEW, **options, **more)


def assert_same(found, expected):
    found, expected = (each.frame.sort_values(["metric", "variant"]) for each in (found, expected))
    assert list(found["variant"]) == list(expected["variant"])
    assert expected["effect"].abs().max() > 1e-3
    for column in {"estimate", "estimate_ci_low", "effect", "effect_ci_low", "baseline", "size"} & set(found):
        np.testing.assert_allclose(found[column], expected[column], rtol=1e-6, atol=1e-9)


def test_batches_are_pooled_as_the_whole(verb, causal, tokens, other_tokens):
    """Whether logits are computed where the metric reads, or everywhere."""
    rows, sizes = torch.arange(len(tokens)), []
    whole = verb(causal, tokens, other_tokens, reads_everywhere, batch=rows, batch_size=100)
    handle = HookedModel.of(causal).on_run(lambda args, kwargs: sizes.append(len(args[0])))
    found = verb(causal, tokens, other_tokens, reads_two, batch=rows, batch_size=3)
    handle.remove()
    assert_same(found, whole)
    assert max(sizes) == 3
    assert found.settings["batch_size"] == 3
    assert whole.settings["batch_size"] == 100


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_computed_where_answers_are_read(causal, tokens, other_tokens, monkeypatch, side):
    lengths, shapes = [4, 6, 5, 6], []
    pairs = [
        [row[:n].tolist() for row, n in zip(each, lengths, strict=False)] for each in (tokens, other_tokens)
    ]
    base, source = (prompts(causal, rows, side) for rows in pairs)
    metric = logit_difference(3, 1)
    module = sys.modules["circuits.sweeps.logit_difference"]
    whole = module._difference

    def seen(output, answers):
        shapes.append(output.shape[1])
        return whole(output, answers)

    monkeypatch.setattr(module, "_difference", seen)
    found = patch.attribution(causal, base, source, metric, **FEW)
    assert set(shapes) == {1 if side == "left" else 3}
    monkeypatch.undo()
    each = [
        patch.attribution(causal, torch.tensor([one]), torch.tensor([other]), metric, **FEW).frame["effect"]
        for one, other in zip(*pairs, strict=True)
    ]
    np.testing.assert_allclose(found.frame["effect"], np.mean(each, 0), rtol=1e-6, atol=1e-9)


def test_a_hook_at_the_unembedding_sees_all_positions(causal, tokens, other_tokens):
    shapes = []
    handle = causal.unembed.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    patch.attribution(causal, tokens, other_tokens, logit_difference(3, 1), **FEW)
    handle.remove()
    assert set(shapes) == {6}


@pytest.mark.parametrize("batch_size", [0, 2.5, "auto"])
def test_a_batch_has_an_example(causal, tokens, other_tokens, batch_size):
    with pytest.raises(CircuitsError, match=r"batch_size=.*; give the number of rows in a forward"):
        patch.edges(causal, tokens, other_tokens, batch_size=batch_size)


MEASURED = """
import resource, sys, torch
from circuits import patch
from tests.circuits.conftest import FAMILIES, build
model = build(family=FAMILIES[0], d_model=64, n_layers=2, n_ctx=64, d_vocab=20000).to(torch.float32)
base, source = torch.randint(20000, (2, 256, 64))
def loss(output, rows):
    return output.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None]).sum((1, 2))
options = {} if sys.argv[1] == "attribution" else {"exact": 1, "method": "gradient"}
getattr(patch, sys.argv[1])(model, base, source, loss, batch=base, draws=1, flips=1, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["attribution", "screen", "edges"])
def test_memory_of_256_prompts_and_20000_words(verb):
    done = subprocess.run([sys.executable, "-c", MEASURED, verb], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) * 1024 < 1.5e9
