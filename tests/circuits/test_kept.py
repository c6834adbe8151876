"""Whole results of calls with every option, numbers and words, are as they were when `pytest --keep` kept them.

That they were right is for other tests to say, which compare with forwards by hand: these say what changed.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers

import circuits
from tests.circuits import families
from tests.circuits.conftest import BRIDGE, HOOKED, build
from tests.circuits.kept import check, differences, lines, told

pytestmark = pytest.mark.usefixtures("untyped", "hooked_only")

#: One call a line; m is a model, n one of other weights, and what else they name is in `names`.
CALLS = """
run(m, x, ablate.uniform("all", [0, 1], positions=[2, 3]))
run(m, x, ablate.mean_pattern("0.1", y, "edited", positions=[-1]), ablate.zero("0.0"))
run(m, x, ablate.mean_pattern(["0.1", "1.2"], y, positions=mask))
run(m, x, ablate.zero(["0.1", "1.2"], positions=slice(1, 4)), ablate.zero("mlp_out.1"))
run(m, x, ablate.mean("mlp_out.0", y, "batch,pos", reference_positions=[0, 2], positions=[1]))
run(m, x, ablate.mean("all", y, positions=[3, 4]))
run(m, x, ablate.mean("1.0", y, "batch,pos", positions=mask))
run(m, x, ablate.mean("resid_mid.1", y))
run(m, x, ablate.resample(["0.3", "1.1"], y, 5, positions=[-1, -2]))
run(m, x, ablate.resample("resid_post.0", y, positions=mask))
run(m, x, ablate.noise("0.2", 0.5, 7, positions=[2]))
run(m, x, ablate.noise("mlp_post", 0.1, positions=mask))
run(m, x, ablate.all_but("0.1", "zero"))
run(m, x, ablate.all_but(["0.1", "1.1"], "mean", reference=y, positions=[0, 1]))
run(m, x, ablate.all_but("1.3", "resample", source=y, seed=4))
run(m, x, ablate.neurons(1, [3, 5, 7], "mean", reference=y, positions=[1, 4]))
run(m, x, ablate.neurons(0, 2, "resample", source=y, seed=2))
run(m, x, ablate.neurons(0, range(4), positions=[0]))
run(m, square, ablate.frequencies("resid_mid.0", [1], [0, 1], 5, grid=square))
run(m, square, ablate.frequencies("z", [2], [0, 1], 5, True, grid=square, directions="sum", heads="0.1"))
run(m, square[:5], ablate.frequencies("mlp_post.1", [1, 2], [1], 5, grid=square[:5], positions=[2]))
run(m, square, ablate.classes("z.1", square[:, 0], square, True, heads=["1.0", "1.2"], positions=[0, 2]))
run(m, x, edit("q", double, ["0.1"], [1, 2]), edit("mlp_post", double, neurons=[1, 2]))
run(m, x, edit("v.1", double, positions=mask), edit("scores.0", double, "0.3"))
run(m, x, patch.activations("scores.0", {"blocks.0.attn.hook_attn_scores": torch.full((8, 4, 6, 6), 2.0)}))
run(m, x, edit("resid_pre", double, positions=-1), cache=["z", "pattern.1", "resid_post.0"])
run(m, x, patch.activations("z", y, ["0.0", "1.3"], [1, 2], source_positions=[3, 4]))
run(m, x, patch.activations("mlp_post.0", y, neurons=[0, 4], positions=[-1]))
run(m, x, patch.activations("resid_mid", cache(m, y, "resid_mid"), positions=[0, 1]))
run(m, x, patch.activations("resid_post.0", y, positions=slice(2, None)))
run(m, x, patch.path("0.1", ("k", "1.2"), y, positions=[3], source_positions=[2]))
run(m, x, patch.path(["0.0", "0.2"], ["1.1", "output"], y, "mlps"))
run(m, x, patch.path("embed", "1.0", y, positions=mask))
run(m, x, patch.path("attn_out.0", "resid_post.1", y))
run(m, x, patch.path("mlp0", [("q", "1.1"), ("v", "1.3")], y, positions=[-1]))
run(m, x, transplant.weights(n, "mlp", [0]), transplant.weights(n, ["embed", "unembed"]))
run(m, x, transplant.weights(dict(n.named_parameters()), "v", 1))
run(m, x, transplant.weights(n, ["ln", "q", "pos_embed"]))
run(m, x, permute.positions([5, 4, 3, 2, 1, 0]), permute.positions(3))
run(m, x, permute.slices((2, 3), 1, 5))
run(m, x, permute.within((2, 3), 0, 6))
run(m, x, circuit.nodes(["0.1", "mlp1", "1.0"], m).keep(y, "mean"))
run(m, x, circuit.nodes(["0.1 @ 2", "mlp1"], m).cut(y))
run(m, x, circuit.edges(["0.1 -> 1.3.q", "embed -> 0.1.v", "mlp1 -> output"], m).keep(how="zero"))
run(m, x, circuit.edges(["0.1 -> 1.3.k @ 2", "mlp0 -> 1.1.v"], m).cut(y, "mean"))
run(m, x, (circuit.full(m) - circuit.edges("0.1 -> 1.3.q", m)).keep(y))
described(ablate.uniform("all", [0, 1], positions=[2, 3]))
described(ablate.mean_pattern("0.1", y, "edited"))
described(ablate.mean("mlp_out.0", y, "batch,pos", reference_positions=[0, 2], positions=[1]))
described(ablate.resample(["0.3", "1.1"], y, 5, positions=mask))
described(ablate.noise("0.2", 0.5, 7, positions=slice(1, 3)))
described(ablate.all_but(["0.1", "1.1"], "mean", reference=y))
described(ablate.neurons(1, [3, 5, 7], "resample", source=y, seed=2))
described(ablate.frequencies("z", [2], [0, 1], 5, True, grid=square, directions="sum", heads="0.1"))
described(ablate.classes("z.1", square[:, 0], square, True, heads=["1.0", "1.2"], positions=[0, 2]))
described(edit("q", double, ["0.1"], [1, 2]), patch.activations("z", cache(m, y, "z")))
described(patch.activations("z", cache(m, y, "z"), ["0.0", "1.3"], [1, 2], source_positions=[3, 4]))
described(patch.path("mlp0", [("q", "1.1"), ("v", "1.3")], y, "mlps", positions=[-1], source_positions=[2]))
described(transplant.weights(n, ["mlp", "q"], [0]))
described(permute.slices((2, 3), 1, 5), permute.within((2, 3), 0, 6), permute.positions(3))
described(circuit.nodes(["0.1 @ 2", "mlp1"], m).keep(y, "mean"))
list(map(str, heads("all", m))), heads([(0, 1), "1.2"], m), heads(Head(1, 1), m)
cache(m, x, ["embed", "q", "k.1", "v", "z", "mlp_pre", "resid_mid"])
cache(m, x, ["resid_pre.1", "scores", "mlp_out"])
sweep(m, x, ablate.each(ablate.zero, heads("all", m)), metric)
sweep(m, x, ablate.each(ablate.mean, ["0.1", "mlp_out.0"], reference=y), seed=3, draws=20, flips=50)
sweep(m, x, grid(ablate.zero, {"what": ["0.0", "1.1"], "positions": [0, -1]}), metric)
sweep(m, x, grid(ablate.uniform, {"heads": ["0.0", "1.1"], "positions": [0, 1]}), metric).pivot("heads", "positions")
sweep(m, x, {"one": ablate.zero("0.1"), "two": [ablate.zero("0.1"), permute.positions(1)]}, positions=[1, 2])
sweep(m, x, draws(lambda seed: ablate.resample("0.1", y, seed), 3, 2), metric)
sweep(m, x, {"draws": permute.draws(3, 1)}, {"difference": metric, "first": first}, engine="naive")
sweep(m, x, ablate.zero("0.1"), {"a": metric, "first": first}, batch_size=3).of_metric("first")
sweep(m, x, ablate.zero("mlp_out.0"), with_batch, batch=right, batch_size=5)
sweep(m, x, ablate.zero("all"), entries, positions=[0, -1])
sweep(m, x, {"layer": ablate.zero(0), "pair": (ablate.zero("0.1"), ablate.uniform("1.1"))}, metric)
sweep(m, x, transplant.weights(n, "q"), metric, draws=5)
sweep(m, t[:2], ablate.zero("0.1"), first)
SweepResult.concat([sweep(m, x, {name: ablate.zero(name)}, metric) for name in ("0.1", "1.1")])
SweepResult.concat({name: sweep(m, x, ablate.zero(name), metric) for name in ("0.1", "1.1")})
compare([(m(t), {"a": n(t)}), (m(u), {"a": n(u)})], first, columns={"a": {"layer": 1}}, seed=1, draws=9)
compare([(m(t), {"a": n(t), "b": m(u)})], draws=30, flips=7)
patch.attribution(m, x, y, metric)
patch.attribution(m, x, y, metric, "mlp_post", seed=1, draws=20, flips=30)
patch.attribution(m, x, y, entries, "resid_mid", batch_size=3)
patch.attribution(m, x, y, with_batch, batch=right)
patch.screen(m, x, y, metric)
patch.screen(m, x, y, metric, exact=2).top(3)
patch.screen(m, x, y, {"a": metric, "b": first}, "z", by="position", exact=4, rank="size", seed=2)
patch.screen(m, x, y, metric, ["z", "mlp_out"], method="gradient", exact="all", draws=20, flips=30)
patch.screen(m, x, y, metric, "mlp_post", by="neuron", steps=2, exact=3)
patch.screen(m, x, y, with_batch, batch=right, method="gradient", exact=1, batch_size=4)
patch.screen(m, x, y, metric, steps=0)
patch.screen(m, x, y, metric, ["pos_embed", "z"], by="position").ranking(by="estimate")
patch.edges(m, x, y, metric)
patch.edges(m, x, y, {"a": metric, "b": first}, exact=2, rank="size", seed=1, draws=20).top(5, "b")
patch.edges(m, x, y, metric, how="mean", method="gradient", exact=5, batch_size=40)
patch.edges(m, x, None, metric, how="zero", steps=2, exact=1)
patch.edges(m, x, y, metric, spans={"start": [0, 1], "end": [5]}, exact=3)
patch.edges(m, x, y, metric, method="gim", steps=0, exact=1).ranking()
patch.edges(m, x, y, entries, steps=0, exact=4)
circuit.evaluate(m, {"a": circuit.nodes(["embed", "0.1", "mlp1"], m)}, x, y, metric)
circuit.evaluate(m, circuit.edges(["0.1 -> output", "embed -> 0.1.v"], m), x, y, metric, random=5, subsets=2, seed=3)
circuit.evaluate(m, circuit.nodes("0.1", m), x, y, first, how="mean", minimality=False, draws=30, flips=40)
circuit.evaluate(m, circuit.nodes(["0.1", "1.1"], m), x, None, with_batch, batch=right, how="zero", random=0)
circuit.evaluate(m, {"a": circuit.nodes("embed; 0.1"), "b": circuit.full(m, "nodes")}, x, y, metric, random=9)
circuit.curve(m, patch.screen(m, x, y, metric), x, y, metric)
circuit.curve(m, {"a": ["embed", "mlp1"], "b": ["embed", "0.0"]}, x, y, metric, sizes=[0, 2, 0.5, 1.], seed=1, draws=20)
circuit.curve(m, ["0.1 -> output", "0.1 -> 1.2.q"], x, y, first, how="mean", sizes=1, batch_size=4)
circuit.smallest(m, patch.screen(m, x, y, metric, exact=1), x, y, metric, 0.5)
circuit.smallest(m, ["0.1", "mlp1", "1.0", "mlp0"], x, y, metric, 0.2, how="mean", batch_size=4)
circuit.full(m).sha256, list(circuit.full(m, "nodes"))
circuit.nodes([]), (patch.screen(m, x, y, metric).top(3) | circuit.nodes(["0.0 @ 2,3"])).frame
circuit.edges(["0.1 -> 1.3.q @ 2", "embed -> mlp0"], m).frame, circuit.nodes("0.1 @ 1,3").frame
circuit.edges(["0.1 -> 1.3.q", "embed -> mlp0"], m) & circuit.edges("embed -> mlp0", m)
circuit.edges("0.1 -> 1.3.q", m) | circuit.edges("embed -> mlp0", m), ~circuit.nodes("0.1", m)
written(circuit.edges(["0.1 -> 1.3.q @ 2", "embed -> mlp0"], m))
lens(m, x)
lens(m, x, positions=[-1, 2], batch_size=3).readouts
lens(m, x, ablate.zero("0.1")).contributions
lens(m, x).without("0.1"), lens(m, x).constant
lens(m, x, metric={"my": metric})
lens(m, x, metric=with_batch, batch=right, batch_size=3).layers
lens(m, x, ablate.zero("0.1"), metric=with_batch, batch=right, positions=[-1]).frame
patterns.attention(m, x)
patterns.attention(m, x, positions=[1, 2], batch_size=3).of((0, 1))
patterns.attention(m, patterns.record(m, x, batch_size=3), positions=mask)
patterns.scores(m, x, {"previous": patterns.previous(6), "own": patterns.identity(6)})
patterns.scores(m, x, {"far": patterns.previous(6, 2), "first": patterns.constant(6, [0])}, seed=1, batch_size=3)
patterns.scores(m, x, {"row": patterns.row(2, 3), "column": patterns.column(2, 3, False)}, positions=[-1, 3])
patterns.scores(m, x, {"same": patterns.duplicate(t), "induction": patterns.induction(t)}, draws=9)
patterns.scores(m, x, {"mask": patterns.marked(mask)})
patterns.scores(m, x, {"given": lambda rows: mask[rows][:, None].expand(-1, 6, -1)}, batch=right)
patterns.classify(patterns.scores(m, x, {"previous": patterns.previous(6), "own": patterns.identity(6)}), 0.1)
patterns.classify(scores, 0.05, unless={"own": "previous"}, among={"own": ["0.0", "0.1"]})
patterns.movement(m, x, y)
patterns.movement(m, x, y, positions=[2, 3], seed=1, draws=9, batch_size=3).static(0.3)
patterns.follow(m, x, y, torch.arange(6) % 2, 0 * right, 0 * right + 1)
patterns.follow(m, x, y, torch.arange(6) % 3, 0 * right, right % 2 + 1, positions=[-1], seed=2, draws=9).heads(0.01)
probe.linear(m, x, t[:, 0].double())
probe.linear(m, x, {"sum": t.sum(1) / 3, "pair": t[:, None, :2].double()}, ["q", "mlp_out"], test=0.5, intercept=True)
probe.linear(m, x, t[:, 0] % 2, "z", kind="classification", heads=["0.1", "1.2"], positions=[-1], ridge=0.1)
probe.linear(m, x, {"a": t[:, 0] % 2, "b": t[:, 1].double()}, kind={"a": "classification"}, untrained=n, batch_size=3)
probe.linear(m, x, t.double(), test=right > 5), probe.linear(m, x, t.double(), test=[1, 3])
probe.linear(m, x, t.double(), positions=[1, 2], splits={"even": t % 2 == 0}, seed=4, draws=20, test=slice(0, 3))
check(m)
logit_difference(right, wrong)(m(t)), logit_difference(3, [4, 5], position=2)
logit_difference([1, 2], 3, [-1, 0])(m(t[:2])), logit_difference(right, wrong)(m(t), x, m)
prompts(m, t), prompts(m, [[1, 2, 3], [4]]), prompts(m, [[1, 2, 3], [4]], "left").real
prompts(m, [[1, 2]]).last(m(t[:1, :2]))
prompts(m, {"input_ids": t[:2], "attention_mask": [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]}, "left")
unchecked(m) is m
in_a_splice(m, x, ablate.features("resid_post.0", [1, 2]))
in_a_splice(m, x, ablate.features("resid_post.0", 3, "mean", reference=y), edit("error.resid_post.0", double))
in_a_splice(m, x, edit("features.resid_post.0", double, positions=[1], features=[4]))
"""
#: With a tokenizer.
WORDS = """
prompts(m, TEXTS), prompts(m, TEXTS, "left"), prompts(m, TEXTS).tokens, prompts(m, TEXTS).words
prompts(m, ["w3 w4", [5, 6, 7]])
prompts(m, TEXTS[0]), prompts(m, m.tokenizer(TEXTS, padding=True), "left").real
run(m, TEXTS, ablate.zero("0.1", positions=[-1])), run(m, TEXTS[1], patch.activations("z", "w3 w1 w2"))
sweep(m, TEXTS, ablate.uniform("all"), logit_difference([" w1", " w2", " w3"], [" w4", [" w5", " w6"], 7]))
sweep(m, TEXTS, ablate.uniform("all"), logit_difference(" w1", " w2", position=0)).plot()
patterns.attention(m, TEXTS[0]), patterns.attention(m, TEXTS[0]).plot()
patterns.attention(m, TEXTS).labels, patterns.scores(m, TEXTS, {"induction": patterns.induction})
lens(m, TEXTS, metric=logit_difference(" w1", " w2")), patch.attribution(m, TEXTS[1:2], ["w1 w2 w3"])
logit_difference(" w1", " w2")(run(m, TEXTS), prompts(m, TEXTS), m)
logit_difference(" w1 w2", " w2")(run(m, TEXTS), prompts(m, TEXTS), m)
logit_difference(" w1", " w1")(run(m, TEXTS), prompts(m, TEXTS), m)
read_prompts(m, rows_file()), read_prompts(m, rows_file(clean="w8 w2", corrupted="w8 w6"), "left")
read_prompts(m, rows_file(name="rows.csv")), read_prompts(m, rows_file(name="rows.csv"))[[0, 1]].metric
read_prompts(m, rows_file(corrupted=None))
read_prompts(m, rows_file())[1:]
read_prompts(m, rows_file(answer=""))
read_prompts(m, rows_file(answer=" w1 w2"))
read_prompts(m, rows_file(answer=" w3", wrong=" w3"))
read_prompts(m, rows_file(wrong=[6]))
read_prompts(m, rows_file(clean=None))
read_prompts(m, rows_file(corrupted="w1 w2"))
read_prompts(m, "nowhere.csv")
"""
#: Pictures, of one model.
PLOTS = """
sweep(m, x, ablate.each(ablate.zero, heads("all", m)), metric).plot()
sweep(m, x, grid(ablate.zero, {"what": ["0.0", "1.1"], "positions": [0, 1]}), metric).plot()
sweep(m, x, {"one": ablate.zero("0.1"), "two": ablate.zero("0.2")}).plot("kl")
patch.attribution(m, x, y).plot()
patch.screen(m, x, y, metric).plot()
patch.edges(m, x, y, metric, exact=1).plot()
circuit.curve(m, ["embed", "mlp1"], x, y, metric).plot()
circuit.edges(["0.1 -> 1.3.q", "embed -> 0.1.v", "1.3 -> output"], m).plot()
lens(m, x, metric=metric).plot()
circuit.evaluate(m, circuit.nodes("embed; 0.1; mlp1"), x, y, {"a": first, "b": metric}, random=2).plot("b")
patterns.attention(m, x).plot(), patterns.attention(m, x).plot(title="maps", labels=list("abcdef"))
patterns.scores(m, x, {"own": patterns.identity(6)}).plot("bits")
patterns.classify(scores, 0.1).plot()
SweepResult.concat({name: sweep(one, x, ablate.zero("0.1"), metric) for name, one in (("m", m), ("n", n))}).plot()
sweep(m, x, {"places": permute.draws(3), "zero": ablate.zero("0.1")}, {"a": metric, "b": first}).plot("b")
plots.curve(circuit.curve(m, ["embed", "0.1"], x, y, metric).frame, "size", "faithfulness", by="metric", log_y=True)
plots.heads(sweep(m, x, ablate.each(ablate.zero, heads("all", m)), metric).frame), patterns.classify(scores).plot()
plots.heads(patterns.movement(m, x, y), column="distance", unit="distance")
plots.heads(patch.screen(m, x, y, metric, exact=0))
"""
#: What needs no model.
PLAIN = """
fourier.spectrum(waves)
fourier.spectrum(waves, (5, 5)), fourier.spectrum(waves, (5, 5)).plot(), fourier.spectrum(waves).plot()
fourier.spectrum(waves.T, {"a": 5, "b": 5}, 1).bands(), fourier.spectrum(waves).bands().total()
fourier.key_frequencies(fourier.spectrum(waves)), fourier.key_frequencies(fourier.spectrum(waves), "of-largest", 0.8)
fourier.key_frequencies(fourier.spectrum(waves), "preferred", 0.2)
fourier.clusters(fourier.spectrum(waves), 0.2), fourier.clusters(fourier.spectrum(waves), 1)
fourier.clusters(fourier.spectrum(waves))
fourier.spectrum(waves).plot([1, 2], title="waves"), fourier.spectrum(waves).bands().plot(2)
fourier.gini([1, 2, 5, 0]), fourier.gini(waves[:, 0].abs())
fourier.basis(5), fourier.basis(6), fourier.frequencies(6)
fourier.transform(waves), fourier.transform(waves, 1), fourier.transform(waves.reshape(5, 5, -1), (0, 1))
fourier.Grid({"a": 5, "b": 5}), fourier.Grid.of_inputs(square, {"a": 0, "b": 1}, values=5).arrange(waves)
fourier.Grid.of_inputs(square.flip(0), {"a": 1, "b": 0}, values=5), fourier.Grid({"a": 5, "b": 5}).coordinates()
fourier.components(fourier.Grid({"a": 5, "b": 5}), [1, 2])
fourier.ModularSum(square[:, :2], (1, 1), 5), fourier.ModularSum(square[:, :2], (1, 3), 5).waves(2)
fourier.ModularSum(square[:, :2], (1, 1), 5).directions([1, 2])
fourier.ModularSum(square[:, :2], (1, 1), 5).block(1)
fourier.ModularSum(square[:, :2], (1, 1), 5).restricted(waves[:, :5], [1])
fourier.ModularSum(square[:, :2], (2, 1), 5).excluded(waves[:, :5], [1, 2])
fourier.ModularSum(square[:, :2], (1, 1), 5).cosines(waves[:, :5])
fourier.ModularSum(square[:, :2], (1, 1), 5).cosines(waves[:, :5]).fitted([1])
fourier.ModularSum(square[:, :2], (1, 1), 5).cosines(waves[:, :5]).explained([2])
fourier.share(waves, waves[:, :2]), fourier.regression(waves, waves[:, :3])
fourier.variance_explained(waves, waves[:, :2] ** 2)
variance.partition(waves, {"a": square[:, 0], "b": square[:, 1]})
variance.partition(waves[:10], {"a": square[:10, 0] % 2, "b": square[:10, 1], "c": torch.arange(10) // 3})
variance.explained(waves, square[:, 0]), variance.total(waves, square[:, 1]), variance.adjusted(0.5, 25, 4)
patterns.bits(0.5, 0.25), patterns.row(2, 3, False), patterns.column(2, 3), patterns.constant(4, [-1, 1])
plots.heads(waves[:4, :3].numpy(), title="a map", unit="logits")
plots.curve({"a": [1, 2, 3]}, log_x=True, y_title="loss")
plots.attention(waves[:4, :4].softmax(-1), list("abcd"), title="attention"), plots.spectrum(waves, [1])
plots.curve({"seeds": ([0, 1, 2], [[1, 2, 4], [3, 5, 1], [2, 2, 2]])}), plots.curve({"bare": [1, 3]})
plots.titled(plots.curve({"a": [1, 2, 3]}), "title", "subtitle")
plots.untitled(plots.curve({"a": [1, 2]}, title="none"))
"""


def double(x: Any) -> Any:
    return 2 * x


def first(output: Any) -> Any:
    return output[:, 0, 2].square()


def with_batch(output: Any, batch: Any) -> Any:
    return output[torch.arange(len(output)), -1, batch % 11]


def entries(output: Any) -> Any:
    return output[..., 1].nan_to_num().sum(1), torch.full((len(output),), 6.0)


def described(*given: Any) -> list[Any]:
    return [one.describe() for one in given] + [repr(one)[:500] for one in given]


def in_a_splice(model: Any, *given: Any) -> Any:
    code = torch.randn(16, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with circuits.splice(model, {"resid_post.0": (lambda x: (x @ code).relu(), lambda f: f @ code.T / 9)}):
        return circuits.run(model, *given, cache=["features.resid_post.0"])


TEXTS = ["w3 w4 w5 w6 w3 w7", "w8 w9 w5", "w3 w1 w9 w5"]


def rows_file(name: str = "rows.jsonl", **changes: Any) -> Path:
    """Writes two rows of prompts, the second with changes: None leaves a column out of both."""
    row = {"clean": "w4 w9 w7", "corrupted": "w5 w9 w7", "answer": " w1", "wrong": " w2", "kind": "a"}
    absent = [column for column, value in changes.items() if value is None]
    rows = [{key: value for key, value in one.items() if key not in absent} for one in (row, row | changes)]
    file = Path(tempfile.mkdtemp()) / name
    frame = pd.DataFrame(rows)
    frame.to_csv(file, index=False) if name.endswith("csv") else frame.to_json(
        file, orient="records", lines=True
    )
    return file


def written(made: Any) -> str:
    file = Path(tempfile.mkdtemp()) / "circuit.json"
    made.write(file)
    assert circuits.circuit.read(file) == made
    return file.read_text(encoding="utf-8")


def known_names() -> dict[str, Any]:
    return globals() | {name: getattr(circuits, name) for name in circuits.__all__}


def names(m: Any, n: Any, padded: bool) -> dict[str, Any]:
    """Returns what the calls name."""
    draw = torch.Generator().manual_seed(4)
    t, u = (torch.randint(11, (8, 6), generator=draw) for _ in range(2))
    right, wrong = torch.arange(8), (torch.arange(8) + 3) % 11
    lengths = [6, 4, 6, 5, 6, 6, 3, 6]
    x, y = (circuits.prompts(m, [row[:end] for row, end in zip(one, lengths, strict=True)]) for one in (t, u))
    known = known_names()
    known |= {"m": m, "n": n, "t": t, "u": u, "x": x if padded else t, "y": y if padded else u}
    known |= {"right": right, "wrong": wrong, "mask": torch.rand(8, 6, generator=draw) < 0.6}
    known |= {"metric": circuits.logit_difference(right, wrong), "square": square()}
    templates = {"previous": circuits.patterns.previous(6), "own": circuits.patterns.identity(6)}
    return known | {"templates": templates, "scores": circuits.patterns.scores(m, known["x"], templates)}


def square() -> torch.Tensor:
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    return torch.cat([pairs, torch.full((25, 1), 10)], 1)


#: By name, the class and the settings of a model, and whether its prompts have different lengths.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": (HOOKED, {}, False),
    "native": (BRIDGE, {"attention_dir": "causal"}, False),
    "padded": (HOOKED, {}, True),
    "words": (HOOKED, {"n_ctx": 9, "d_vocab": 50}, False),
}


TABLES = {"plain": CALLS + PLOTS, "native": CALLS, "padded": CALLS, "words": WORDS}
CASES = [(name, call) for name, calls in TABLES.items() for call in lines(calls)]


@functools.cache
def of_models(name: str) -> dict[str, Any]:
    family, settings, padded = MODELS[name]
    if name == "words":
        model = build(family=family, **settings)
        folder = tempfile.mkdtemp()
        families.tokenizer().save_pretrained(folder)
        model.set_tokenizer(transformers.AutoTokenizer.from_pretrained(folder))
        return {**known_names(), "m": model}
    return names(*(build(seed, family=family, **settings) for seed in (0, 1)), padded)


@pytest.mark.parametrize(("name", "call"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_a_call_gives_what_it_gave(name, call, request):
    check(name, call, of_models(name), request.config.getoption("keep"))


@pytest.mark.parametrize(
    "call", [call for call in lines(CALLS) if "batch_size=" in call], ids=map(str, range(99))
)
@pytest.mark.filterwarnings("ignore")
def test_parts_of_the_examples_give_what_all_give_at_once(call):
    apart, at_once = (told(one, of_models("plain")) for one in (call, re.sub(r",? batch_size=\d+", "", call)))
    found = differences(apart, at_once, "")
    assert [one for one in found if "settings" not in one] == []


@pytest.mark.parametrize("call", lines(PLAIN), ids=map(str, range(99)))
def test_a_call_without_a_model_gives_what_it_gave(call, request):
    known = known_names() | {"square": square(), "waves": waves()}
    check("no model", call, known, request.config.getoption("keep"))


def waves() -> torch.Tensor:
    angles = square()[:, :1] * torch.arange(1, 8) + square()[:, 1:2]
    return (angles.double() * 2 * math.pi / 5).cos() + 0.1 * (angles**2 + torch.arange(7.0)).double().sin()
