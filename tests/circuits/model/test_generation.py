"""Interventions inside model.generate, with the key-value cache and without, against a loop of forwards by hand."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch

from circuits import (
    CircuitsError,
    ablate,
    cache,
    edit,
    intervene,
    logit_difference,
    patch,
    prompts,
    run,
    sweep,
)

PROMPT, NEW = 4, 5
ROTARY = {"positional_embedding_type": "rotary", "attention_dir": "causal", "n_ctx": 16}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "stop_at_eos": False, "verbose": False}


@pytest.fixture
def prompt(tokens):
    return tokens[:3, :PROMPT]


@pytest.fixture
def source(other_tokens):
    return other_tokens[:3, :PROMPT]


@pytest.fixture(params=["HookedTransformer", "TransformerBridge"])
def family(request):
    import transformer_lens

    if request.param not in vars(transformer_lens) and request.param == "HookedTransformer":
        pytest.skip("the installed transformer-lens has no HookedTransformer")
    return request.param


@pytest.fixture
def rotary(make_model, family):
    return make_model(family=family, n_layers=2, **ROTARY)


def generated(model, prompt, *interventions, use_cache=True, **settings):
    """The tokens, and the logits of each step at the last position."""
    logits = []
    # Hugging Face's models may cap what the unembedding gives; HookedTransformer's generate does not call the model.
    bridged = "original_model" in vars(model)
    listening = (model.original_model if bridged else model.unembed).register_forward_hook(
        lambda module, args, out: logits.append(getattr(out, "logits", out)[:, -1].clone())
    )
    try:
        with warnings.catch_warnings(), intervene(model, *interventions):
            warnings.simplefilter("ignore")
            found = model.generate(
                prompt, use_past_kv_cache=use_cache, return_type="tokens", **{**GREEDY, **settings}
            )
    finally:
        listening.remove()
    return found, torch.stack(logits[-NEW:], 1)


def loop(by_hand, model, prompt, change):
    """A forward of everything for each new token; `change(site, layer, x)` edits a copy of every activation."""
    tokens, logits = prompt, []
    for _ in range(NEW):
        step = by_hand(model, tokens, lambda site, layer, x: change(site, layer, x.clone()))[:, -1]
        logits.append(step)
        tokens = torch.cat([tokens, step.argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(logits, 1)


def at(where, fn):
    """An edit by hand: `fn(x)` writes to a copy of one site's activation."""

    def change(site, layer, x):
        if (site, layer) == where:
            fn(x)
        return x

    return change


def _put(rows, value):
    """Writes `value(x)` at a slice or a list of positions, as far as these have come."""

    def write(x):
        every = range(x.shape[1])
        here = list(every[rows]) if isinstance(rows, slice) else [row for row in rows if row in every]
        x[:, here] = value(x)[:, here]

    return write


def pushed(x):
    return x + torch.linspace(-2, 2, x.shape[-1], dtype=x.dtype)


CASES = {
    "steering, all positions": lambda m, s: (
        edit("resid_post.0", pushed),
        at(("resid_post", 0), _put(slice(None), pushed)),
    ),
    "steering, new ones": lambda m, s: (
        edit("resid_post.0", pushed, positions="new"),
        at(("resid_post", 0), _put(slice(PROMPT, None), pushed)),
    ),
    "steering, the prompt": lambda m, s: (
        edit("resid_mid.0", pushed, positions="prompt"),
        at(("resid_mid", 0), _put(slice(0, PROMPT), pushed)),
    ),
    "positions are absolute": lambda m, s: (
        edit("mlp_out.0", pushed, positions=[1, PROMPT + 1]),
        at(("mlp_out", 0), _put([1, PROMPT + 1], pushed)),
    ),
    "negative ones count in the prompt": lambda m, s: (
        edit("attn_out.0", pushed, positions=-1),
        at(("attn_out", 0), _put([PROMPT - 1], pushed)),
    ),
    "a slice": lambda m, s: (
        edit("mlp_post.1", lambda x: -x, positions=slice(PROMPT + 2, None)),
        at(("mlp_post", 1), _put(slice(PROMPT + 2, None), lambda x: -x)),
    ),
    "a mask over the prompt": lambda m, s: (
        edit(
            "v.0", lambda x: 3 - x, positions=torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
        ),
        at(("v", 0), _masked),
    ),
    "keys of one head": lambda m, s: (
        edit("k.1", lambda x: x - 4, heads="1.2", positions="new"),
        at(("k", 1), lambda x: x[:, PROMPT:, 2].sub_(4)),
    ),
    "zero": lambda m, s: (ablate.zero("0.1, 0.2"), at(("z", 0), lambda x: x[:, :, 1:3].zero_())),
    "uniform, new queries": lambda m, s: (
        ablate.uniform("all", positions="new"),
        lambda site, layer, x: _uniform(x) if site == "pattern" else x,
    ),
    "uniform over keys": lambda m, s: (
        ablate.uniform("1.0", keys=[0, -1], positions=range(PROMPT, PROMPT + 3)),
        at(("pattern", 1), _uniform_over_keys),
    ),
    "a patch of the prompt": lambda m, s: (
        patch.activations("z.0", source=s, positions="prompt"),
        at(("z", 0), _put(slice(0, PROMPT), _of(m, s, "z.0"))),
    ),
    "a patch at some positions": lambda m, s: (
        patch.activations("resid_post.0", source=s[:1], positions=[0, -2]),
        at(("resid_post", 0), _put([0, PROMPT - 2], _of(m, s[:1], "resid_post.0"))),
    ),
    "a patch of new ones": lambda m, s: (
        patch.activations("resid_post.0", source=_long(s), positions="new"),
        at(("resid_post", 0), _put(slice(PROMPT, None), _of(m, _long(s), "resid_post.0"))),
    ),
    "the mean by position, of long examples": lambda m, s: (
        ablate.mean("mlp_out.0", reference=_long(s)),
        at(
            ("mlp_out", 0), _put(slice(None), lambda x: _of(m, _long(s), "mlp_out.0")(x).mean(0).expand_as(x))
        ),
    ),
    "a patch of patterns": lambda m, s: (
        patch.activations("pattern", source=cache(m, s, "pattern"), positions="prompt"),
        lambda site, layer, x: _patterns(x, m, s, layer) if site == "pattern" else x,
    ),
    "a patch of scores": lambda m, s: (
        patch.activations("scores.1", source=s, positions="prompt"),
        at(("scores", 1), lambda x: x[:, :, :PROMPT, :PROMPT].copy_(cache(m, s, "scores")["scores.1"])),
    ),
    "the mean by position": lambda m, s: (
        ablate.mean("mlp_out.1", reference=s, positions="prompt"),
        at(
            ("mlp_out", 1),
            _put(slice(0, PROMPT), lambda x: _of(m, s, "mlp_out.1")(x).mean(0).expand_as(x)),
        ),
    ),
    "one mean for all": lambda m, s: (
        ablate.mean("mlp_out.1", reference=s, over="batch,pos"),
        at(("mlp_out", 1), lambda x: x.copy_(cache(m, s, "mlp_out")["mlp_out.1"].mean((0, 1)))),
    ),
}


def _masked(x):
    for row, position in ((0, 0), (0, 3), (1, 1)):
        x[row, position] = 3 - x[row, position]


def _uniform(x):
    seen = (x > 0).to(x.dtype)
    x[:, :, PROMPT:] = (seen / seen.sum(-1, keepdim=True))[:, :, PROMPT:]
    return x


def _uniform_over_keys(x):
    queries = slice(PROMPT, PROMPT + 3)
    seen = torch.zeros_like(x[:, 0, queries])
    seen[..., [0, PROMPT - 1]] = (x[:, 0, queries][..., [0, PROMPT - 1]] > 0).to(x.dtype)
    x[:, 0, queries] = seen / seen.sum(-1, keepdim=True)


def _long(source):
    """A source with as many positions as the model generates."""
    return torch.cat([source, source.flip(1), source], 1)[:, : PROMPT + NEW]


def _of(model, source, site):
    """The source's activation, with whatever beyond its end."""
    stored = cache(model, source, site)[site]

    def value(x):
        x, length = x.clone(), min(x.shape[1], stored.shape[1])
        x[:, :length] = stored[:, :length]
        return x

    return value


def _patterns(x, model, source, layer):
    x[:, :, :PROMPT] = 0
    x[:, :, :PROMPT, :PROMPT] = cache(model, source, "pattern")[f"pattern.{layer}"]
    return x


@pytest.mark.parametrize("case", CASES)
def test_generation_is_the_loop_by_hand(rotary, by_hand, prompt, source, case):
    one, change = CASES[case](rotary, source)
    tokens, logits = loop(by_hand, rotary, prompt, change)
    _, plain = loop(by_hand, rotary, tokens[:, :PROMPT], lambda site, layer, x: x)
    effect = (logits - plain).abs().max()
    assert effect > 0.01 * plain.std()
    for use_cache in (True, False):
        found, steps = generated(rotary, prompt, one, use_cache=use_cache)
        assert torch.equal(found, tokens)
        assert (steps - logits).abs().max() <= 1e-5 * effect


HUGGING_FACE = ["gpt2", "llama", "mistral", "gemma2", "pythia"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face(hf_model, name, case, prompt, source):
    from tests.circuits import families

    model, prompt, source = hf_model(name), prompt + 3, source + 3
    if (name, case) in UNSERVED or (case == "keys of one head" and name not in ("gpt2", "pythia")):
        pytest.skip("the model has no such site, or no such head")
    one, change = CASES[case](model, source)
    tokens, logits = loop(families.forward, model, prompt, change)
    _, plain = loop(families.forward, model, prompt, lambda site, layer, x: x)
    effect = (logits - plain).abs().max()
    assert effect > 0.01 * plain.std()
    for use_cache in (True, False):
        found, steps = generated(model, prompt, one, use_cache=use_cache)
        assert torch.equal(found, tokens)
        assert (steps - logits).abs().max() <= 1e-5 * effect
    calls = []
    with intervene(model, one), model.original_model.register_forward_hook(lambda *given: calls.append(1)):
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        again = model.original_model.generate(prompt, **settings)
    assert torch.equal(again, tokens)
    assert len(calls) == NEW


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_stays_empty_is_refused(hf_model, name, prompt, monkeypatch):
    """As that of bridges under transformers 5.24: other tokens than without a cache, in silence."""
    from transformers import DynamicCache

    model, one = hf_model(name), ablate.zero("0.1")
    expected, _ = generated(model, prompt + 3, one)
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *given, **named: (keys, values))
    with pytest.raises(CircuitsError, match=r"cache .* stays empty.*use_past_kv_cache=False"):
        generated(model, prompt + 3, one)
    assert torch.equal(generated(model, prompt + 3, one, use_cache=False)[0], expected)


UNSERVED = {("pythia", "steering, the prompt")}


# Prompts of these lengths, padded on the left.
LENGTHS = (4, 2, 3)
_LEARNED = {"attention_dir": "causal", "n_ctx": 16}
PADDED = {
    "learned": ("HookedTransformer", _LEARNED),
    "rotary": ("HookedTransformer", ROTARY),
    "bridge, learned": ("TransformerBridge", _LEARNED),
    "bridge, rotary": ("TransformerBridge", ROTARY),
    **{name: (None, {}) for name in HUGGING_FACE},
}

# The edit of a batch, from the model, its sources and a side for their padding; and that of one of its prompts alone.
PADDED_CASES = {
    "all positions": lambda m, s, side: _everywhere(edit("resid_post.0", pushed)),
    "new ones": lambda m, s, side: _everywhere(edit("resid_post.0", pushed, positions="new")),
    "the prompt": lambda m, s, side: _everywhere(edit("mlp_out.0", pushed, positions="prompt")),
    "positions": lambda m, s, side: _everywhere(edit("attn_out.0", pushed, positions=[0, -2, 3])),
    "a slice": lambda m, s, side: _everywhere(edit("resid_post.0", pushed, positions=slice(-1, 4))),
    "zero": lambda m, s, side: _everywhere(ablate.zero("0.1, 1.2", positions=[1, 3])),
    "uniform": lambda m, s, side: _everywhere(ablate.uniform("all")),
    "uniform over keys": lambda m, s, side: _everywhere(
        ablate.uniform("1.0", keys=[0, -1], positions=slice(-1, 4))
    ),
    "one mean for all": lambda m, s, side: _everywhere(
        ablate.mean("mlp_out.1", prompts(m, s, side), over="batch,pos")
    ),
    "the mean by position": lambda m, s, side: _everywhere(
        ablate.mean("mlp_out.1", prompts(m, s, side), positions=[0, 1])
    ),
    "a patch": lambda m, s, side: (
        patch.activations("resid_post.0", prompts(m, s, side), positions="prompt"),
        lambda row: patch.activations("resid_post.0", s[row][None], positions="prompt"),
    ),
    "a patch of patterns": lambda m, s, side: (
        patch.activations("pattern.1", cache(m, prompts(m, s, side), "pattern"), positions=[1, -1]),
        lambda row: patch.activations("pattern.1", s[row][None], positions=[1, -1]),
    ),
    "a patch of scores": lambda m, s, side: (
        patch.activations("scores.0", prompts(m, s, side), positions="prompt"),
        lambda row: patch.activations("scores.0", s[row][None], positions="prompt"),
    ),
    "a patch from other positions": lambda m, s, side: (
        patch.activations("z.0", prompts(m, s, side), positions=[-1, 4], source_positions=[0, -1]),
        lambda row: patch.activations("z.0", s[row][None], positions=[-1, 4], source_positions=[0, -1]),
    ),
    "a mask": lambda m, s, side: (
        edit("q.1", pushed, positions=torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0]]).bool()),
        lambda row: edit("q.1", pushed, positions=[[0, 3], [0], [1]][row]),
    ),
}


def _everywhere(one):
    return one, lambda row: one


@pytest.fixture
def padded_model(request, make_model, hf_model):
    import transformer_lens

    family, settings = PADDED[request.param]
    if family is None:
        model, first = (
            hf_model(request.param, "compatible" if request.param not in ("gpt2", "pythia") else "raw"),
            3,
        )
    elif family == "HookedTransformer" and family not in vars(transformer_lens):
        pytest.skip("the installed transformer-lens has no HookedTransformer")
    else:
        model, first = make_model(family=family, n_layers=2, **settings), 0
        if family == "HookedTransformer":
            model.tokenizer = SimpleNamespace(
                pad_token_id=10, bos_token_id=98, eos_token_id=97, padding_side="left", name_or_path=""
            )
    generator = torch.Generator().manual_seed(3)
    rows, others = (
        [first + torch.randint(0, 10, (length,), generator=generator) for length in LENGTHS] for _ in range(2)
    )
    return model, rows, others


def left_padded(rows, pad):
    longest = max(map(len, rows))
    found = torch.full((len(rows), longest), pad)
    for row, line in zip(rows, found, strict=True):
        line[longest - len(row) :] = row
    mask = torch.arange(longest) >= longest - torch.tensor([[len(row)] for row in rows])
    return found, mask.long()


@pytest.fixture(scope="module")
def unedited():
    """Logits of each prompt alone and unedited, by model; a model is the same in every case."""
    known = {}

    def look_up(name, model, number, row, use_cache):
        key = (name, number, use_cache)
        if key not in known:
            known[key] = generated(model, row[None], use_cache=use_cache)[1]
        return known[key]

    return look_up


@pytest.mark.parametrize("case", PADDED_CASES)
@pytest.mark.parametrize("padded_model", PADDED, indirect=True)
def test_prompts_of_unequal_length(padded_model, case, unedited, request):
    """A batch that is padded on the left gives what each prompt gives alone."""
    model, rows, others = padded_model
    name = request.node.callspec.params["padded_model"]
    if name == "pythia" and case in ("all positions",):
        pytest.skip("the model has no such site")
    tokens, mask = left_padded(rows, 0 if name in HUGGING_FACE else 10)
    hooked = PADDED[name][0] == "HookedTransformer"
    given = {} if hooked else {"attention_mask": mask}
    one, alone = PADDED_CASES[case](model, others, "right")
    with_left, _ = PADDED_CASES[case](model, others, "left")
    for use_cache in (True, False):
        found, steps = generated(model, tokens, one, use_cache=use_cache, **given)
        again, _ = generated(model, tokens, with_left, use_cache=use_cache, **given)
        assert torch.equal(again, found)
        moved = 0.0
        for number, row in enumerate(rows):
            expected, logits = generated(model, row[None], alone(number), use_cache=use_cache)
            plain = unedited(name, model, number, row, use_cache)
            effect = (logits - plain).abs().max()
            moved = max(moved, float(effect / plain.std()))
            assert torch.equal(found[number, -NEW:], expected[0, -NEW:])
            assert (steps[number] - logits[0]).abs().max() <= 1e-5 * plain.std()
        assert moved > 0.01


@pytest.mark.parametrize("case", ["new ones", "positions", "a slice", "uniform over keys", "a patch"])
@pytest.mark.parametrize("padded_model", ["learned", "rotary"], indirect=True)
def test_a_loop_with_a_cache_by_hand_over_padding(padded_model, case):
    """A call has the mask of its own tokens, the cache that of those before."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model, rows, others = padded_model
    tokens, mask = left_padded(rows, 10)
    one, alone = PADDED_CASES[case](model, others, "right")
    expected = [generated(model, row[None], alone(number))[1][0] for number, row in enumerate(rows)]
    for call in (model, model.run_with_hooks):
        past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(rows))
        given, of_given = tokens, mask
        with intervene(model, one):
            for step in range(NEW):
                found = call(given, past_kv_cache=past, attention_mask=of_given)[:, -1]
                for number, logits in enumerate(expected):
                    assert (found[number] - logits[step]).abs().max() <= 1e-5 * logits.std()
                given = found.argmax(-1, keepdim=True)
                of_given = torch.ones_like(given)


@pytest.mark.parametrize("padded_model", ["rotary", "bridge, learned", "gpt2"], indirect=True)
def test_what_prompts_of_unequal_length_refuse(padded_model, request):
    model, rows, others = padded_model
    name = request.node.callspec.params["padded_model"]
    tokens, mask = left_padded(rows, 0 if name in HUGGING_FACE else 10)
    given = {} if PADDED[name][0] == "HookedTransformer" else {"attention_mask": mask}
    push = lambda where: edit("resid_post.0", pushed, positions=where)  # noqa: E731
    for text, one in (
        ("no position -3: the shortest prompt has positions 0-1", push([0, -3])),
        ("no position 7: the model generated up to position 5", push(7)),
        (
            "no position 4 in the source, which has 4; name those",
            patch.activations("z", prompts(model, others)),
        ),
        (
            r'no position 4 in the reference, which has 4.*over="batch,pos"',
            ablate.mean("z", prompts(model, others)),
        ),
    ):
        for use_cache in (True, False):
            with pytest.raises(CircuitsError, match=text):
                generated(model, tokens, one, use_cache=use_cache, **given)


def test_two_edits_at_once_and_nested_blocks(rotary, by_hand, prompt, source):
    first, by_first = CASES["steering, new ones"](rotary, source)
    second, by_second = CASES["a patch of the prompt"](rotary, source)
    tokens, logits = loop(by_hand, rotary, prompt, lambda *given: by_second(*given[:2], by_first(*given)))
    for use_cache in (True, False):
        found, steps = generated(rotary, prompt, first, second, use_cache=use_cache)
        with intervene(rotary, first):
            nested, again = generated(rotary, prompt, second, use_cache=use_cache)
        assert torch.equal(found, tokens)
        assert torch.equal(nested, tokens)
        assert (steps - logits).abs().max() < 1e-6
        assert (again - logits).abs().max() < 1e-6


def test_each_generation_has_a_prompt_of_its_own(rotary, by_hand, prompt, source):
    """The second prompt is all that the first generation gave: then none of it is new."""
    push = edit("resid_post.0", pushed, positions="new")
    for use_cache in (True, False):
        with intervene(rotary, push):
            first = rotary.generate(prompt, use_past_kv_cache=use_cache, **GREEDY)
            second = rotary.generate(first[:, : PROMPT + 1], use_past_kv_cache=use_cache, **GREEDY)
        longer = at(("resid_post", 0), _put(slice(PROMPT + 1, None), pushed))
        assert torch.equal(second, loop(by_hand, rotary, first[:, : PROMPT + 1], longer)[0])


def test_learned_positions_with_the_cache(make_model, hooked_only, by_hand, prompt, source):
    """transformer-lens finds the position of a cached token from the tokenizer's mask; without one it is wrong."""
    model = make_model(n_layers=2, n_ctx=16, attention_dir="causal")
    model.tokenizer = SimpleNamespace(
        pad_token_id=99, bos_token_id=98, eos_token_id=97, padding_side="right", name_or_path=""
    )
    for case in ("steering, new ones", "a patch of the prompt", "negative ones count in the prompt"):
        one, change = CASES[case](model, source)
        tokens, logits = loop(by_hand, model, prompt, change)
        for use_cache in (True, False):
            found, steps = generated(model, prompt, one, use_cache=use_cache)
            assert torch.equal(found, tokens)
            assert (steps - logits).abs().max() < 1e-8


def test_a_loop_with_a_cache_by_hand(make_model, hooked_only, by_hand, prompt, source):
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model = make_model(n_layers=2, **ROTARY)
    for case in ("steering, new ones", "positions are absolute", "a patch of the prompt"):
        one, change = CASES[case](model, source)
        tokens, logits = loop(by_hand, model, prompt, change)
        for call in (model, model.run_with_hooks):
            past = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(prompt))
            given = prompt
            with intervene(model, one):
                for step in range(NEW):
                    mask = torch.ones_like(given)
                    found = call(given, past_kv_cache=past, attention_mask=mask)[:, -1]
                    assert (found - logits[:, step]).abs().max() < 1e-8
                    given = tokens[:, PROMPT + step : PROMPT + step + 1]


def test_loops_with_a_cache_each_may_take_turns(make_model, hooked_only, tokens):
    """Their prompts have lengths of their own: each loop gives what it gives alone."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model = make_model(n_layers=2, **ROTARY)
    alike = torch.tensor([[3]])

    def steps(text):
        past, given = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1), text
        for _ in range(NEW):
            mask = torch.ones_like(given)
            yield model(given, past_kv_cache=past, attention_mask=mask)[:, -1]
            given = alike

    texts = [tokens[:1, :PROMPT], tokens[1:2, : PROMPT - 1], tokens[2:3, :PROMPT]]
    for positions in ("new", [-1], slice(0, -1)):
        one = edit("resid_post.0", pushed, positions=positions)
        alone = []
        for text in texts:
            with intervene(model, one):
                alone.append(list(steps(text)))
        with intervene(model, one):
            in_turns = list(zip(*map(steps, texts), strict=True))
        for turn, own in zip(in_turns, zip(*alone, strict=True), strict=True):
            assert all(map(torch.equal, turn, own))


def test_a_hook_that_runs_the_model_is_no_part_of_the_generation(rotary, prompt, source):
    one, _ = CASES["steering, new ones"](rotary, source)
    running = []

    def look(module, args, out):
        if not running:
            running.append(True)
            rotary(source[:, :2])
            running.clear()

    handle = rotary.ln_final.register_forward_hook(look)
    try:
        with pytest.raises(CircuitsError, match="this run generates nothing"):
            generated(rotary, prompt, one)
    finally:
        handle.remove()


def test_a_stream_of_tokens(rotary, by_hand, prompt, source):
    if not hasattr(type(rotary), "generate_stream"):
        pytest.skip("this transformer-lens has no generate_stream")
    _, change = CASES["steering, new ones"](rotary, source)
    one = edit("resid_post.0", pushed, positions=slice(PROMPT, None))
    tokens, _ = loop(by_hand, rotary, prompt, change)
    settings = {**GREEDY, "return_type": "tokens", "max_tokens_per_yield": 1, "use_past_kv_cache": False}
    with intervene(rotary, one):
        pieces = []
        for piece in rotary.generate_stream(prompt, **settings):
            pieces.append(piece)
            rotary(source)  # between two steps: a run of its own, with a prompt of its own
    assert torch.equal(torch.cat(pieces, 1)[:, -NEW:], tokens[:, PROMPT:])


def test_what_cannot_take_effect_is_refused(rotary, prompt, source):
    def refused(text, *given, **settings):
        return pytest.raises(CircuitsError, match=text), given, settings

    push = lambda where: edit("resid_post.0", pushed, positions=where)  # noqa: E731
    cases = [
        ("no position 40: the model generated up to position 7", push([0, 40])),
        ("none of its positions came in 5 run", push(slice(20, None))),
        ("no position -9: the prompt has positions 0-3", push(-9)),
        (r"the mask is \[batch pos\] = \[3, 5\]", push(torch.ones(3, 5).bool())),
        ("no position 4 in the source, which has 4; name those", patch.activations("z", source=source)),
        (
            r'no position 4 in the reference, which has 4.*over="batch,pos"',
            ablate.mean("z", reference=source),
        ),
        ("paths are not supported while", patch.path("0.1", "output", source=source)),
        (
            "not supported while the model generates",
            ablate.mean_pattern("all", reference=source, of="edited"),
        ),
    ]
    for text, one in cases:
        for use_cache in (True, False):
            with pytest.raises(CircuitsError, match=text):
                generated(rotary, prompt, one, use_cache=use_cache)
    before = rotary.generate(prompt, **GREEDY)
    assert torch.equal(before, generated(rotary, prompt)[0])


def test_outside_of_a_generation(rotary, tokens):
    push = lambda where: edit("resid_post.0", pushed, positions=where)  # noqa: E731
    assert torch.equal(run(rotary, tokens, push("prompt")), run(rotary, tokens, push(None)))
    assert torch.equal(run(rotary, tokens, push(slice(2, -1))), run(rotary, tokens, push([2, 3, 4])))
    for call in (lambda one: run(rotary, tokens, one), lambda one: sweep(rotary, tokens, {"new": one})):
        with pytest.raises(CircuitsError, match="this run generates nothing"):
            call(push("new"))
    table = sweep(rotary, tokens, {"slice": push(slice(2, -1)), "list": push([2, 3, 4])}).frame
    kl = table[table.metric == "kl"].value
    assert kl.iloc[0] == kl.iloc[1] > 0
    for none in (slice(6, None), slice(3, 2), slice(0, -6)):
        with pytest.raises(
            CircuitsError, match=r"none of its positions came in 1 run\(s\), so nothing was edited"
        ):
            run(rotary, tokens, push(none))
        with pytest.raises(
            CircuitsError, match=r"none of its positions came in 1 run\(s\), so nothing was edited"
        ):
            run(rotary, tokens, patch.path("0.1", "output", source=tokens.roll(1, 0), positions=none))
    # In a part of a sweep all prompts may be too short for it, in the whole they are not.
    given, other = (
        prompts(rotary, [row[:n].tolist() for row, n in zip(of, (2, 6), strict=True)])
        for of in (tokens[:2], tokens[2:4])
    )
    late = patch.path("0.1", "output", source=other, positions=slice(4, None))
    metric = logit_difference(1, 2)
    table = sweep(rotary, given, {"late": late}, metric, engine="naive", batch_size=1, draws=2, flips=2).frame
    assert table["value"][0] == pytest.approx(
        float(metric(run(rotary, given, late), given, rotary).mean()), rel=1e-5
    )
    assert table["effect"][0] != 0
    with intervene(rotary, push(slice(5, None))):  # a loop of one's own, without a cache
        short, long = rotary(tokens[:, :5]), rotary(tokens)
    assert torch.equal(short, run(rotary, tokens[:, :5]))
    assert torch.equal(long, run(rotary, tokens, push([5])))
    with pytest.raises(CircuitsError, match="has no step"):
        push(slice(0, 4, 2))
    with pytest.raises(CircuitsError, match="no position 9: the run has positions 0-5"):
        run(rotary, tokens, push(9))
    assert push("new").describe()["positions"] == "new"
    assert push(slice(2, None)).describe()["positions"] == "2:"


def test_position_embeddings_of_hooked_transformers_generation(make_model, hooked_only, prompt):
    model = make_model(n_layers=1, n_ctx=16, attention_dir="causal")
    with pytest.raises(CircuitsError, match=r"positions are unknown; edit resid_pre\.0"):
        generated(model, prompt, edit("pos_embed", pushed, positions="new"), use_cache=False)
    _, without = generated(model, prompt, ablate.zero("pos_embed"), use_cache=False)
    _, clean = generated(model, prompt, use_cache=False)
    assert not torch.equal(without, clean)


def test_the_model_keeps_no_trace(rotary, prompt):
    own = {"generate", "generate_stream", "hf_generate"}
    expected = rotary.generate(prompt, **GREEDY)
    one, two = (intervene(rotary, edit("resid_post.0", pushed)) for _ in range(2))
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
