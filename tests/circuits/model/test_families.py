"""Every row of the table of families, against forwards written by hand."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformer_lens

from circuits import CircuitsError, Site, ablate, edit, intervene, run
from circuits.model.bridges import choice, compared_sites, huggingface, qualification
from circuits.model.bridges.families import FAMILIES, PROVED_VERSIONS
from circuits.model.sites import KINDS
from circuits.model.surface import Surface

families = pytest.importorskip("tests.circuits.families")

ROOT = Path(__file__).parents[3]
TOKENS = torch.randint(3, families.WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(4 * 7 * 4 * 7 * 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MODES = ["raw", "compatible", "processed"]


def write(x):
    return x + NOISE[: x.numel()].reshape(x.shape)


def places(model):
    """Every (site, layer) that the model's surface supports."""
    surface = Surface.of(model)
    return [
        (name, layer)
        for name, kind in KINDS.items()
        for layer in (range(surface.n_layers) if kind.per_layer else [None])
        if Site(name, layer).hook() in surface.hooks
    ]


def errors(model, tokens=TOKENS, keep=None):
    """The largest difference at each place, relative to the effect of the write there."""
    given = {} if keep is None else {"attention_mask": keep.long()}
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    clean = families.forward(model, tokens, keep=keep)[real]
    found = {}
    for place in places(model):

        def written(x, place=place):
            # What stands at padding is the model's own affair, and nobody looks at it.
            return torch.where(real[:, None, None], write(x), x) if place[0] == "pattern" else write(x)

        by_hand = families.forward(
            model, tokens, lambda s, at, x, place=place: written(x) if (s, at) == place else x, keep
        )[real]
        with torch.no_grad(), intervene(model, edit(Site(*place), written)):
            ours = model(tokens, **given)[real]
        effect = (by_hand - clean).square().mean().sqrt()
        assert effect >= 0.01 * clean.std(), place
        found[place] = float((ours - by_hand).abs().max() / effect)
    return found


def made(hf_model, name, mode="raw"):
    model = hf_model(name, mode)
    try:
        model(TOKENS)
    except RuntimeError as error:
        # transformer-lens 3.9 adds biases in single precision to some classes.
        if mode == "processed" and "same dtype" in str(error):
            pytest.skip(f"this version does not process a {name} in float64")
        raise
    return model


def row(model):
    return Surface.of(model)._bridge.family


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", families.NAMES)
def test_every_place_is_written_as_by_hand(hf_model, name, mode):
    model = made(hf_model, name, mode)
    assert row(model) in FAMILIES
    assert {site for site, _ in places(model)} == row(model).sites
    for place, error in errors(model).items():
        assert error <= 1e-5, place


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["opt", "bert", "gpt2", "llama"])
def test_every_place_is_written_as_by_hand_under_fused_attention(hf_model, name, padded):
    """With a mask that the kernel is given, and with the causal one that it has; where the bridge computes attention
    itself and where the wrapped module does.
    """
    model = hf_model(name, fresh=True)
    model.original_model.set_attn_implementation("sdpa")
    keep = torch.ones_like(TOKENS, dtype=torch.bool)
    keep[0, 5:] = keep[1, 3:] = False
    assert {site for site, _ in places(model)} == row(model).sites
    for place, error in errors(model, keep=keep if padded else None).items():
        assert error <= 1e-5, place


def test_every_row_is_tested_and_every_version_proved(hf_model):
    assert {row(hf_model(name)).name for name in families.NAMES} == {family.name for family in FAMILIES}
    assert set(PROVED_VERSIONS) == {"transformer-lens", "transformers"}
    constrained = dict(
        line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "==" in line
    )
    assert constrained["transformers"].rpartition(".")[0] == PROVED_VERSIONS["transformers"][-1]


@pytest.fixture
def other_version(monkeypatch, first_use):
    """Nothing in the table was proved with what is installed."""
    for module in (choice, qualification):
        monkeypatch.setattr(module, "unproved_version", lambda: "transformers 9.0")


# Every row in every mode beside transformer-lens 4, where bridges are all there is.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in families.NAMES
        for mode in MODES
        if mode == "raw" or "HookedTransformer" not in vars(transformer_lens)
    ],
)
def test_a_row_stands_with_other_versions_where_all_of_it_is_found(hf_model, other_version, name, mode):
    model = made(hf_model, name, mode)
    assert row(model) in FAMILIES
    assert row(model).wrapped == type(model.original_model).__name__
    if row(model).paths:
        Surface.of(model).refuse_unproved_paths()


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_which_a_site_is_not_found_loses_it_and_paths(hf_model, other_version, monkeypatch, mode):
    """A write at z that arrives half in float64, where only the small model is."""
    hooked = huggingface.HuggingFaceBridge.on_forward

    def halved(self, hook, function):
        def write(x):
            new = function(x)
            return None if new is None else (new + x) / 2

        return hooked(self, hook, write if hook.endswith("hook_z") else function)

    monkeypatch.setattr(huggingface.HuggingFaceBridge, "on_forward", halved)
    model = made(hf_model, "gpt2", mode)
    assert row(model).sites == set(KINDS) - {"z"}
    with pytest.raises(CircuitsError, match="were not compared with a forward by hand"):
        Surface.of(model).refuse_unproved_paths()


def test_weights_that_processing_changes_are_refused(hf_model, other_version, monkeypatch):
    bridge = qualification._bridge

    def wrong(model, plain, config):
        made = bridge(model, plain, config)
        enable = made.enable_compatibility_mode

        def process(no_processing=False, **given):
            enable(no_processing=no_processing, **given)
            if not no_processing:
                with torch.no_grad():
                    made.original_model.transformer.h[0].mlp.c_proj.weight.mul_(1.01)

        made.enable_compatibility_mode = process
        return made

    monkeypatch.setattr(qualification, "_bridge", wrong)
    assert row(hf_model("gpt2", "compatible")) in FAMILIES
    with pytest.raises(
        CircuitsError, match=r"its processed weights give other probabilities; use enable_comp"
    ):
        Surface.of(hf_model("gpt2", "processed"))


@pytest.mark.parametrize("name", families.NAMES)
def test_the_forward_by_hand_is_the_model_as_hugging_face_made_it(hf_model, name):
    with torch.no_grad():
        theirs = hf_model.plain(name)(TOKENS).logits
    ours = families.forward(hf_model(name), TOKENS)
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.std())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_what_the_forward_by_hand_differs_by_is_the_models_own_rounding(hf_model, name, mode):
    """Norms and softmax of these models are in single precision; the forward by hand is not, unless asked."""
    model = made(hf_model, name, mode)
    with torch.no_grad():
        theirs = model(TOKENS)
    wide, narrow = (families.forward(model, TOKENS, single=single) for single in (False, True))
    off = [float((ours - theirs).abs().max() / theirs.std()) for ours in (wide, narrow)]
    assert 1e-8 < off[0] <= 1e-5
    assert off[1] <= 1e-12


@pytest.mark.parametrize("name", families.NAMES)
def test_every_place_is_read_as_by_hand(hf_model, name):
    """With a write at the same time, so that what was written is read too."""
    model = hf_model(name)
    seen, values = {}, {}
    surface = Surface.of(model)

    def at(site, layer, x):
        values[site, layer] = write(x) if (site, layer) == ("v", 0) else x
        return values[site, layer]

    expected = families.forward(model, TOKENS, at)
    with torch.no_grad(), intervene(model, edit("v.0", write)):
        handles = [
            surface.on_forward(Site(*place).hook(), lambda x, place=place: seen.update({place: x}))
            for place in places(model)
        ]
        model(TOKENS)
        for handle in handles:
            handle.remove()
    for place in places(model):
        masked = values[place] == -torch.inf
        assert seen[place].shape == values[place].shape
        assert bool((seen[place][masked] < -1e300).all()), place
        difference = (seen[place] - values[place]).masked_fill(masked, 0.0).abs().max()
        assert float(difference) <= 1e-5 * float(values[place][~masked].abs().max()), place
    assert expected.isfinite().all()


@pytest.fixture
def first_use(monkeypatch):
    """Nothing is known of any config yet."""
    monkeypatch.setattr(qualification, "_known", {})


def found_anew(model):
    return qualification.qualified(model, model.original_model, families.Form.of(model).parallel).sites


# A check does not find out that OPT's MLP has batch and positions on one axis, and BERT's hook points stand elsewhere.
_LESS = {
    "opt": {"attn_out", "mlp_out", "mlp_post", "mlp_pre", "resid_mid"},
    "bert": {"attn_out", "embed", "mlp_out", "resid_mid"},
}


@pytest.mark.parametrize("name", families.NAMES)
def test_the_check_on_first_use_finds_the_sites_of_the_table(hf_model, first_use, name):
    """Two derivations that share nothing: a forward by hand, and torch hooks on Hugging Face's modules."""
    model = hf_model(name)
    state = torch.random.get_rng_state()
    assert found_anew(model) == row(model).sites - _LESS.get(name, set())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_check_on_first_use_sees_a_write_that_goes_astray(hf_model, first_use, monkeypatch):
    """A write at resid_mid that reaches only the MLP, and one at z that is lost."""
    monkeypatch.setattr(huggingface.HuggingFaceBridge, "on_branch", lambda self, site: False)
    assert found_anew(hf_model("llama")) == row(hf_model("llama")).sites - {"resid_mid"}
    qualification._known.clear()
    hooked = huggingface.HuggingFaceBridge.on_forward

    def lost(self, hook, function):
        quiet = hook.endswith("hook_z")
        return hooked(self, hook, (lambda x: function(x) if False else None) if quiet else function)

    monkeypatch.undo()
    monkeypatch.setattr(qualification, "_known", {})
    monkeypatch.setattr(huggingface.HuggingFaceBridge, "on_forward", lost)
    assert "z" not in found_anew(hf_model("llama"))


def test_other_settings_and_versions_are_checked_once(hf_model, monkeypatch):
    checks = []
    check = qualification._check
    monkeypatch.setattr(qualification, "_known", {})
    monkeypatch.setattr(qualification, "_check", lambda *given: checks.append(1) or check(*given))
    model = hf_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    for _ in range(2):
        assert {site for site, _ in places(model)} == set(KINDS)
    assert row(model) not in FAMILIES
    assert checks == [1]
    with pytest.raises(CircuitsError, match="were not compared with a forward by hand"):
        Surface.of(model).refuse_unproved_paths()
    processed = hf_model("gpt2", "processed", scale_attn_by_inverse_layer_idx=True)
    assert {site for site, _ in places(processed)} == set(KINDS)
    assert len(checks) == 2
    monkeypatch.setattr(choice, "unproved_version", lambda: "transformers 9.0")
    assert {site for site, _ in places(hf_model("llama"))} == row(hf_model("llama")).sites
    assert len(checks) == 3


@pytest.mark.parametrize("name", families.UNLISTED)
def test_classes_outside_the_table_serve_what_is_proved_on_first_use(hf_model, first_use, name):
    """Each of these sites has been written to at random on a small model; the page lists those that were not proved."""
    model = hf_model(name, dtype=torch.float32)
    lacking = families.UNLISTED[name][2]
    if name == "olmo2" and version("transformer-lens").startswith("3."):
        lacking = lacking | {"attn_out", "resid_mid", "mlp_out"}
    assert {site for site, _ in places(model)} == set(KINDS) - lacking
    clean, zeroed = run(model, TOKENS), run(model, TOKENS, ablate.zero("1.2"))
    assert float((zeroed - clean).abs().max()) > 1e-3 * float(clean.std())
    for site in lacking:
        with pytest.raises(CircuitsError, match=f"no site {site} in this model"):
            run(model, TOKENS, edit(site, torch.zeros_like))


def test_embeddings_of_another_width_are_no_site(hf_model, first_use):
    """OPT-350m projects them into the stream."""
    model = hf_model("opt", word_embed_proj_dim=12)
    served = {site for site, _ in places(model)}
    assert row(model) not in FAMILIES
    assert "embed" not in served
    assert {"pos_embed", "resid_pre", "z", "scores", "pattern"} <= served


def test_the_check_on_first_use_multiplies_pattern_and_v(hf_model, first_use, monkeypatch):
    """Where attention is left to the wrapped module, both models are met at one softmax, so that z must follow too."""
    read = compared_sites.BridgeSites.read

    def other(self, tokens, places, write=None):
        seen = read(self, tokens, places, write)
        return {place: 1.1 * x if write and place[0] == "z" else x for place, x in seen.items()}

    monkeypatch.setattr(compared_sites.BridgeSites, "read", other)
    assert found_anew(hf_model("gptj")) == row(hf_model("gptj")).sites - {"scores", "pattern"}


def test_what_cannot_be_checked_is_refused_in_one_line(hf_model, first_use):
    # As Falcon 40B is; TransformerLens splits its projections in another order than they have.
    falcon = hf_model("falcon", new_decoder_architecture=True, multi_query=False, num_kv_heads=2)
    for wrong in (hf_model("gpt2", scale_attn_weights=False), falcon):
        with pytest.raises(
            CircuitsError,
            match=r"not supported: its output is not that of the model it wraps: .*another version",
        ):
            Surface.of(wrong)
    other = hf_model("llama", fresh=True)
    kind = type(other.original_model)
    other.original_model.__class__ = type("Unbuilt", (kind,), {"__init__": lambda self, config: 1 / 0})
    with pytest.raises(CircuitsError, match=r"around Unbuilt.* is not in the table .* \(ZeroDivisionError"):
        Surface.of(other)
