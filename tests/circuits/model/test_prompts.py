"""A padded batch gives what each prompt gives alone, for verbs that test_matrix does not draw; inputs in every form."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from circuits import (
    CircuitsError,
    Prompts,
    ablate,
    cache,
    edit,
    intervene,
    lens,
    logit_difference,
    patch,
    patterns,
    probe,
    prompts,
    run,
    sweep,
    unchecked,
)
from tests.circuits.conftest import BRIDGE, FAMILIES, HOOKED, LOCAL, ROTARY

# A context longer than any prompt, so that a position read from the wrong place is another row of the table.
KINDS = {
    "learned": (HOOKED, {"n_ctx": 9}),
    "sliding window": (HOOKED, {**LOCAL, **ROTARY, "n_ctx": 9, "n_key_value_heads": 2}),
    "bridge, learned": (BRIDGE, {"n_ctx": 9, "attention_dir": "causal"}),
    "bridge, rotary": (BRIDGE, {"n_ctx": 9, "positional_embedding_type": "rotary"}),
}
KINDS = {name: kind for name, kind in KINDS.items() if kind[0] in FAMILIES}
LENGTHS = (5, 3, 7, 4)
FEW = {"draws": 2, "flips": 2}


def drawn(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (length,), generator=generator) for length in lengths]


@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param


@pytest.fixture(scope="module", params=list(KINDS))
def model(request, make_model):
    family, changes = KINDS[request.param]
    return make_model(family=family, **changes)


def same(batch, alone, made, axes=(1,)):
    """The rows of a padded result are those of each prompt alone."""
    for row, (one, kept) in enumerate(zip(alone, made.real, strict=True)):
        found = batch[row : row + 1]
        for axis in axes:
            found = found.index_select(axis, kept.nonzero().flatten())
        assert found.shape == one.shape
        assert (found - one).abs().nan_to_num().max() <= 1e-11 * (1 + one.abs().nan_to_num(neginf=0).max())


def test_numbers_at_padding_are_nan_and_each_prompts_last_token_is_read_in_one_call(model, side):
    rows = drawn(LENGTHS)
    made = prompts(model, rows, side)
    alone = torch.cat([model(row[None])[:, -1] for row in rows])
    output, seen = run(model, made, cache=["z", "resid_post.1"])
    shown = lens(model, made)
    for x in (output, *seen.values(), shown.output, *shown.readouts.values(), *shown.contributions.values()):
        assert torch.equal(x.flatten(2).isnan().any(2), ~made.real)
        assert torch.equal(x.flatten(2).isnan().all(2), ~made.real)
    for last in (made.last(output), made.last(shown.output)):
        assert (last - alone).abs().max() < 1e-11
    with pytest.raises(CircuitsError, match=r"prompts\.last: got \[4, 11\]; the prompts are \[4, 7\]"):
        made.last(made.last(output))


def pairs(model, side, lengths=LENGTHS):
    rows, others = drawn(lengths), drawn(lengths, seed=1)
    opposite = "right" if side == "left" else "left"
    return rows, others, prompts(model, rows, side), prompts(model, others, opposite)


ESTIMATES = {
    "attribution": partial(patch.attribution, site="resid_pre"),
    "attribution to patterns": partial(patch.attribution, site="pattern"),
    "integrated": partial(patch.screen, steps=2, exact=3, by="position"),
    "gradient": partial(patch.screen, method="gradient", exact="all", sites=["mlp_out", "z.1"]),
    "edges": partial(patch.edges, steps=2, exact=3),
}


@pytest.mark.parametrize(
    "name",
    [name if "attribution" in name else pytest.param(name, marks=pytest.mark.slow) for name in ESTIMATES],
)
def test_estimates_are_means_of_those_of_each_prompt(model, side, name):
    # Of two prompts, as all nodes and edges of each alone are measured.
    rows, others, base, source = pairs(model, side, (5, 3))
    call, metric = ESTIMATES[name], partial(logit_difference, 3, 5)
    every = {} if "attribution" in name else {"exact": "all"}
    found = call(model, base, source, metric(), **FEW).frame.set_index("variant")
    total: dict[str, dict[str, float]] = {"estimate": {}, "effect": {}}
    for row, other in zip(rows, others, strict=True):
        alone = call(model, row[None], other[None], metric(), **FEW, **every).frame
        for column, values in total.items():
            for one, value in alone[["variant", column]].itertuples(index=False) if column in alone else ():
                values[one] = values.get(one, 0.0) + value / len(rows)
    assert set(found.index) == set(total["effect"])
    for column, values in total.items():
        for one, value in values.items():
            if not np.isnan(found[column][one]):
                assert found[column][one] == pytest.approx(value, rel=1e-8, abs=1e-11)
    assert found["effect"].abs().max() > 1e-3


MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])
EXTRA = {
    "bert": ("token_type_ids", torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]])),
    "gpt2": ("position_ids", torch.tensor([[0, 2, 4, 6, 8, 10], [5, 1, 3, 9, 0, 0], [7, 8, 9, 10, 11, 0]])),
}


def encoded(name):
    ids = torch.randint(3, 50, (3, 6), generator=torch.Generator().manual_seed(0)) * MASK
    key, values = EXTRA[name]
    return {"input_ids": ids, "attention_mask": MASK, key: values}


@pytest.mark.parametrize("name", EXTRA)
def test_what_the_models_own_forward_takes_reaches_it_from_every_verb(hf_model, name):
    model, plain, given = hf_model(name), hf_model.plain(name).eval(), encoded(name)
    key, real = EXTRA[name][0], MASK.bool()
    with torch.no_grad():
        expected = plain(**given, output_hidden_states=True, output_attentions=True)
    made = prompts(model, given)
    unpadded = [{k: x[row : row + 1, : int(MASK[row].sum())] for k, x in given.items()} for row in range(3)]
    ragged = {k: [one[k][0].tolist() for one in unpadded] for k in ("input_ids", key)}
    assert made == prompts(model, ragged) != prompts(model, {**given, key: 0 * given[key]})
    assert made[1:] == prompts(model, {k: x[1:] for k, x in given.items()})
    for batch in (given, made, ragged):
        output, seen = run(model, batch, cache="resid_pre.1")
        assert (output - expected.logits)[real].abs().max() < 1e-10
        assert (seen["resid_pre.1"] - expected.hidden_states[1])[real].abs().max() < 1e-10
    for row, one in enumerate(unpadded):
        assert (run(model, one)[0] - expected.logits[row][real[row]]).abs().max() < 1e-10
    maps = patterns.attention(model, given).mean
    for layer, attention in enumerate(expected.attentions):
        total = torch.where(real[:, None, :, None], attention, 0.0).sum(0)
        assert (maps[layer] - total / real.sum(0)[:, None]).abs().max() < 1e-10
    metric = logit_difference([5, 6, 7], [8, 9, 10])
    edits = {
        "zero": ablate.zero("0.1"),
        "mean": ablate.mean("1.0", reference=given),
        "patch": patch.activations("z.1", {**given, key: 0 * given[key]}),
    }
    clean = metric(expected.logits, made)
    for size in (None, 2):
        frame = sweep(model, given, edits, metric, batch_size=size, **FEW).frame.set_index("variant")
        assert frame["baseline"].tolist() == pytest.approx([float(clean.mean())] * 3, rel=1e-9)
        for title, edited in edits.items():
            assert frame["value"][title] == pytest.approx(
                float(metric(run(model, made, edited), made).mean())
            )
    estimated = patch.attribution(model, given, made, metric, **FEW).frame
    assert estimated["baseline"].tolist() == pytest.approx([float(clean.mean())] * len(estimated), rel=1e-9)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 3.0, 8.0],
    "original_max_position_embeddings": 8,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
ANGLES = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
}


@pytest.mark.parametrize("name", ANGLES)
def test_rotary_angles_are_those_of_each_row_alone(hf_model, name):
    """Whatever ran before; rows that would get those of a longer one are refused, in every verb."""
    model = unchecked(hf_model(name, **ANGLES[name]))
    model.cfg.n_ctx = 20
    auto, folder = transformers.AutoModelForCausalLM, hf_model.folder(name, **ANGLES[name])
    tokens = torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    for length in (20, 12, 5):
        rows, plain = tokens[:, :length], auto.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.no_grad():
            expected = plain(rows).logits
        assert (run(model, rows) - expected).abs().max() < 1e-5
        frame = sweep(model, rows, {"zero": ablate.zero("0.1")}, lambda o: o[:, -1, 3]).frame
        assert frame["baseline"][0] == pytest.approx(float(expected[:, -1, 3].mean()), abs=1e-5)
    uneven = [tokens[0, :4].tolist(), tokens[0].tolist()]
    places = {"input_ids": tokens[:, :4], "position_ids": torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12]])}
    for call in (
        lambda: run(model, uneven),
        lambda: run(model, places),
        lambda: sweep(model, uneven, {"zero": ablate.zero("0.1")}),
        lambda: run(model, tokens, ablate.mean("0.1", reference=uneven)),
    ):
        with pytest.raises(
            CircuitsError, match=r"rotary scaling a prompt gets other angles .* each length apart"
        ):
            call()


def test_lens(model, side):
    rows = drawn(LENGTHS)
    made = prompts(model, rows, side)
    found, alone = lens(model, made), [lens(model, row[None]) for row in rows]
    same(found.output, [one.output for one in alone], made)
    for part in ("readouts", "contributions"):
        for name, value in getattr(found, part).items():
            value = value.expand_as(found.output)
            same(value, [getattr(one, part)[name].expand_as(one.output) for one in alone], made)

    last = lens(model, made, positions=[-1], batch_size=2)
    shares = lens(model, made, logit_difference(3, 5), batch_size=2).shares
    for name, part in last.contributions.items():
        expected = torch.cat([one.contributions[name][:, -1:] for one in alone])
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-10)
        if last.soft_cap is None:
            torch.testing.assert_close(
                shares[name], (expected[..., 3] - expected[..., 5])[:, 0], rtol=0, atol=1e-10
            )


def test_patterns(model, side):
    rows = drawn(LENGTHS)
    made = prompts(model, rows, side)
    alone = [patterns.attention(model, row[None]).mean for row in rows]
    total, count = torch.zeros(2, 4, 7, 7, dtype=torch.float64), torch.zeros(7)
    for one in alone:
        length = one.shape[-1]
        total[..., :length, :length] += one
        count[:length] += 1
    maps = patterns.attention(model, made)
    torch.testing.assert_close(maps.mean, total / count[:, None], rtol=1e-10, atol=1e-12)
    # Each query weighs the same.
    found = patterns.scores(model, made, {"previous": patterns.previous(7)}, draws=2, batch_size=2)
    for head in range(8):
        each = [
            patterns.scores(model, row[None], {"previous": patterns.previous(len(row))}, draws=2)
            for row in rows
        ]
        expected = sum(one.mass[head].sum() for one in each) / sum(one.queries[head].sum() for one in each)
        assert found.frame["score"][head] == pytest.approx(expected, rel=1e-10)
    by_last = patterns.attention(model, made, positions=[-1]).mean
    last = torch.zeros(2, 4, 7, 7, dtype=torch.float64)
    for one in alone:
        length = one.shape[-1]
        last[..., length - 1, :length] = one[..., length - 1, :]
    for length in LENGTHS:
        torch.testing.assert_close(
            by_last[..., length - 1, :], last[..., length - 1, :], rtol=1e-10, atol=1e-12
        )


def test_probe(model, side):
    lengths = (5, 3, 7, 4, 6, 5, 4, 7, 3, 6)
    rows = drawn(lengths)
    made = prompts(model, rows, side)
    targets = [
        torch.randn(len(row), generator=torch.Generator().manual_seed(i)).double()
        for i, row in enumerate(rows)
    ]
    wide = torch.full(made.shape, 1e6, dtype=torch.float64)
    wide[made.real] = torch.cat(targets)
    found = probe.linear(model, made, wide, "mlp_post.0", test=[8, 9], draws=2, ridge=0.1)
    x = [cache(model, row[None], "mlp_post.0")["mlp_post.0"][0] for row in rows]
    fit_x, fit_y = torch.cat(x[:8]), torch.cat(targets[:8])
    weight = torch.linalg.solve(fit_x.T @ fit_x + 0.1 * torch.eye(24, dtype=torch.float64), fit_x.T @ fit_y)
    torch.testing.assert_close(
        found.weights["mlp_post.0", "target"].weight[:, 0], weight, rtol=1e-7, atol=1e-9
    )


def test_sources_of_another_length_by_aligned_positions(model, side):
    """A path takes the same arguments."""
    rows, others = drawn(LENGTHS), drawn((3, 6, 4, 5), seed=1)
    made, source = prompts(model, rows, side), prompts(model, others, "left")
    message = r"example 0 has 5 tokens, the one it takes from 3; .* or positions= and source_positions="
    with pytest.raises(CircuitsError, match=message):
        run(model, made, patch.activations("z.0", source))
    for verb, place in ((patch.activations, ("mlp_out.0",)), (patch.path, ("0.1", "output"))):
        by_number = verb(*place, source, positions=[1, -1], source_positions=[1, 2])
        found = run(model, made, by_number)
        same(
            found,
            [
                run(model, r[None], verb(*place, o[None], positions=[1, -1], source_positions=[1, 2]))
                for r, o in zip(rows, others, strict=True)
            ],
            made,
        )


@pytest.fixture(params=["right", "left"])
def with_words(request, make_model, hooked_only):
    """A HookedTransformer with a tokenizer from disk, as `from_pretrained` leaves it."""
    model = make_model(n_ctx=9, d_vocab=50)
    # Asked for here, as tests with an argument hf_model are of bridges.
    folder = request.getfixturevalue("hf_model").folder("gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.set_tokenizer(tokenizer, default_padding_side=request.param)
    return model


TEXTS = ["w3 w4 w5 w6 w3 w7", "w8 w9 w5", "w3 w1 w9 w5"]
OTHERS = ["w8 w9 w2 w6 w8 w9", "w3 w4 w5", "w8 w1 w4 w2"]


def test_texts_are_what_the_model_makes_of_each(with_words):
    model = with_words
    for begins in (True, False):
        model.cfg.default_prepend_bos = begins
        made = prompts(model, TEXTS)
        assert made.lengths.tolist() == [6 + begins, 3 + begins, 4 + begins]
        assert [one.shape[0] for one in made] == [1, 1, 1]
        first = ("<s>",) if begins else ()
        assert made.words == tuple((*first, *text.split()) for text in TEXTS)
        assert bool(made.real[1, -1]) == (model.tokenizer.padding_side == "left")
        alone = [model(text) for text in TEXTS]
        for given in (made, TEXTS, prompts(model, TEXTS, side="left"), prompts(model, TEXTS, side="right")):
            layout = given if isinstance(given, Prompts) else made
            same(run(model, given), alone, layout)
        # What a tokenizer of its own returns, with a mask, and a tensor without one.
        encoded = {"input_ids": made.tokens, "attention_mask": made.real.long().tolist()}
        assert prompts(model, encoded) == made
        unmasked = prompts(model, made.tokens)
        assert (unmasked, unmasked.words) == (made, made.words)
    assert torch.equal(run(model, TEXTS[0]), model(TEXTS[0]))
    with pytest.raises(CircuitsError, match="the model has room for 9 positions"):
        run(model, [" ".join(TEXTS[0:1] * 2)])


def test_texts_wherever_tokens_are(with_words):
    model = with_words
    made = prompts(model, TEXTS)
    other = prompts(model, OTHERS)
    for text, tokens in (
        (ablate.mean("0.1", TEXTS), ablate.mean("0.1", made)),
        (ablate.mean("z.1", TEXTS, over="batch,pos"), ablate.mean("z.1", made, over="batch,pos")),
        (patch.activations("z.0", OTHERS), patch.activations("z.0", other)),
        (patch.path("0.1", "output", OTHERS), patch.path("0.1", "output", other)),
        (ablate.all_but("0.1", reference=OTHERS), ablate.all_but("0.1", reference=other)),
        (ablate.mean_pattern("0.1", TEXTS, of="edited"), ablate.mean_pattern("0.1", made, of="edited")),
    ):
        assert text != tokens
        assert isinstance(text.describe(), dict)
        assert torch.equal(run(model, TEXTS, text)[made.real], run(model, made, tokens)[made.real])
    metric = logit_difference([" w4", " w9", " w7"], " w2", [-1, 1, 2])
    by_id = logit_difference([7, 12, 10], 5, [-1, 1, 2])
    for call in (
        lambda given, source, metric: sweep(model, given, {"a": ablate.zero("0.1")}, metric, **FEW),
        lambda given, source, metric: patch.attribution(model, given, source, metric, **FEW),
        lambda given, source, metric: patch.edges(model, given, source, metric, exact=1, steps=1, **FEW),
    ):
        one, two = call(TEXTS, OTHERS, metric).frame, call(made, other, by_id).frame
        assert one.equals(two)
    output = run(model, TEXTS)
    assert torch.equal(metric(output, made, model), by_id(output, made))
    assert patterns.attention(model, TEXTS).labels[0] == "0 <s>"
    assert torch.equal(lens(model, TEXTS).output[made.real], output[made.real])
    probe.linear(model, TEXTS * 3, torch.arange(9.0), test=[7, 8], draws=2)
    assert torch.equal(
        cache(model, TEXTS, "z.0")["z.0"][made.real], cache(model, made, "z.0")["z.0"][made.real]
    )


def test_texts_in_a_call_of_the_models_own(with_words):
    """Positions are each text's own there, too, wherever the model pads."""
    model = with_words
    made, ramp = prompts(model, TEXTS), torch.linspace(-1, 1, 16, dtype=torch.float64)
    last = edit("embed", lambda x: x * ramp, positions=[-1])
    for one in (
        last,
        edit("resid_post.0", lambda x: x * ramp, positions=[1, -1]),
        ablate.mean("z", TEXTS),
        patch.activations("z.1", OTHERS, positions=slice(1, -1)),
        patch.path("0.1", "1.1", OTHERS),
    ):
        with torch.no_grad(), intervene(model, one):
            found = model(TEXTS)
            alone = model(TEXTS[0]) if one is last else None
        expected = run(model, made, one)
        assert (found - expected)[made.real].abs().max() < 1e-10
        assert alone is None or (alone[0] - expected[0]).abs().max() < 1e-10
    with torch.no_grad(), intervene(model, last):
        found = model.run_with_hooks(made.tokens, attention_mask=made.real.long())
    assert (found - run(model, made, last))[made.real].abs().max() < 1e-10


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_columns_of_a_dataset(kind, make_model):
    datasets = pytest.importorskip("datasets")
    model, rows = make_model(family=BRIDGE), [row.tolist() for row in drawn((5, 3, 4))]
    answers = {"right": [1, 2, 3], "wrong": [4, 5, 6]}
    table = datasets.Dataset.from_dict({"ids": rows, "mask": [[1] * len(row) for row in rows], **answers})
    table.set_format(kind)
    for given in (table["ids"], {"input_ids": table["ids"], "attention_mask": table["mask"]}):
        assert prompts(model, given) == prompts(model, rows)
        one, two = (run(model, x, ablate.mean("0.1", y)) for x, y in ((given, table["ids"]), (rows, rows)))
        assert torch.equal(one.nan_to_num(), two.nan_to_num())
    plain = table.with_format(None)
    assert logit_difference(plain["right"], plain["wrong"]) == logit_difference(*answers.values())
    found, expected = (
        probe.linear(model, one * 3, target, test=[7, 8], draws=1).frame
        for one, target in (
            (list(table["ids"]), datasets.concatenate_datasets([table] * 3)["right"]),
            (rows, [1, 2, 3] * 3),
        )
    )
    assert found.equals(expected)
