"""What users get wrong is refused by a CircuitsError of one line, which says what is wrong and what would be right."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from circuits import (
    CircuitsError,
    Site,
    ablate,
    cache,
    check,
    circuit,
    compare,
    draws,
    edit,
    fourier,
    grid,
    heads,
    intervene,
    lens,
    logit_difference,
    patch,
    patterns,
    permute,
    plots,
    probe,
    prompts,
    run,
    sweep,
    transplant,
    variance,
)
from tests.circuits.conftest import BRIDGE, HOOKED, build

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
    sweep(model, tokens, zero, metric=logit_difference(3, 4))


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


# What is called with a model, and words that the message must have.
REFUSALS: list[tuple[Any, ...]] = [
    # Models.
    (lambda m: run("gpt2-small", tokens), "hooked model", "got str"),
    (lambda m: run(torch.nn.Linear(2, 2), tokens), "Linear", "cfg.n_layers"),
    (
        lambda m: run(build(family=HOOKED, gated_mlp=True, act_fn="solu_ln"), tokens),
        "was not tested",
        "unchecked",
    ),
    (lambda m: run(build(family=HOOKED, clip_qkv=1.0), tokens), "clip_qkv=1.0 was not tested"),
    (
        lambda m: run(build(family=HOOKED, use_attention_sinks=True), tokens),
        "use_attention_sinks=True was not",
    ),
    (lambda m: run(experts(), tokens), "num_experts=2 was not tested"),
    # Heads, sites and positions.
    (lambda m: heads("head 3", m), "'head 3' as a head"),
    (lambda m: heads("2.0", m), "no head 2.0", "layers 0-1", "heads 0-3"),
    (lambda m: heads([], m), "heads []", "empty"),
    (
        lambda m: run(grouped(), tokens, edit("v", double, heads="0.1")),
        "shares key-value group",
        "write 0.k0",
    ),
    (lambda m: edit("attn_out.0", double, heads="0.1"), "attn_out.0", "no head axis"),
    (lambda m: edit("resid_middle", double), "'resid_middle'", "resid_mid"),
    (lambda m: Site("z", layer="1"), "site 'z'", "layer='1'"),
    (lambda m: run(m, tokens, edit("z.2", double)), "z.2", "layers 0-1"),
    (lambda m: run(build(attn_only=True), tokens, edit("mlp_out", double)), "no site mlp_out", "embed"),
    (lambda m: ablate.zero("0.1", queries=1), "zero: no argument queries=", "positions="),
    (lambda m: ablate.zero("0.1", positions=1.5), "boolean mask [batch pos]", "(1.5,)"),
    (lambda m: run(m, tokens, ablate.zero("0.1", positions=9)), "no position 9", "0-5"),
    (lambda m: ablate.zero("0.1", positions=hidden[0].int()), "6 numbers", "mask [pos]", "numbers 0 and 1"),
    (lambda m: run(m, tokens[:4], ablate.uniform("all", positions=hidden)), "[8, 6]", "[4, 6]"),
    (lambda m: ablate.zero("0.1", positions=slice(0, 4, 2)), "has no step"),
    (lambda m: Site("z", layer=True), "site 'z'", "a whole number from 0, or None"),
    (
        lambda m: run(build(positional_embedding_type="alibi", family=HOOKED), tokens, permute.positions(3)),
        "no site pos_embed",
    ),
    # Inputs.
    (lambda m: run(m, "some text"), "the model has no tokenizer, which texts need"),
    (lambda m: run(m, tokens / 1), "run: tokens", "whole numbers", "float32"),
    (lambda m: run(m, tokens + 1), "1 to 11", "ids 0-10"),
    (lambda m: run(m, torch.cat([tokens, other], 1)), "[8, 12]", "6 positions"),
    (lambda m: run(m, tokens[0]), "[batch pos], got [6]"),
    (lambda m: run(m, tokens.to_sparse()), "run: tokens", "sparse"),
    (lambda m: run(m, [[1, 2], []]), "prompt 1 is empty"),
    (
        lambda m: prompts(m, {"input_ids": tokens[:1], "attention_mask": [[1, 0, 1, 1, 1, 1]]}),
        "between its tokens",
    ),
    (lambda m: run(m, {"input_ids": tokens, "position_ids": tokens}), "takes no position_ids; leave it out"),
    (
        lambda m: run(build(family=HOOKED, attention_dir="bidirectional"), [[1, 2], [3]]),
        "in causal attention only",
    ),
    # Interventions.
    (lambda m: run(m, tokens, [ablate.zero("0.1")]), "not an intervention", "give each by itself"),
    (lambda m: edit("z", 2), "edit: fn", "function", "got 2"),
    (
        lambda m: run(m, tokens, edit("z.0", lambda z: z.sum(-1))),
        "return a tensor [8, 6, 4, 4]",
        "got [8, 6, 4]",
    ),
    (lambda m: run(m, tokens, edit(RESULT, double)), RESULT, "never fired in 1 run(s)", "switched off"),
    (without_a_run, "ablate.zero(z, heads 0.1)", "not run inside the block"),
    (lambda m: run(m, tokens, ablate.uniform("all", keys=[2, 3])), "query 0", "none of the keys [2, 3]"),
    (lambda m: ablate.neurons(0, 3, how="mean"), "how='mean'", "reference="),
    (lambda m: run(m, tokens, ablate.neurons(0, 24)), "no neuron 24", "0-23"),
    (lambda m: ablate.all_but("all", "zero"), "name those to keep"),
    (lambda m: ablate.resample("0.1", source=tokens[:1]), "2 examples", "[1, 6]"),
    (lambda m: run(m, tokens, ablate.mean("0.1", reference=tokens[:, :5])), "reference is [1, 5, 4, 4]"),
    (lambda m: run(m, tokens, patch.activations("z", other[:3])), "source [3, 6, 4, 4]", "batch of 8"),
    (lambda m: patch.activations("z", cache(m, other, "z.1"), heads="0.1"), "no blocks.0.attn.hook_z"),
    (lambda m: run(m, tokens, patch.path("1.0", "0.1", other)), "no path to q.0"),
    (lambda m: run(grouped(), tokens, patch.path("0.1", "1.2", other)), "head 1.2 shares", "write 1.k1"),
    (lambda m: patch.path("pattern", "1.0", other), "pattern does not write"),
    (
        lambda m: run(m, tokens, patch.path("0.1", "1.0", other), patch.path("0.1", ("k", "1.0"), other)),
        "patched twice",
    ),
    (hook_before_a_receiver, "blocks.1.attn.hook_q differs from what ln1 and the weights make"),
    (lambda m: ablate.frequencies("z", [3], [0, 1], 5, grid=square), "keys", "1 to 2", "[3]"),
    (lambda m: ablate.frequencies("z", [1], [0, 1], 5, grid=square[1:]), "grid", "5^2 = 25"),
    (lambda m: ablate.classes("z", [0, 1], square[[0, 0]]), "different from each other"),
    (lambda m: ablate.classes("z", [0, 1], prompts(m, [[1, 2, 3], [4]])), "have padding", "of one length"),
    (lambda m: run(m, [[1, 2, 3], [4, 5]], permute.positions([1, 0])), "padding", "position table"),
    (lambda m: permute.positions([1, 2, 3]), "[1, 2, 3]", "permutation of 0..n-1"),
    (lambda m: transplant.weights(m, "attention"), "'attention'", "q, k, v, o, mlp"),
    (
        lambda m: run(m, tokens, transplant.weights(build(family=HOOKED, n_layers=1), "q")),
        "source has no blocks.1",
    ),
    (
        lambda m: run(m, tokens, transplant.weights(build(family=HOOKED, d_mlp=32), "mlp")),
        "[16, 32] in the source",
    ),
    (lambda m: patch.activations("z.0", {HOOK_Z: cache(m, other, "z.0")[HOOK_Z].tolist()}), "real numbers"),
    (lambda m: patch.activations("z.0", {HOOK_Z: cache(m, other, "z.0")[HOOK_Z].to_sparse()}), "sparse"),
    # Circuits.
    (
        lambda m: run(m, tokens, circuit.edges(["0.9 -> 1.3.q"]).keep(other)),
        "no edge 0.9 -> 1.3.q",
        "2 layers",
    ),
    (lambda m: circuit.edges(["0.1 -> mlp2"], m), "no edge 0.1 -> mlp2", "2 layers of 4 heads"),
    (lambda m: circuit.full(m) - circuit.edges(["0.1 -> 1.k0.v"]), "0.1 -> 1.k0.v", "each with its own keys"),
    (lambda m: circuit.edges(["0.1 -> mlp0"], build(attn_only=True)), "4 heads and no MLPs"),
    (lambda m: circuit.edges(["pos_embed -> mlp0"], rotary()), "adds no position emb"),
    (lambda m: run(m, tokens, circuit.edges(["0.0 -> 1.0.q @ 6"]).keep(other)), "no position 6", "0-5"),
    (lambda m: run(m, tokens, chain), "give .keep(source) or .cut(source) of it"),
    (lambda m: sweep(m, tokens, {"it": [chain.keep(other), chain]}), "give .keep(source) or .cut(source)"),
    (lambda m: chain.keep(), "circuit.keep", "needs source="),
    (lambda m: chain.keep(other, how="zero"), 'how="zero" has no source'),
    (lambda m: chain.keep(other, how="noise"), "how='noise'", "'resample', 'mean', 'zero'"),
    (lambda m: chain.keep({"blocks.0.hook_resid_pre": other / 1}), "the source has no sender"),
    (lambda m: circuit.evaluate(m, {}, tokens, other, logit), "give circuits by name"),
    (lambda m: circuit.evaluate(m, {"a": ["0.1"]}, tokens, other, logit), "a: list is no circuit"),
    (
        lambda m: circuit.evaluate(m, {1: chain, "1": chain}, tokens, other, logit),
        "two circuits are called '1'",
    ),
    (lambda m: circuit.evaluate(m, chain, tokens, other, logit, random=-1), "random=-1", "from 0"),
    (lambda m: circuit.evaluate(m, chain, tokens, tokens[:3], logit), "or a batch of 1"),
    (circuit_in_a_block, "a block around this call edits the model"),
    (lambda m: circuit.curve(m, {}, tokens, other, logit), "give a ranking, or several by name"),
    (lambda m: circuit.curve(m, {"a": chain}, tokens, other, logit), "a screening or a list of names"),
    (lambda m: circuit.curve(m, ["0.1 -> output", "0.1"], tokens, other, logit), "is no edge"),
    (lambda m: circuit.curve(m, ["0.1", "0.1"], tokens, other, logit), "names a member twice"),
    (lambda m: circuit.curve(m, ["0.1"], tokens, other, logit, sizes=[1.5]), "whole numbers of members, or"),
    (lambda m: circuit.curve(m, ["0.1"], tokens, other, logit, sizes=[-1]), "of members, or", "got -1"),
    (lambda m: circuit.smallest(m, ["0.1"], tokens, other, logit, 90), "a share above 0, at most 1"),
    # Sweeps.
    (lambda m: sweep(m, tokens, [ablate.zero("0.1")]), "variants by name", "got list"),
    (lambda m: sweep(m, tokens, {"9.9": ablate.zero("9.9")}), "variant '9.9'", "no head 9.9"),
    (lambda m: sweep(m, tokens, zero, metric="accuracy"), "function", "'accuracy'"),
    (lambda m: sweep(m, tokens, zero, metric=lambda x: logit(x).mean()), "returned []", "8 examples"),
    (lambda m: sweep(m, tokens, zero, metric=logit, positions=[0]), "not finite", "8 of 8 examples"),
    (
        lambda m: sweep(m, tokens, zero, metric=of_answers, batch_size=1),
        "IndexError",
        "of 8 examples",
        "batch=",
    ),
    (
        lambda m: sweep(m, tokens, zero, metric=lambda x, y: x, batch=other[:4]),
        "tokens have 8",
        "batch has 4",
    ),
    (whole_numbers, "output is Tensor, not a tensor of numbers"),
    (lambda m: sweep(m, tokens, zero, batch_size=0), "batch_size=0"),
    (lambda m: sweep(m, tokens, zero).plot("loss"), "no metric 'loss'", "kl, mse, logit_diff"),
    (lambda m: logit_difference(1, 0, position=6)(m(tokens)), "no position 6", "has 6 tokens"),
    (lambda m: compare([]), "compare: no outputs"),
    (lambda m: compare([(m(tokens), {"a": m(tokens)[:4]})]), "a is [4, 6, 11], the unedited [8, 6, 11]"),
    (lambda m: run(build(attn_only=True), tokens, ablate.zero(0)), "no site mlp_post", "embed"),
    (lambda m: grid(ablate.uniform, {"heads": []}), "grid: an axis is the name", "heads"),
    (lambda m: ablate.each(ablate.uniform, "all"), "a list of items", "'heads': 'all'"),
    (lambda m: draws(lambda seed: seed, 3), "make(seed)", "intervention", "got int"),
    (
        lambda m: sweep(m, tokens, zero, lambda x: (torch.ones(8), torch.arange(8) > 1)),
        "2 of 8 examples have a sum",
    ),
    # Other verbs.
    (lambda m: patch.attribution(m, tokens, other[:, :5], metric=logit), "source is [8, 5]", "base [8, 6]"),
    (lambda m: patch.attribution(m, tokens, other, metric=accuracy), "accuracy has no gradient"),
    (lambda m: patch.attribution(m, tokens, other, metric=in_numpy), "no gradient", "compute it with torch"),
    (lambda m: patch.attribution(m, tokens, other, logit, draws=0), "draws and flips are positive"),
    (suppressed, "infinite", "a token that the model or an edit suppresses"),
    (under_autocast, "lens", "under torch.autocast", "call it outside"),
    (lambda m: patch.edges(m, tokens, other, metric=logit, steps=-1), "steps=-1", "a number of points"),
    (lambda m: patch.screen(m, tokens, other, metric=logit, sites="z", by="neuron"), "no neurons"),
    (lambda m: patch.edges(m, tokens, other, logit, method="grad"), "method='grad'", "'integrated'"),
    (lambda m: patch.edges(m, tokens, other, logit, exact="verified"), "exact=10", 'exact="all"'),
    (lambda m: patch.edges(m, tokens, other, lambda x: (0 * logit(x)).sqrt()), "is not finite"),
    (
        lambda m: patch.edges(m, tokens, other, spans={"a": [5], "b": [-1]}),
        "-1 and 5 are one position",
        "prompt 0",
    ),
    (lambda m: patch.edges(m, tokens, other, spans={}), "patch.edges: span"),
    (lambda m: patch.edges(m, tokens, other, spans={"noun": None}), "patch.edges: span 'noun'", "got ()"),
    (lambda m: patch.edges(m, tokens, other, spans={1: 0, "1": 1}), "two spans are called '1'"),
    (lambda m: sweep(m, tokens, ablate.zero("0.1"), lambda x, y: x), "the output alone (batch= gives more)"),
    (
        lambda m: patch.edges(m, uneven, uneven, logit, spans={"noun": [1, 2]}),
        "'noun': prompt 1",
        "position 2",
    ),
    (
        lambda m: [block.__enter__() for block in 2 * [intervene(m)]],
        "a block is entered once; call intervene",
    ),
    (lambda m: compare(None, logit), "compare: no outputs"),
    (lambda m: check(m, "x"), "check: the model has no tokenizer"),
    (
        lambda m: run(m, tokens, edit("z.0", lambda z: m(tokens) and z)),
        "edit(z.0)",
        "the model that it edits",
    ),
    (lambda m: lens(m, tokens, lambda x: {"a": logit(x), "b": logit(x)}), "one metric at a time"),
    (lambda m: lens(m, tokens, batch=[1]), "batch= goes with metric="),
    (lambda m: lens(m, tokens, positions=hidden), "whole numbers, the same in every example"),
    (hooked_stream, "lens", "not the sum of its embeddings"),
    (lambda m: fourier.spectrum([1.0, 2.0, float("nan")]), "finite", "[3]", "1 infinite or NaN"),
    (lambda m: fourier.spectrum(3.0), "along an axis", "[]"),
    (lambda m: fourier.spectrum(torch.randn(4, 3), axis=2), "no axis 2 in [4, 3]"),
    (lambda m: fourier.spectrum(torch.randn(24, 3), (5, 5)), "24 entries, the grid 5 × 5"),
    (lambda m: fourier.key_frequencies(fourier.spectrum(torch.randn(9)), number=-1), "number=-1", "from 0"),
    (lambda m: fourier.Grid({"row": 0}), "Grid: axes are names and sizes"),
    (lambda m: fourier.Grid.of_inputs(square[1:], {"a": 0, "b": 1}, values=5), "25 combinations", "24 of 24"),
    (lambda m: fourier.components(fourier.Grid({"a": 4, "b": 5}), [1]), "equal sides", "[4, 5]"),
    (lambda m: fourier.key_frequencies(fourier.spectrum(torch.randn(9)), "largest"), "rule='largest'"),
    (lambda m: fourier.clusters(fourier.spectrum(torch.randn(9, 2)), 85), "threshold=85; give a share"),
    (lambda m: fourier.ModularSum(digits, (1,), 5), "a coefficient for each", "[25, 2], [1]"),
    (lambda m: fourier.ModularSum(digits + 0.3, (1, 1), 5), "whole numbers"),
    (lambda m: fourier.ModularSum(digits, (1, 1), 5).waves(3), "frequencies from 1 to 2 for period 5"),
    (lambda m: fourier.ModularSum(digits, (1, 1), 5).cosines(torch.randn(25, 4)), "got [25, 4]"),
    (lambda m: patterns.scores(m, tokens, {}), "no templates"),
    (lambda m: patterns.scores(m, tokens, {"a": lambda rows: rows}), "template 'a'", "got int64"),
    (
        lambda m: patterns.scores(m, tokens, {"a": hidden}, positions=hidden[:3]),
        "[batch pos] = [8, 6]",
        "got [3, 6]",
    ),
    (lambda m: follow(m, groups=digits[:5, 0]), "groups are 6 whole numbers from 0", "[5]"),
    (lambda m: follow(m, after=0 * tokens[:, 0]), "in 8 pairs nothing moves: before equals after"),
    (lambda m: follow(m, after=0 * tokens[:, 0] + 3), "no position is in group 3", "groups are 0, 1"),
    (lambda m: patterns.scores(m, tokens, {"own": "identity"}), "template 'own'", "bool [query key]"),
    (lambda m: patterns.attention(m, tokens).of((2, 0)), "no map of head 2.0", "layers 0-1"),
    (lambda m: probe.linear(m, tokens, torch.ones(8, 3)), "[batch 1 d]", "got [8, 3]", "tokens [8, 6]"),
    (lambda m: probe.linear(m, tokens, tokens / 1, test=8), "test=8", "below 8"),
    (lambda m: probe.linear(m, tokens, tokens[:, 0] / 0), "not finite"),
    (lambda m: probe.linear(m, tokens, tokens[:, 0] / 1, kind="classification"), "classes are whole numbers"),
    (lambda m: probe.linear(m, tokens, tokens[:, 0] / 1, ridge=-1.0), "give one penalty from 0"),
    (lambda m: variance.partition(torch.randn(25, 4), {}), "variance.partition", "dict"),
    (lambda m: plots.heads(table, column="effect"), "no column effect", "layer, head, value"),
    (lambda m: plots.curve({}), "nothing to draw"),
    (lambda m: plots.save(3, "scores.html"), "plotly figure", "got int"),
]


@pytest.mark.parametrize(("call", "words"), [(call, words) for call, *words in REFUSALS])
def test_a_wrong_call_is_refused_in_one_line_that_names_what_is_wrong(call, words):
    with pytest.raises(CircuitsError) as refusal:
        call(build(family=HOOKED))
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_what_a_bridge_has_not_is_refused():
    with pytest.raises(CircuitsError, match="not supported on a TransformerBridge"):
        run(build(family=BRIDGE), tokens, edit("blocks.0.ln1.hook_normalized", double))
