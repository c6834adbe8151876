"""Models that are in no table: refused, compared on request, or served because their user says so."""

from importlib.metadata import version

import pytest
import torch

from circuits import CircuitsError, ablate, check, edit, patch, run, sweep, unchecked
from circuits.model import supported_models
from circuits.model.bridge_hooks import HuggingFaceBridgeHooks
from circuits.model.hooked_model import HookedModel

TOKENS = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def families():
    return pytest.importorskip("tests.circuits.families")


def differing(frame):
    return set(frame.loc[frame["verdict"] != "same", "site"])


def last(output):
    return output[:, -1, 3] - output[:, -1, 4]


def test_every_site_of_a_model_in_the_table_is_found_the_same(model):
    frame = check(model)
    rotary = model.cfg.positional_embedding_type == "rotary"
    assert differing(frame) <= ({"pos_embed"} if rotary else set())
    assert frame["difference"].max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt", "bert"])
def test_every_site_of_a_family_in_the_table_is_found_the_same(hf_model, families, name):
    """Two derivations that share nothing: the table was tested by a forward by hand."""
    model = hf_model(name)
    state = torch.random.get_rng_state()
    frame = check(model, TOKENS)
    assert differing(frame) == set()
    assert set(frame["site"]) == HookedModel(model).huggingface.family.sites
    assert torch.equal(torch.random.get_rng_state(), state)


# What each lacks: it is not there, is not what is added to the stream, or is not shown. docs/circuits/index.md says so.
def lacking(families, name):
    less = families.UNLISTED[name][2]
    if name == "olmo2" and version("transformer-lens").startswith("3."):
        less = less | {"attn_out", "resid_mid", "mlp_out"}
    return less


@pytest.mark.parametrize(
    "name",
    [
        "granite",
        "gpt-oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ["bloom", "phi3", "falcon", "falcon-rw"]),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ["mixtral", "olmo2", "gemma3"]),
    ],
)
def test_another_family_is_refused_until_its_user_decides(hf_model, families, name):
    model = hf_model(name, fresh=True, dtype=torch.float32)
    with pytest.raises(
        CircuitsError, match=r"was not tested: circuits\.check.*circuits\.unchecked\(model\) uses it without$"
    ) as error:
        run(model, TOKENS, ablate.zero("1.2"))
    assert "\n" not in str(error.value)
    frame = check(model, TOKENS)
    less = lacking(families, name)
    assert differing(frame) <= less
    clean, zeroed = run(model, TOKENS), run(model, TOKENS, ablate.zero("1.2"))
    assert float((zeroed - clean).abs().max()) > 1e-3 * float(clean.std())
    for site in less:
        with pytest.raises(CircuitsError, match=f"no site {site} in this model"):
            run(model, TOKENS, edit(site, torch.zeros_like))
    assert "unchecked" not in sweep(model, TOKENS, {"a": ablate.zero("0.1")}, last).settings


def test_unchecked_serves_every_site_and_says_so_in_results(hf_model, families):
    model = hf_model("gemma3", fresh=True, dtype=torch.float32)
    assert unchecked(model) is model
    result = sweep(model, TOKENS, {"a": ablate.zero("0.1")}, last)
    assert result.settings["unchecked"] == "Gemma3ForCausalLM"
    assert patch.attribution(model, TOKENS, TOKENS.flip(0), last).settings["unchecked"] == "Gemma3ForCausalLM"
    check(model, TOKENS)  # changes nothing of that
    assert "unchecked" in sweep(model, TOKENS, {"a": ablate.zero("0.1")}, last).settings


@pytest.mark.parametrize("part", ["z", "resid_mid"])
def test_a_write_that_goes_astray_is_seen(hf_model, families, monkeypatch, part):
    """A write at z that arrives half, and one at resid_mid that reaches only the MLP."""
    if part == "resid_mid":
        monkeypatch.setattr(HuggingFaceBridgeHooks, "feeds_only_mlp", lambda self, site: False)
    else:
        hooked = HuggingFaceBridgeHooks.on_forward

        def halved(self, hook, function):
            def write(x):
                new = function(x)
                return None if new is None else (new + x) / 2

            return hooked(self, hook, write if hook.endswith("hook_z") else function)

        monkeypatch.setattr(HuggingFaceBridgeHooks, "on_forward", halved)
    frame = check(hf_model("llama"), TOKENS)
    assert differing(frame) == {part}
    assert set(frame.loc[frame["site"] == part, "verdict"]) == {
        "a write has another effect than by plain torch hooks"
    }


def test_a_bridge_that_computes_another_model_is_refused(hf_model, families):
    # As Falcon 40B is; TransformerLens splits its projections in another order than they have.
    falcon = hf_model("falcon", new_decoder_architecture=True, multi_query=False, num_kv_heads=2)
    for wrong in (hf_model("gpt2", scale_attn_weights=False), falcon):
        with pytest.raises(
            CircuitsError, match=r"the output of this bridge is not that of .*another version"
        ):
            check(wrong, TOKENS)
        with pytest.raises(CircuitsError, match="was not tested"):
            HookedModel(wrong)


def test_embeddings_of_another_width_are_no_site(hf_model, families):
    """OPT-350m projects them into the stream."""
    frame = check(hf_model("opt", word_embed_proj_dim=12), TOKENS)
    assert "embed" in differing(frame)
    assert not {"pos_embed", "resid_pre", "z", "scores", "pattern"} & differing(frame)


def test_a_setting_of_a_hooked_transformer(make_model, hooked_only, tokens, other_tokens):
    model = make_model(family=hooked_only, use_logn_attn=True)
    with pytest.raises(CircuitsError, match=r"^use_logn_attn=True was not tested"):
        run(model, tokens)
    frame = check(model)
    assert differing(frame) == set()
    assert HookedModel(model).setting_if_unchecked == {}
    unchecked(model)
    variants = {
        "z": ablate.zero("1.2"),
        "patch": patch.activations("resid_post.0", other_tokens),
        "pos": edit("pos_embed", lambda x: 2 * x),
        "uniform": ablate.uniform("0.1"),
    }
    found = sweep(model, tokens, variants, last)
    naive = sweep(model, tokens, variants, last, engine="naive")
    assert found.settings["unchecked"] == "use_logn_attn=True"
    assert found.frame["value"].tolist() == pytest.approx(naive.frame["value"].tolist(), abs=1e-10)
    assert not supported_models.is_unchecked(make_model(family=hooked_only))
