"""A padded batch gives what each prompt gives alone, for verbs that test_matrix does not draw; inputs in every form."""

from __future__ import annotations

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
    model.tokenizer = type("WithoutPadding", (), {"decode": str})
    assert prompts(model, made.tokens[:1, :2]).words == (("[6]", "[7]"),)


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
