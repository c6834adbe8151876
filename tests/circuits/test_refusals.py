"""What users get wrong is refused by a CircuitsError of one line, which says what is wrong and what would be right."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

import circuits
from circuits import ablate, circuit, intervene, lens, patch, patterns, run, sweep
from tests.circuits import kept
from tests.circuits.conftest import BRIDGE, HOOKED, build  # noqa: F401 (calls name them)

pytestmark = pytest.mark.usefixtures("untyped", "hooked_only")

tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0))
other = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(1))
hidden = tokens > 4
uneven = [[1, 2, 3], [4, 5]]
zero = {"0.1": ablate.zero("0.1")}
RESULT, HOOK_Z = "blocks.0.attn.hook_result", "blocks.0.attn.hook_z"
chain = circuit.edges(["0.1 -> 1.3.q"])
digits = torch.cartesian_prod(torch.arange(5), torch.arange(5))
square = torch.cat([digits, torch.full((25, 1), 10)], 1)  # all inputs of a + b mod 5
table = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "value": [0.5, 0.2]})


def double(x: Any) -> Any:
    return 2 * x


def logit(output: Any) -> Any:
    return output[:, -1, 3]


def accuracy(output: Any) -> Any:
    return (output[:, -1].argmax(-1) == 3).float()


def of_answers(output: Any) -> Any:
    return output[torch.arange(8), -1, tokens[:, 0]]


def in_numpy(output: Any) -> Any:
    return torch.as_tensor(output[:, -1, 3].numpy())


def suppressed(model: Any) -> None:
    model.unembed.b_U.data[4] = -torch.inf
    sweep(model, tokens, zero, metric=circuits.logit_difference(3, 4))


def under_autocast(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lens(model, tokens)


def whole_numbers(model: Any) -> None:
    model.unembed.register_forward_hook(lambda module, inputs, output: output.long())
    sweep(model, tokens, zero)


def without_a_run(model: Any) -> None:
    with intervene(model, ablate.zero("0.1")):
        pass


def hooked_stream(model: Any) -> None:
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x + 1)
    lens(model, tokens)


def calling_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, inputs, output: model.forward(other))
    circuits.cache(model, tokens, "z.0")


def hook_before_a_receiver(model: Any) -> None:
    split = build(family=HOOKED, use_split_qkv_input=True)
    split.add_hook("blocks.1.hook_q_input", lambda x, hook: x.tanh())
    run(split, tokens, patch.path("0.1", ("q", "1.0"), other))


def circuit_in_a_block(model: Any) -> None:
    with intervene(model, ablate.zero("0.1")):
        model(tokens)
        circuit.evaluate(model, chain, tokens, other, logit)


def follow(model: Any, **changes: Any) -> Any:
    usual = {"groups": torch.arange(6) % 2, "before": 0 * tokens[:, 0], "after": 0 * tokens[:, 0] + 1}
    return patterns.follow(model, tokens, other, **(usual | changes))


def grouped() -> Any:
    return build(family=HOOKED, n_key_value_heads=2)


def rotary() -> Any:
    return build(family=HOOKED, positional_embedding_type="rotary", rotary_dim=4)


def experts() -> Any:
    return build(family=HOOKED, num_experts=2, experts_per_token=1, gated_mlp=True)


def run_with(model: Any, splices: Any) -> Any:
    with circuits.splice(model, splices):
        return run(model, tokens)


def twice_spliced(model: Any) -> None:
    with circuits.splice(model, {"resid_post.0": SAE}):
        run_with(model, {"resid_post.0": SAE})


def path_in_a_splice(model: Any) -> None:
    with circuits.splice(model, {"resid_post.0": SAE}):
        run(model, tokens, patch.path("0.1", "1.0", other))


def path_in_a_path(model: Any) -> None:
    with intervene(model, patch.path("0.1", "1.0", other)):
        run(model, tokens, patch.path("0.0", "1.1", other))


def without_blocks(model: Any) -> Any:
    del model.blocks
    return model


SAE = (lambda x: x[..., :12], lambda f: torch.nn.functional.pad(f, (0, 4)))

#: One call a line; m is a model. What each says is kept, whole.
REFUSALS = """
# Models.
run("gpt2-small", tokens)
run(torch.nn.Linear(2, 2), tokens)
run(build(family=HOOKED, gated_mlp=True, act_fn="solu_ln"), tokens)
run(build(family=HOOKED, clip_qkv=1.0), tokens)
run(build(family=HOOKED, use_attention_sinks=True), tokens)
run(experts(), tokens)
run(m.to("meta"), tokens)
# Heads, sites and positions.
heads("head 3", m)
heads("2.0", m)
heads([], m)
run(grouped(), tokens, edit("v", double, heads="0.1"))
edit("attn_out.0", double, heads="0.1")
edit("resid_middle", double)
run(m, tokens, edit("z.2", double))
run(build(attn_only=True), tokens, edit("mlp_out", double))
ablate.zero("0.1", queries=1)
ablate.zero("0.1", positions=1.5)
run(m, tokens, ablate.zero("0.1", positions=9))
ablate.zero("0.1", positions=hidden[0].int())
run(m, tokens[:4], ablate.uniform("all", positions=hidden))
ablate.zero("0.1", positions=slice(0, 4, 2))
sweep(m, uneven, {"a": ablate.zero("0.1", positions=slice(3, None))}, metric=logit)
patterns.attention(m, tokens, positions=slice(20, None))
Site("z", layer=True)
run(build(positional_embedding_type="alibi", family=HOOKED), tokens, permute.positions(3))
# Inputs.
run(m, "some text")
run(m, tokens / 1)
run(m, tokens + 1)
run(m, torch.cat([tokens, other], 1))
run(m, tokens[0])
run(m, [[1, 2], []])
prompts(m, {"input_ids": tokens[:1], "attention_mask": [[1, 0, 1, 1, 1, 1]]})
run(m, {"input_ids": tokens, "position_ids": tokens})
run(build(family=HOOKED, attention_dir="bidirectional"), [[1, 2], [3]])
# Interventions.
run(m, tokens, [ablate.zero("0.1")])
edit("z", 2)
run(m, tokens, edit("z.0", lambda z: z.sum(-1)))
run(m, tokens, edit(RESULT, double))
without_a_run(m)
run(m, tokens, ablate.uniform("all", keys=[2, 3]))
ablate.neurons(0, 3, how="mean")
run(m, tokens, ablate.neurons(0, 24))
ablate.all_but("all", "zero")
run(m, tokens[:1], ablate.resample("0.1", source=tokens[:1]))
run(m, tokens, ablate.mean("0.1", reference=tokens[:, :5]))
run(m, tokens, patch.activations("z", other[:3]))
patch.activations("z", cache(m, other, "z.1"), heads="0.1")
run(m, tokens, patch.path("1.0", "0.1", other))
run(grouped(), tokens, patch.path("0.1", "1.2", other))
patch.path("pattern", "1.0", other)
run(m, tokens, patch.path("0.1", "1.0", other), patch.path("0.1", ("k", "1.0"), other))
hook_before_a_receiver(m)
ablate.frequencies("z", [3], [0, 1], 5, grid=square)
ablate.frequencies("z", [1], [0, 1], 5, grid=square[1:])
ablate.classes("z", [0, 1], square[[0, 0]])
ablate.classes("z", [0, 1], prompts(m, [[1, 2, 3], [4]]))
permute.positions([1, 2, 3])
transplant.weights(m, "attention")
run(m, tokens, transplant.weights(build(family=HOOKED, n_layers=1), "q"))
run(m, tokens, transplant.weights(build(family=HOOKED, d_mlp=32), "mlp"))
patch.activations("z.0", {HOOK_Z: cache(m, other, "z.0")[HOOK_Z].tolist()})
# Circuits.
run(m, tokens, circuit.edges(["0.9 -> 1.3.q"]).keep(other))
circuit.edges(["0.1 -> mlp2"], m)
circuit.full(m) - circuit.edges(["0.1 -> 1.k0.v"])
circuit.edges(["0.1 -> mlp0"], build(attn_only=True))
circuit.edges(["pos_embed -> mlp0"], rotary())
run(m, tokens, circuit.edges(["0.0 -> 1.0.q @ 6"]).keep(other))
run(m, tokens, chain)
sweep(m, tokens, {"it": [chain.keep(other), chain]})
chain.keep()
chain.keep(other, how="zero")
chain.keep(other, how="noise")
chain.keep({"blocks.0.hook_resid_pre": other / 1})
circuit.evaluate(m, {}, tokens, other, logit)
circuit.evaluate(m, {"a": ["0.1"]}, tokens, other, logit)
circuit.evaluate(m, {1: chain, "1": chain}, tokens, other, logit)
circuit.evaluate(m, chain, tokens, other, logit, random=-1)
circuit.evaluate(m, chain, tokens, tokens[:3], logit)
circuit_in_a_block(m)
circuit.curve(m, {}, tokens, other, logit)
circuit.curve(m, {"a": chain}, tokens, other, logit)
circuit.curve(m, ["0.1 -> output", "0.1"], tokens, other, logit)
circuit.curve(m, ["0.1", "0.1"], tokens, other, logit)
circuit.curve(m, ["0.1"], tokens, other, logit, sizes=[1.5])
circuit.smallest(m, ["0.1"], tokens, other, logit, 90)
circuit.smallest(m, ["0.1"], tokens, other, logit, "0.9")
# Sweeps.
sweep(m, tokens, [ablate.zero("0.1")])
sweep(m, tokens, {"9.9": ablate.zero("9.9")})
sweep(m, tokens, zero, metric="accuracy")
sweep(m, tokens, zero, metric=lambda x: logit(x).mean())
sweep(m, tokens, zero, metric=logit, positions=[0])
sweep(m, tokens, zero, metric=of_answers, batch_size=1)
sweep(m, tokens, zero, metric=lambda x, y: x, batch=other[:4])
whole_numbers(m)
sweep(m, tokens, zero, batch_size=0)
sweep(m, tokens, zero).plot("loss")
logit_difference(1, 0, position=6)(m(tokens))
logit_difference(3, 3)
compare([(m(tokens), {"a": m(tokens)[:4]})])
run(build(attn_only=True), tokens, ablate.zero(0))
grid(ablate.uniform, {"heads": []})
ablate.each(ablate.uniform, "all")
draws(lambda seed: seed, 3)
draws(ablate.uniform("0.1"), 3)
ablate.each("zero", ["0.1"])
sweep(m, tokens, zero, lambda x: (torch.ones(8), torch.arange(8) > 1))
# Other verbs.
patch.attribution(m, tokens, other[:, :5], metric=logit)
patch.attribution(m, tokens, other, metric=accuracy)
patch.attribution(m, tokens, other, metric=in_numpy)
patch.attribution(m, tokens, other, logit, draws=0)
suppressed(m)
under_autocast(m)
patch.edges(m, tokens, other, metric=logit, steps=-1)
patch.screen(m, tokens, other, metric=logit, sites="z", by="neuron")
patch.edges(m, tokens, other, logit, method="grad")
patch.edges(m, tokens, other, logit, exact="verified")
patch.edges(m, tokens, other, lambda x: (0 * logit(x)).sqrt())
patch.edges(m, tokens, other, spans={"a": [5], "b": [-1]})
patch.edges(m, tokens, other, spans={})
patch.edges(m, tokens, other, spans={"noun": None})
patch.edges(m, tokens, other, spans={1: 0, "1": 1})
sweep(m, tokens, ablate.zero("0.1"), lambda x, y: x)
patch.edges(m, uneven, uneven, logit, spans={"noun": [1, 2]})
check(m, "x")
run(m, tokens, edit("z.0", lambda z: m(tokens) and z))
calling_hook(m)
calling_hook(build(family=BRIDGE))
lens(m, tokens, batch=[1])
lens(m, tokens, positions=hidden)
hooked_stream(m)
fourier.spectrum([1.0, 2.0, float("nan")])
fourier.spectrum(torch.randn(4, 3), axis=2)
fourier.spectrum(torch.randn(24, 3), (5, 5))
fourier.key_frequencies(fourier.spectrum(torch.randn(9)), number=-1)
fourier.Grid({"row": 0})
fourier.Grid.of_inputs(square[1:], {1: 0, 2: 1}, values=5)
fourier.components(fourier.Grid({"a": 4, "b": 5}), [1])
fourier.key_frequencies(fourier.spectrum(torch.randn(9)), "largest")
fourier.clusters(fourier.spectrum(torch.randn(9, 2)), 85)
fourier.ModularSum(digits, (1,), 5)
fourier.ModularSum(digits + 0.3, (1, 1), 5)
fourier.ModularSum(digits, (1, 1), 5).cosines(torch.randn(25, 4))
patterns.scores(m, tokens, {})
patterns.scores(m, tokens, {"a": lambda rows: rows})
patterns.scores(m, tokens, {"a": hidden}, positions=hidden[:3])
follow(m, groups=digits[:5, 0])
follow(m, after=0 * tokens[:, 0])
follow(m, after=0 * tokens[:, 0] + 3)
patterns.scores(m, tokens, {"own": "identity"})
patterns.attention(m, tokens).of((2, 0))
probe.linear(m, tokens, torch.ones(8, 3))
probe.linear(m, tokens, tokens / 1, test=8)
probe.linear(m, tokens, tokens[:, 0] / 0)
probe.linear(m, tokens, tokens[:, 0] / 1, kind="classification")
probe.linear(m, tokens, tokens[:, 0] / 1, ridge=float("inf"))
variance.partition(torch.randn(25, 4), {})
plots.heads(table, column="effect")
plots.curve({})
plots.save(3, "scores.html")
ablate.mean("0.1", other, reference_positions=[0])
ablate.mean("0.1", other, "batch,pos", reference_positions=hidden)
ablate.mean("pattern.0", other, "batch,pos")
run(m, tokens, ablate.mean("0.1", prompts(m, [[1, 2, 3], [4]]), "batch,pos", reference_positions=[2]))
run(m, prompts(m, [[1, 2, 3], [4]]), ablate.mean("0.1", other[:, :2]))
ablate.mean("0.1", other, "examples")
ablate.all_but("0.k1", "zero")
ablate.neurons("0", 3)
ablate.neurons(0, None)
ablate.neurons(0, 3, reference=other)
ablate.features("resid_post.0", None)
ablate.frequencies("z", [1], [0, 1], 1, grid=square)
ablate.frequencies("z", [1], None, 5, grid=square)
ablate.frequencies("z", [1], hidden, 5, grid=square)
ablate.frequencies("z", [1], [0, 9], 5, grid=square)
ablate.frequencies("z", [1], [0, 1], 5, grid=square, directions="some")
run(m, tokens, ablate.frequencies("resid_post.0", [1], [0, 1], 5, grid=square))
run(m, prompts(m, [[1, 2, 10], [4]]), ablate.frequencies("resid_post.0", [1], [0, 1], 5, grid=square))
ablate.classes("z", [0.5, 1], square[:2])
ablate.uniform("all", keys=hidden)
ablate.zero(True)
ablate.zero({})
ablate.noise("0.1", -1.0)
ablate.noise("0.1", float("nan"))
ablate.resample("0.1", other, seed=-1)
run(m, tokens, edit("z.0", double, heads="1.0"))
edit("resid_post", double, neurons=[1])
edit("z", double, features=[1])
run(m, tokens, edit("mlp_post.0", double, neurons=[-1]))
run(m, tokens, edit("blocks.0.hook_resid_middle", double))
run(m, tokens, edit("hook_z", double))
run(m, tokens, ablate.zero("0.k1"))
heads(0.5, m)
heads("0.9", m)
heads("3-1", m)
Site(3)
Site("blocks.0.attn.hook_z", 1)
Site("embed", 0)
Site("z", -1)
cache(m, tokens, None)
cache(m, tokens, RESULT)
grid(ablate.uniform, {})
draws(lambda seed: ablate.zero("0.1"), 0)
draws(lambda seed: ablate.zero("0.1"), 2, seed="a")
permute.within(4, 0)
permute.within((2, 3), 2)
permute.slices((2, 0), 0)
patch.activations("z", other, "0.1", [1, 2], source_positions=[1])
patch.activations("z", other, "0.1", hidden, source_positions=[1])
patch.activations("pattern.0", other, "0.1", [1], source_positions=[2])
patch.activations("scores.0", {"blocks.0.attn.hook_attn_scores": cache(m, tokens, "pattern.0")["pattern.0"]})
run(m, tokens, patch.activations("z", other, positions=[1, -5], source_positions=[2, 3]))
patch.path("0.1", [], other)
patch.path(0, "1.0", other)
patch.path("0.1", "resid_post", other)
patch.path("0.1", "z.1", other)
patch.path("0.1", "1.0", other, "heads")
run(m, tokens, patch.path("0.0", "1.0", other), patch.path("0.1", "1.1", other, "mlps"))
run(m, tokens, patch.path("0.1", "1.0", other, positions=[1]), patch.path("0.1", "1.0", other, positions=[-2]))
patch.attribution(m, tokens, other, lambda x: {"a": logit(x), 1: logit(x), "1": logit(x)})
patch.attribution(m, tokens, other, lambda x: {})
patch.attribution(m, tokens, other, logit, "embedding")
patch.attribution(m, tokens, other, logit, "result.0")
patch.attribution(m, tokens, other, logit, seed=True)
patch.screen(m, tokens, other, lambda x: {"a": logit(x), "b": logit(x)}).top(2)
patch.screen(m, tokens, other, logit).top(-1)
patch.screen(m, tokens, other, logit, exact=1).top(9, by="effect")
patch.screen(m, tokens, other, logit, exact=0).plot()
patch.screen(m, tokens, other, logit).top(2, by="size")
patch.screen(m, tokens, other, logit).top(2, "c")
patch.screen(m, tokens, other, logit, "mlp_post", by="neuron", exact=1).ranking()
patch.screen(m, tokens, other, logit, by="head")
patch.screen(m, tokens, other, logit, rank="largest")
patch.edges(m, tokens, None, logit)
patch.edges(m, tokens, other, logit, how="zero")
patch.edges(m, tokens, other, spans=[1])
transplant.weights(m, [])
transplant.weights(3, "q")
transplant.weights(m, "q", 5)
transplant.weights(m, "q", [])
circuit.edges(3)
circuit.nodes(["0.1 @"], m)
circuit.nodes(["output"], m)
circuit.edges(["0.1 -> 0.1.q"], m)
circuit.edges(["0.1 -> 1.2"], m)
circuit.edges(["0.1"])
circuit.edges(["output -> 1.3.q"])
circuit.edges(["0.1 -> embed"])
circuit.edges(["0.k1 -> output"])
circuit.full(m) - circuit.full(build(family=HOOKED, n_layers=3))
circuit.edges("0.1 -> 1.3.q") <= 3
SweepResult.concat(sweep(m, tokens, zero))
circuit.edges("0.1 -> 1.3.q", m) | circuit.nodes("0.1", m)
circuit.edges("0.1 -> 1.3.q", m) | 3
~circuit.nodes("0.1")
circuit.full(m, "paths")
circuit.evaluate(m, chain, tokens, other, logit, subsets=-1)
circuit.read("nowhere.json")
SweepResult.concat([sweep(m, tokens, zero), sweep(m, tokens, zero)])
chain.write("nowhere/circuit.json")
SweepResult.concat([sweep(m, tokens, zero), sweep(m, tokens, {"b": ablate.zero("0.2")}, seed=1)])
SweepResult.concat([sweep(m, tokens, zero), sweep(m, other, {"b": ablate.zero("0.2")})])
sweep(m, tokens, zero).pivot("layer", "head")
sweep(m, tokens, zero, logit).pivot("layer", "place")
sweep(m, tokens, {"a": ablate.zero("0.1"), "b": ablate.zero("0.1")}, logit).pivot("layer", "head")
sweep(m, tokens, zero, logit).pivot(3, "head")
sweep(m, tokens, zero, logit).pivot("layer", "layers")
sweep(m, tokens, zero).of_metric("loss")
sweep(m, tokens, {})
sweep(m, tokens, {"a": []})
sweep(m, tokens, {"a": 3})
sweep(m, tokens, zero, engine="fast")
sweep(m, tokens, zero, logit_difference(1, 2), batch=[1] * 8)
sweep(m, tokens, zero, lambda x: (logit(x), -torch.ones(8)))
sweep(m, tokens, zero, lambda x: ["a"] * 8)
sweep(m, tokens, zero, lambda x: logit(x) * 1j)
sweep(m, tokens, zero, lambda x: {"kl": logit(x), "": 3})
sweep(m, tokens, zero, metric={})
sweep(m, tokens, zero, lambda x, runs=[]: runs.append(1) or dict.fromkeys("ab"[: len(runs)], logit(x)))
sweep(m, tokens, zero, logit, positions=[7])
sweep(m, tokens, zero, draws=1.5)
sweep(m, tokens, zero, batch=3)
sweep(m, tokens, zero, lambda x, y: x, batch=tokens[0, 0])
sweep(m, tokens, {"a": edit("resid_post.1", lambda x: x / 0)}, logit)
compare([(m(tokens), {})])
compare([(m(tokens), {"a": m(tokens).detach().numpy()})])
compare([(m(tokens), {"a": m(tokens)}), (m(tokens), {"b": m(tokens)})])
logit_difference(0.5, 1)
logit_difference([], 1)
logit_difference(1, 2, position="last")
logit_difference(1, 99)(m(tokens))
logit_difference(1, 2)(m(tokens)[:, 0])
logit_difference("a", "b")(m(tokens))
logit_difference("a", "b")(m(tokens), tokens, m)
logit_difference(1, 2)(m(tokens), tokens[:2])
logit_difference(1, 2)(m(tokens), ["a", "b"])
run(m, [])
run(m, [[0.5, 1.5]])
run(m, [["a", 1]])
run(m, torch.ones(2, 2, dtype=torch.bool))
run(build(family=BRIDGE), torch.rand(2, 3, 5))
prompts(m, tokens, "middle")
sweep(m, prompts(m, [[1, 2, 3], [4, 5]]), ablate.zero("0.1"), logit, positions=slice(-2, None))
prompts(m, {"input_ids": tokens, "attention_mask": tokens[:2] > 20})
prompts(m, {"tokens": tokens})
Prompts(tokens, hidden[:, :3])
prompts(m, [[1, 2], [3]]).last(m(tokens))
prompts(m, uneven)[torch.tensor([0, 1], dtype=torch.uint8)]
prompts(m, uneven)[1.5]
prompts(m, uneven)[[True, 2]]
prompts(m, uneven)[[[0], [1, 2]]]
run(m, prompts(m, uneven)[[]])
lens(m, tokens, metric=accuracy)
lens(m, tokens, {"a": logit, "b": logit})
lens(m, tokens, logit, logit)
lens(m, tokens, positions=[7])
lens(m, tokens).without("0.9")
lens(m, tokens.to_sparse())
check(3)
check(build(family=HOOKED, positional_embedding_type="relative_positional_bias"))
run(m, tokens, edit("z", lambda x, hook: x))
run_with(m, {})
run_with(m, {"resid_post": SAE})
run_with(m, {"resid_post.0": 3})
run_with(m, {"pattern.0": SAE})
run_with(m, {"resid_post.0": SAE, "blocks.0.hook_resid_post": SAE})
run_with(m, {"resid_post.0": (lambda x: x[0], lambda f: f)})
run_with(m, {"resid_post.0": (lambda x: x @ tokens, lambda f: f)})
twice_spliced(m)
[block.__enter__() for block in 2 * [intervene(m)]]
path_in_a_splice(m)
path_in_a_path(m)
patterns.attention(build(1, family=HOOKED), patterns.record(m, tokens))
patterns.classify(patterns.scores(m, tokens, {"own": patterns.identity(6)}), 2)
patterns.classify(patterns.scores(m, tokens, {"own": patterns.identity(6)}), unless={"own": "first"})
patterns.classify(patterns.scores(m, tokens, {"other": patterns.identity(6)}))
patterns.classify(patterns.scores(m, tokens, {"own": patterns.identity(6)}), among=["0.1"])
patterns.classify(table)
patterns.attention(m, tokens).of("0.1")
patterns.scores(m, tokens, {"own": patterns.identity(6)}).plot("mass")
patterns.scores(m, tokens, {"own": patterns.identity(5)})
patterns.movement(m, tokens, other[:3])
patterns.movement(m, prompts(m, [[1, 2, 3], [4, 5]]), prompts(m, [[1, 2], [4, 5, 6]]))
patterns.constant(4, None)
patterns.previous(3, by=-1)
patterns.marked(tokens)
patterns.row(2.5, 3)
follow(m, before=0 * tokens[:, 0] - 1)
probe.linear(m, tokens, {})
probe.linear(m, tokens, {"a": tokens[:, 0] / 1}, kind={"b": "regression"})
probe.linear(m, tokens, tokens[:, 0] / 1, [])
probe.linear(m, tokens, tokens[:, 0] / 1, "scores")
probe.linear(m, tokens, tokens[:, 0] / 1, test=[0])
probe.linear(m, tokens[:1], tokens[:1, 0] / 1)
probe.linear(m, tokens, tokens[:, 0] / 1, splits={"a": [True] * 6})
probe.linear(m, tokens, tokens[:, 0] / 1, splits={"all": hidden})
probe.linear(m, tokens, tokens[:, 0] / 1, splits={"a": tokens})
probe.linear(m, tokens, tokens[:, 0] / 1, positions=tokens > 20)
probe.linear(m, tokens, tokens[:, 0] / 1, untrained=build(family=HOOKED, n_layers=1))
probe.linear(m, tokens, tokens[:, 0] / 1, kind="ranking")
probe.linear(m, tokens, tokens[:, 0] / 1, ridge=[0.1, 1])
fourier.basis(0)
fourier.key_frequencies(torch.randn(9, 3))
fourier.spectrum(torch.randn(1, 3)).bands()
fourier.spectrum(torch.randn(9, 3)).plot([7])
fourier.clusters(fourier.spectrum(torch.randn(9)))
fourier.clusters(fourier.spectrum(torch.randn(9, 3)), 0.1).neurons(9)
fourier.clusters(fourier.spectrum(torch.randn(9, 3)), True)
fourier.Grid.of_inputs(square, {"a": 0, "b": 7}, values=5)
fourier.Grid.of_inputs(square, [0, 1], values=5)
fourier.Grid.of_inputs(["a", "b"], {"a": 0}, values=5)
fourier.Grid.of_inputs(square, {"a": 0, "b": 1}, values=-5)
fourier.Grid.of_inputs(square, {"a": 0, "b": 1}, values=[[2**70], [1]])
fourier.Grid.of_inputs(square, {"a": 0, "b": 1}, values=[[0.5, 1], "ab"])
fourier.Grid.of_inputs(square, {"a": 0, "b": float("nan")}, values=5)
fourier.gini([])
fourier.ModularSum(digits, (1, 1), 5).cosines(torch.randn(25, 5)).explained([9])
variance.explained([1.0, float("inf")], [0, 1])
variance.explained(torch.randn(5), torch.arange(4))
variance.total(torch.randn(5), torch.rand(5))
plots.heads(torch.randn(2, 3, 4).numpy())
plots.heads({})
plots.heads(pd.concat([table, table]), column="value")
plots.heads(table.assign(value="a"), column="value")
plots.heads(torch.randn(2, 3) * 1j)
plots.curve(3)
plots.curve({"a": ([1, 2], [1, 2, 3])})
plots.curve(pd.DataFrame({"step": [1, 1], "value": [1, 2]}))
plots.curve(pd.DataFrame({"step": [1, 1]}))
plots.attention(torch.randn(3))
plots.attention(torch.ones(5, 3))
plots.spectrum([1.0])
plots.save(plots.curve({"a": [1, 2]}), "curve.gif")
# A batch size, a seed and a number of draws, of every verb.
lens(m, tokens, batch_size=0)
patch.attribution(m, tokens, other, logit, batch_size=True)
patch.screen(m, tokens, other, logit, batch_size=1.5)
patch.edges(m, tokens, other, logit, batch_size=-3)
circuit.evaluate(m, chain, tokens, other, logit, batch_size=0)
circuit.curve(m, ["0.1"], tokens, other, logit, batch_size="all")
patterns.record(m, tokens, batch_size=0)
patterns.scores(m, tokens, {"own": patterns.identity(6)}, batch_size=0)
probe.linear(m, tokens, tokens[:, 0] / 1, batch_size=0)
circuit.evaluate(m, chain, tokens, other, logit, seed=-1)
circuit.curve(m, ["0.1"], tokens, other, logit, draws=0)
circuit.curve(m, 2 * [patch.screen(m, tokens, other, logit)], tokens, other, logit)
patterns.scores(m, tokens, {"own": patterns.identity(6)}, seed=0.5)
patterns.movement(m, tokens, other, draws=0)
follow(m, seed="a")
probe.linear(m, tokens, tokens[:, 0] / 1, draws=-1)
compare([(m(tokens), {"a": m(tokens)})], logit, seed=-2)
run(without_blocks(m), tokens)
run(build(family=BRIDGE), tokens, edit("blocks.0.ln1.hook_normalized", double))
"""


@pytest.mark.parametrize("call", kept.lines(REFUSALS), ids=map(str, range(999)))
def test_a_wrong_call_is_refused_in_one_line_that_names_what_is_wrong(call, request):
    verbs = {name: getattr(circuits, name) for name in circuits.__all__}
    known = {**verbs, **globals(), "m": build(family=HOOKED)}
    found = kept.check("refusals", call, known, request.config.getoption("keep"))
    assert isinstance(found, str), found
    assert found.startswith("refused: ")
    assert "\n" not in found
