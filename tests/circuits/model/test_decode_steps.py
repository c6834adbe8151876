"""What test_matrix leaves out of model.generate: several generations at once, streams, refusals, and no trace."""

import copy
import warnings

import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, logit_difference, patch, prompts, run, sweep

PROMPT, NEW = 4, 5
ROTARY = {"positional_embedding_type": "rotary", "attention_dir": "causal", "n_ctx": 16}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "stop_at_eos": False, "verbose": False}


@pytest.fixture
def prompt(tokens):
    return tokens[:3, :PROMPT]


@pytest.fixture
def rotary(make_model, family):
    return make_model(family=family, **ROTARY)


def pushed(x):
    return x + torch.linspace(-2, 2, x.shape[-1], dtype=x.dtype)


def push(positions):
    return edit("resid_post.0", pushed, positions=positions)


def generated(model, prompt, *interventions, use_cache=True):
    with warnings.catch_warnings(), intervene(model, *interventions):
        warnings.simplefilter("ignore")
        return model.generate(prompt, use_past_kv_cache=use_cache, return_type="tokens", **GREEDY)


def loop(by_hand, model, tokens, first):
    """A forward of everything for each new token, pushed from position `first` on."""

    def change(site, layer, x):
        x = x.clone()
        if (site, layer) == ("resid_post", 0):
            x[:, first:] = pushed(x[:, first:])
        return x

    for _ in range(NEW):
        tokens = torch.cat([tokens, by_hand(model, tokens, change)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_stays_empty_is_refused(hf_model, name, prompt, monkeypatch):
    """As that of bridges under transformers 5.24: other tokens than without a cache, in silence."""
    from transformers import DynamicCache

    model, one = hf_model(name), ablate.zero("0.1")
    expected = generated(model, prompt + 3, one)
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *given, **named: (keys, values))
    with pytest.raises(CircuitsError, match=r"cache .* stays empty.*use_past_kv_cache=False"):
        generated(model, prompt + 3, one)
    assert torch.equal(generated(model, prompt + 3, one, use_cache=False), expected)


def test_each_generation_has_a_prompt_of_its_own(rotary, by_hand, prompt):
    """The second prompt is all that the first generation gave: then none of it is new."""
    for use_cache in (True, False):
        with intervene(rotary, push("new")):
            first = rotary.generate(prompt, use_past_kv_cache=use_cache, **GREEDY)
            second = rotary.generate(first[:, : PROMPT + 1], use_past_kv_cache=use_cache, **GREEDY)
        assert torch.equal(second, loop(by_hand, rotary, first[:, : PROMPT + 1], PROMPT + 1))


def test_a_stream_of_tokens(rotary, by_hand, prompt, other_tokens):
    if not hasattr(type(rotary), "generate_stream"):
        pytest.skip("this transformer-lens has no generate_stream")
    settings = {**GREEDY, "return_type": "tokens", "max_tokens_per_yield": 1, "use_past_kv_cache": False}
    with intervene(rotary, push(slice(PROMPT, None))):
        pieces = []
        for piece in rotary.generate_stream(prompt, **settings):
            pieces.append(piece)
            rotary(other_tokens)  # between two steps: a run of its own, with a prompt of its own
    assert torch.equal(torch.cat(pieces, 1)[:, -NEW:], loop(by_hand, rotary, prompt, PROMPT)[:, PROMPT:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_cannot_take_effect_is_refused(rotary, prompt, use_cache):
    for text, one in [
        ("no position 40: the model generated up to 7", push([0, 40])),
        ("none of its positions came in 5 run", push(slice(20, None))),
        ("no position -9: the prompt has positions 0-3", push(-9)),
        (r"the mask is \[batch pos\] = \[3, 5\]", push(torch.ones(3, 5).bool())),
        ("no position 4 in the source, which has 4; name those", patch.activations("z", prompt)),
        (r'no position 4 in the reference, which has 4.*over="batch,pos"', ablate.mean("z", prompt)),
        ("paths are not supported while", patch.path("0.1", "output", prompt)),
        ("not supported while the model generates", ablate.mean_pattern("all", prompt, of="edited")),
    ]:
        with pytest.raises(CircuitsError, match=text):
            generated(rotary, prompt, one, use_cache=use_cache)


def test_outside_of_a_generation(rotary, tokens):
    for call in (lambda one: run(rotary, tokens, one), lambda one: sweep(rotary, tokens, {"new": one})):
        with pytest.raises(CircuitsError, match="this run generates nothing"):
            call(push("new"))
    for none in (slice(6, None), slice(3, 2), slice(0, -6)):
        for one in (push(none), patch.path("0.1", "output", tokens.roll(1, 0), positions=none)):
            with pytest.raises(CircuitsError, match=r"none of its positions came in 1 run\(s\), so nothing"):
                run(rotary, tokens, one)
    # In a part of a sweep all prompts may be too short for it, in the whole they are not.
    given, other = (
        prompts(rotary, [row[:n].tolist() for row, n in zip(of, (2, 6), strict=True)])
        for of in (tokens[:2], tokens[2:4])
    )
    late, metric = patch.path("0.1", "output", other, positions=slice(4, None)), logit_difference(1, 2)
    table = sweep(rotary, given, {"late": late}, metric, engine="naive", batch_size=1, draws=2, flips=2).frame
    expected = float(metric(run(rotary, given, late), given, rotary).mean())
    assert table["value"][0] == pytest.approx(expected, rel=1e-5)
    assert table["effect"][0] != 0
    with intervene(rotary, push(slice(5, None))):  # a loop of one's own, without a cache
        short, long = rotary(tokens[:, :5]), rotary(tokens)
    assert torch.equal(short, run(rotary, tokens[:, :5]))
    assert torch.equal(long, run(rotary, tokens, push([5])))


def test_position_embeddings_of_hooked_transformers_generation(make_model, hooked_only, prompt):
    model = make_model(n_layers=1, n_ctx=16)
    with pytest.raises(CircuitsError, match=r"positions are unknown; edit resid_pre\.0"):
        generated(model, prompt, edit("pos_embed", pushed, positions="new"), use_cache=False)
    generated(model, prompt, ablate.zero("pos_embed"), use_cache=False)


def test_the_model_keeps_no_trace(rotary, prompt):
    own = {"generate", "generate_stream", "hf_generate"}
    expected = rotary.generate(prompt, **GREEDY)
    one, two = (intervene(rotary, push(None)) for _ in range(2))
    one.__enter__()
    two.__enter__()
    assert own & set(vars(rotary))
    twin = copy.deepcopy(rotary)
    rotary.generate(prompt, **GREEDY)
    one.__exit__(None, None, None)
    rotary.generate(prompt, **GREEDY)
    two.__exit__(None, None, None)
    assert not own & set(vars(rotary))
    # A copy made inside generates with its own weights.
    with torch.no_grad():
        for weight in rotary.parameters():
            weight.zero_()
    assert torch.equal(twin.generate(prompt, **GREEDY), expected)
    assert not torch.equal(rotary.generate(prompt, **GREEDY), expected)
