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
zero = {"0.1": ablate.zero("0.1")}
RESULT = "blocks.0.attn.hook_result"
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


def without_a_run(model: Any) -> None:
    with intervene(model, ablate.zero("0.1")):
        pass


def entered_again(model: Any) -> None:
    block = intervene(model, ablate.zero("0.1"))
    for _ in range(2):
        with block:
            model(tokens)


def hooked_stream(model: Any) -> None:
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x + 1)
    lens(model, tokens)


def hook_before_a_receiver(model: Any) -> None:
    split = build(family=HOOKED, use_split_qkv_input=True)
    split.add_hook("blocks.1.hook_q_input", lambda x, hook: x.tanh())
    run(split, tokens, patch.path("0.1", ("q", "1.0"), other))


def grouped() -> Any:
    return build(family=HOOKED, n_key_value_heads=2)


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
    (lambda m: ablate.zero("0.1", queries=1), "ablate.zero", "queries=", "positions="),
    (lambda m: ablate.zero("0.1", positions=1.5), "boolean mask [batch pos]", "(1.5,)"),
    (lambda m: run(m, tokens, ablate.zero("0.1", positions=9)), "no position 9", "0-5"),
    (lambda m: ablate.zero("0.1", positions=hidden[0].int()), "6 numbers", "mask [pos]", "numbers 0 and 1"),
    (lambda m: run(m, tokens[:4], ablate.uniform("all", positions=hidden)), "[8, 6]", "[4, 6]"),
    (lambda m: ablate.zero("0.1", positions=slice(0, 4, 2)), "has no step"),
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
    (lambda m: run(m, tokens, [ablate.zero("0.1")]), "not an intervention", "[Edit("),
    (lambda m: edit("z", 2), "edit: fn", "function", "got 2"),
    (
        lambda m: run(m, tokens, edit("z.0", lambda z: z.sum(-1))),
        "return a tensor [8, 6, 4, 4]",
        "got [8, 6, 4]",
    ),
    (lambda m: run(m, tokens, edit(RESULT, double)), RESULT, "never fired in 1 run(s)", "switched off"),
    (entered_again, "a block is entered once", "call intervene"),
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
    (lambda m: patch.path("pattern", "1.0", other), "pattern does not write"),
    (
        lambda m: run(m, tokens, patch.path("0.1", "1.0", other), patch.path("0.1", ("k", "1.0"), other)),
        "patched twice",
    ),
    (hook_before_a_receiver, "blocks.1.attn.hook_q differs from what ln1 and the weights make"),
    (lambda m: ablate.frequencies("z", [3], [0, 1], 5, grid=square), "keys", "1 to 2", "[3]"),
    (lambda m: ablate.frequencies("z", [1], [0, 1], 5, grid=square[1:]), "grid", "5^2 = 25"),
    (lambda m: ablate.classes("z", [0, 1], square[[0, 0]]), "different from each other"),
    (lambda m: run(m, [[1, 2, 3], [4, 5]], permute.positions([1, 0])), "padding", "position table"),
    (lambda m: permute.positions([1, 2, 3]), "[1, 2, 3]", "permutation of 0..n-1"),
    (lambda m: transplant.weights(m, "attention"), "'attention'", "q, k, v, qkv, o, attn"),
    (
        lambda m: run(m, tokens, transplant.weights(build(family=HOOKED, n_layers=1), "q")),
        "source has no blocks.1",
    ),
    (
        lambda m: run(m, tokens, transplant.weights(build(family=HOOKED, d_mlp=32), "mlp")),
        "[16, 32] in the source",
    ),
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
    (lambda m: sweep(m, tokens, zero, batch_size=0), "batch_size=0"),
    (lambda m: sweep(m, tokens, zero, executor=None), "no argument executor=", "SweepResult.concat"),
    (lambda m: sweep(m, tokens, zero).plot("loss"), "no metric 'loss'", "kl, mse, logit_diff"),
    (lambda m: logit_difference(1, 0, position=6)(m(tokens)), "no position 6", "has 6 tokens"),
    (lambda m: compare([]), "compare: no outputs"),
    (lambda m: run(build(attn_only=True), tokens, ablate.zero(0)), "no site mlp_post", "embed"),
    (lambda m: grid(ablate.uniform, {"heads": []}), "grid: an axis is the name", "heads"),
    (lambda m: ablate.each(ablate.uniform, "all"), "ablate.each", "list", "'all'"),
    (lambda m: draws(lambda seed: seed, 3), "make(seed)", "intervention", "got int"),
    # Other verbs.
    (lambda m: patch.attribution(m, tokens, other[:, :5], metric=logit), "source is [8, 5]", "base [8, 6]"),
    (lambda m: patch.attribution(m, tokens, other, metric=accuracy), "accuracy has no gradient"),
    (lambda m: patch.attribution(m, tokens, other, metric=in_numpy), "no gradient", "compute it with torch"),
    (suppressed, "infinite", "a token that the model or an edit suppresses"),
    (under_autocast, "lens", "under torch.autocast", "call it outside"),
    (lambda m: patch.edges(m, tokens, other, metric=logit, steps=0), "steps=0", "at least 1"),
    (lambda m: patch.screen(m, tokens, other, metric=logit, sites="z", by="neuron"), "no neurons"),
    (hooked_stream, "lens", "not the sum of its embeddings"),
    (lambda m: fourier.spectrum([1.0, 2.0, float("nan")]), "finite", "[3]", "1 infinite or NaN"),
    (lambda m: patterns.scores(m, tokens, {"own": "identity"}), "template 'own'", "bool [query key]"),
    (lambda m: patterns.attention(m, tokens, layers=0).of((1, 0)), "no map of head 1.0", "layers 0"),
    (lambda m: probe.linear(m, tokens, torch.ones(8, 3)), "[batch 1 d]", "got [8, 3]", "tokens [8, 6]"),
    (lambda m: probe.linear(m, tokens, tokens / 1, test=8), "test=8", "below 8"),
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
