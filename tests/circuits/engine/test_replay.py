"""The replay of models of every kind, against one full forward per variant with plain hooks, which is its oracle."""

import copy
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from circuits import Prompts, Site, ablate, edit, heads, patch, prompts, sweep
from circuits.engine.engine import Engine
from circuits.engine.parts import HALF, Norm
from circuits.engine.replay import NotReplayed, Replay
from circuits.model.surface import Surface
from tests.circuits.conftest import FAMILIES, FEATURES, HOOKED

FEW = {"draws": 2, "flips": 2}
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}
LENGTH = 6


def total(output):
    """A metric that tells outputs apart, example by example, of what is read."""
    output = output.double()
    weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (output * weights).nan_to_num().flatten(1).sum(1)


def variants(model, other):
    """Every kind of edit at every site that the model has."""
    surface = Surface.of(model)
    last, sites = surface.n_layers - 1, surface.site_names()
    group = "0.k0" if surface.key_value_heads < surface.n_heads else "0.0"
    found = {
        **ablate.each(ablate.zero, heads("all", model)),
        "two layers": ablate.zero(f"0.1, {last}.2"),
        "patch": patch.activations("z", other, heads=f"{last}.1"),
        "positions": patch.activations("z", other, heads="0.0-2", positions=[2]),
        "mean": ablate.mean("0.1", reference=other),
        "q": patch.activations("q", other, heads="0.3"),
        "k": patch.activations("k", other, heads=group),
        "v": patch.activations("v", other, heads=group),
        "what attention adds": ablate.zero(Site("attn_out", last)),
        "stream": patch.activations(Site("resid_pre", last), other, positions=[1]),
        "after": patch.activations(Site("resid_post", 0), other, positions=[2]),
        "embed": edit("embed", lambda x: 1.5 * x, positions=[1]),
    }
    if "pattern" in sites:
        found |= {
            "uniform": ablate.uniform("0.1"),
            "uniform everywhere": ablate.uniform("all"),
            "uniform, then zero": (ablate.uniform("0.1"), ablate.zero("0.1", queries=[0, 2])),
            "uniform of edited scores": (ablate.zero(Site("scores", 0)), ablate.uniform("0.1")),
            "scores": patch.activations("scores", other, heads="0.2"),
            "pattern": patch.activations(Site("pattern", last), other),
            "mean pattern": ablate.mean_pattern("all", reference=other),
        }
    if "mlp_out" in sites:
        found |= {
            "neurons": ablate.neurons(last, [1, 5, 7], how="mean", reference=other),
            "before the activation": patch.activations("mlp_pre.0", other, neurons=[3, 4]),
            "what the MLP adds": edit("mlp_out", lambda x: -x, positions=[1]),
            "a head and neurons": (ablate.zero("0.1"), ablate.neurons(0, [1, 2])),
        }
    if "resid_mid" in sites:
        found["middle"] = patch.activations("resid_mid", other, positions=[0])
    return found


def drawn(seed=0, low=0, high=11):
    return torch.randint(low, high, (5, LENGTH), generator=torch.Generator().manual_seed(seed))


def both(model, tokens, given, **options):
    found = [
        sweep(model, tokens, given, metric=total, engine=one, **FEW, **options) for one in ("auto", "naive")
    ]
    assert list(found[0].frame["variant"]) == list(found[1].frame["variant"])
    return found


def same(model, tokens, other, bound=None, engine="fast", **options):
    """Both engines give the same effects, to `bound` of the largest."""
    fast, naive = both(model, tokens, variants(model, other), **options)
    assert set(fast.frame["engine"]) == {engine}, fast.settings["naive"]
    bound = bound or BOUND[next(model.parameters()).dtype]
    largest = naive.frame["effect"].abs().max()
    assert largest > 0
    assert (fast.frame["effect"] - naive.frame["effect"]).abs().max() <= bound * largest
    assert list(fast.frame["null_effect"]) == list(naive.frame["null_effect"])


EVERY = [
    (name, family)
    for name, (_, families) in FEATURES.items()
    for family in families
    if family in FAMILIES and name != "alibi"
]


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_every_setting(make_model, name, family):
    if name.startswith("solu") and HOOKED not in FAMILIES:
        pytest.skip(
            "the native bridge of transformer-lens 4 computes another MLP there, which the check finds"
        )
    same(make_model(3, family, **FEATURES[name][0]), drawn(), drawn(1))


def test_positions_that_are_not_replayed(make_model, hooked_only):
    model = make_model(3, positional_embedding_type="alibi")
    result = sweep(model, drawn(), {"a": ablate.zero("0.1")}, metric=total, **FEW)
    assert result.settings["naive"] == {"a": "positional_embedding_type=alibi is not replayed"}


@pytest.mark.parametrize("name", ["llama", "local", "parallel", "gemma"])
@pytest.mark.parametrize("positions", [[-1], [0, 3]])
def test_positions_that_are_read(make_model, hooked_only, name, positions):
    model = make_model(3, hooked_only, **FEATURES[name][0])
    same(model, drawn(), drawn(1), positions=positions, chunk=3 * LENGTH)


# ---- Combinations of settings

POSITIONS = [
    {},
    {"positional_embedding_type": "rotary"},
    {"positional_embedding_type": "rotary", "rotary_dim": 2, "rotary_adjacent_pairs": True},
]
NORMS = [None, "LN", "LNPre", "RMS", "RMSPre"]


@st.composite
def settings(draw):
    """Any combination of what HookedTransformer has."""
    chosen = {
        **draw(st.sampled_from(POSITIONS)),
        "normalization_type": draw(st.sampled_from(NORMS)),
        "n_key_value_heads": draw(st.sampled_from([None, 1, 2])),
        "gated_mlp": draw(st.booleans()),
        "parallel_attn_mlp": draw(st.booleans()),
        "act_fn": draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu", "gelu_fast"])),
        "attn_scores_soft_cap": draw(st.sampled_from([-1.0, 2.0])),
        "output_logits_soft_cap": draw(st.sampled_from([-1.0, 3.0])),
        "final_rms": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "attn_scale": draw(st.sampled_from([-1.0, 3.0])),
    }
    if draw(st.booleans()):
        chosen |= {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 2}
    if str(chosen["normalization_type"]).startswith("RMS"):
        chosen["use_normalization_before_and_after"] = draw(st.booleans())
    return chosen


@hypothesis.given(chosen=settings(), seed=st.integers(0, 100), side=st.sampled_from([None, "left", "right"]))
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_combination(make_model, dtype, chosen, seed, side):
    if HOOKED not in FAMILIES:
        pytest.skip("a native bridge has few of these settings")
    model = make_model(seed, HOOKED, **chosen).to(dtype)
    model.cfg.dtype = dtype
    tokens, other = drawn(seed), drawn(seed + 1)
    if side is not None:
        lengths = [6, 3, 4, 5, 6]
        tokens, other = (
            prompts(model, [row[:n] for row, n in zip(one, lengths, strict=True)], side)
            for one in (tokens, other)
        )
    same(model, tokens, other)


# ---- Half precision


def rounding(model, tokens, given):
    """What half precision moves the effects by: those of the same weights in single precision."""
    wide = copy.deepcopy(model).float()
    wide.cfg.dtype = torch.float32
    naive = [sweep(one, tokens, given, metric=total, engine="naive", **FEW).frame for one in (model, wide)]
    return (naive[0]["effect"] - naive[1]["effect"]).abs().max()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["causal", "llama", "gemma", "parallel", "olmo2", "rotary by parts"])
def test_half_precision(make_model, family, name, dtype):
    changes, families = FEATURES.get(name, ({}, FAMILIES))
    if family not in families:
        pytest.skip(f"a {family} has no such settings")
    model = make_model(3, family, **changes).to(dtype)
    model.cfg.dtype = dtype
    tokens, given = drawn(), variants(model, drawn(1))
    fast, naive = both(model, tokens, given)
    assert set(fast.frame["engine"]) == {"fast"}, fast.settings["naive"]
    bound = 2 * rounding(model, tokens, given)
    assert (fast.frame["effect"] - naive.frame["effect"]).abs().max() <= bound
    # And the bound tells variants apart.
    assert bound < 0.1 * naive.frame["effect"].abs().max()


# ---- Bridges around Hugging Face models

REPLAYED = ("gpt2", "pythia", "neox", "llama", "qwen2", "mistral", "gemma2", "qwen3", "phi", "opt")


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize(("mode", "dtype"), [("raw", torch.float64), ("compatible", torch.float32)])
def test_huggingface(hf_model, name, mode, dtype):
    model = hf_model(name, mode, dtype)
    # transformer-lens 4 has a hook on its MLP, which might do anything.
    engine = "resumed" if name == "opt" and HOOKED not in FAMILIES else "fast"
    same(model, drawn(0, 3, 50), drawn(1, 3, 50), engine=engine)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "pythia"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_huggingface_with_padding(hf_model, name, side):
    model = hf_model(name)
    lengths = [6, 3, 4, 5, 6]
    tokens, other = (
        prompts(model, [row[:n] for row, n in zip(drawn(seed, 3, 50), lengths, strict=True)], side)
        for seed in (0, 1)
    )
    same(model, tokens, other, positions=[-1])


def test_huggingface_in_half_precision(hf_model):
    for name in ("gpt2", "llama", "pythia"):
        fast, _ = both(hf_model(name, "raw", torch.bfloat16), drawn(0, 3, 50), {"a": ablate.zero("0.1")})
        assert set(fast.frame["engine"]) == {"fast"}, fast.settings["naive"]


def test_attention_of_other_classes(hf_model):
    for name, kind in (("gptj", "GPTJAttention"), ("bert", "BertAttention")):
        result = sweep(hf_model(name), drawn(0, 3, 50), {"a": ablate.zero("0.1")}, metric=total, **FEW)
        assert result.settings["naive"] == {"a": f"attention of the class {kind} is not replayed"}


# ---- A tokenizer


def test_a_tokenizer_changes_nothing(make_model, hooked_only):
    from tests.circuits import families

    model = make_model(3, hooked_only)
    left = SimpleNamespace(pad_token_id=10, bos_token_id=None, eos_token_id=None, padding_side="left")
    for model.tokenizer in (families.tokenizer(), left):
        same(model, drawn(0, 0, 10), drawn(1, 0, 10))


# ---- Misreadings

# What no example without edits can show, what shapes show, and where a result of half precision is rounded.
UNSEEN = ("blind", "mask_value", "heads", "groups", "kind", "rounded_last")


def leaves(part, path=()):
    """Yields (path, value) of every field of a description that is not itself made of parts."""
    if isinstance(part, tuple):
        for index, one in enumerate(part):
            yield from leaves(one, (*path, index))
    elif is_dataclass(part) and getattr(part, "kind", "") is not None:
        for one in fields(part):
            if one.name not in UNSEEN:
                yield from leaves(getattr(part, one.name), (*path, one.name))
    else:
        yield path, part


def put(part, path, value):
    """Returns a description with another value at a path."""
    name, *rest = path
    if isinstance(part, tuple):
        return (*part[:name], put(part[name], rest, value) if rest else value, *part[name + 1 :])
    return replace(part, **{name: put(getattr(part, name), rest, value) if rest else value})


def misread(path, value, replay):
    """Another value of a field; None where there is none that means something else."""
    name, half = path[-1], replay.dtype in HALF
    if isinstance(value, torch.Tensor):
        # What half precision does not tell apart is not told apart.
        return 2 * value + 1 if half else 1.01 * value
    if isinstance(value, Norm):
        return Norm("RMS", 1e-5)
    if name == "norms_join_heads" and replay.blocks[path[1]].attention.q_norm.kind is None:
        return None
    if isinstance(value, bool):
        return not value
    if callable(value):
        return torch.tanh
    return {
        "eps": lambda: value + 1.0,
        "scale": lambda: 1.5 * value,
        "window": lambda: 3 if value is None else value + 1,
        "cap": lambda: 1.0,
    }.get(name, lambda: None)()


READ = {
    "learned positions": {"normalization_type": "LN"},
    "post-norm": {"norm": "post", "act_fn": "gelu"},
    "parallel": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "act_fn": "gelu"},
    **{name: FEATURES[name][0] for name in ("llama", "gemma", "rotary by parts", "olmo2", "gated")},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", READ)
def test_every_misreading_is_found(make_model, hooked_only, monkeypatch, name, dtype):
    """Whichever field of the description is another: the check says so."""
    model = make_model(3, hooked_only, **READ[name]).to(dtype)
    model.cfg.dtype = dtype
    surface, tokens = Surface.of(model), Prompts(drawn())
    right = Replay.of(surface, length=LENGTH)
    missed, tried = [], 0
    with torch.no_grad():
        Engine(surface, tokens, None)
        for path, value in leaves(right):
            wrong = misread(path, value, right)
            if wrong is None:
                continue
            tried += 1
            found = put(right, path, wrong)
            monkeypatch.setattr(Replay, "of", lambda *given, found=found, **named: found)
            try:
                Engine(surface, tokens, None)
                missed.append(".".join(map(str, path)))
            except NotReplayed:
                pass
    assert tried > 20
    assert not missed
