"""Autoencoders spliced into a model, against forwards by hand with the autoencoder written out."""

import pytest
import torch
from torch import nn

from circuits import CircuitsError, ablate, cache, edit, intervene, patch, run, splice
from tests.circuits.conftest import SHAPES

D_MODEL, FEATURES = 16, 12
CAUSAL = SHAPES["causal"]


class Autoencoder(nn.Module):
    """Far from the identity, so that its error is large."""

    def __init__(self, d_in=D_MODEL, seed=0, dtype=torch.float64):
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        for name, shape in (("W_enc", (d_in, FEATURES)), ("W_dec", (FEATURES, d_in)), ("b", (FEATURES,))):
            weight = 0.5 * torch.randn(shape, generator=drawn, dtype=torch.float64)
            setattr(self, name, nn.Parameter(weight.to(dtype)))

    def encode(self, x):
        return (x @ self.W_enc + self.b).relu()

    def decode(self, f):
        return f @ self.W_dec + 1


def inlined(saes, changes, spliced_error=lambda e: e):
    """An edit for the forward by hand: at each site of `saes`, decode(change(encode(x))) + (x − decode(encode(x)))."""

    def change(site, layer, x):
        name = site if layer is None else f"{site}.{layer}"
        if name not in saes:
            return x
        sae, flat = saes[name], x.flatten(2)
        f = sae.encode(flat)
        error = spliced_error(flat - sae.decode(f)) if name in changes else flat - sae.decode(f)
        return (sae.decode(changes.get(name, lambda f: f)(f.clone())) + error).reshape(x.shape)

    return change


@pytest.fixture
def three():
    return {"resid_post.0": Autoencoder(), "z.1": Autoencoder(seed=1), "mlp_out.1": Autoencoder(seed=2)}


def metric(output):
    return (output[:, -1, 3] - output[:, -1, 5]).tanh()


def by_difference(model, base, source, by_hand, saes, site, feature, step=1e-4):
    """(source − base)·∂metric/∂f of one feature, by differences of the forward by hand, which holds the error."""
    seen = []
    record = inlined(saes, {site: lambda f: seen.append(f.clone()) or f})
    for given in (base, source):
        by_hand(model, given, record)
    gap = torch.zeros_like(seen[0])
    gap[..., feature] = (seen[1] - seen[0])[..., feature]
    ends = [
        metric(by_hand(model, base, inlined(saes, {site: lambda f, s=s: seen[0] + s * gap})))
        for s in (step, -step)
    ]
    return float((ends[0] - ends[1]).mean() / (2 * step))


@pytest.mark.parametrize("frozen", [False, True])
def test_attribution_and_screen_by_feature(causal, tokens, other_tokens, by_hand, three, frozen):
    model = causal
    for weight in (*model.parameters(), *(w for sae in three.values() for w in sae.parameters())):
        weight.requires_grad_(not frozen)
    base, source = tokens[:4], other_tokens[:4]
    with splice(model, three):
        for site in three:
            table = patch.attribution(model, base, source, metric, f"features.{site}").frame
            found = patch.screen(
                model, base, source, metric, f"features.{site}", by="feature", method="gradient", exact="all"
            )
            estimates = found.frame.set_index("feature").estimate
            for feature in range(FEATURES):
                expected = by_difference(model, base, source, by_hand, three, site, feature)
                assert table.effect[feature] == pytest.approx(expected, abs=1e-7)
                assert estimates[feature] == pytest.approx(expected, abs=1e-7)
            effects = found.frame.set_index("feature").effect
            for feature in (0, 5):
                one = patch.activations(f"features.{site}", source, features=feature)
                gap = metric(run(model, base, one)) - metric(run(model, base))
                assert effects[feature] == pytest.approx(float(gap.mean()))
            assert estimates.abs().max() > 1e-4
            assert found.settings["sites"] == [f"features.{site}"]


@torch.no_grad()
def test_other_types(make_model, family, tokens, three):
    """The model computes in its own type, an autoencoder in its own."""
    for dtype, of_sae in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        saes = {site: Autoencoder(seed=i, dtype=of_sae) for i, site in enumerate(three)}
        model = make_model(family=family, **CAUSAL).to(dtype)
        clean = model(tokens)
        wide = make_model(family=family, **CAUSAL)
        with splice(model, saes):
            assert torch.equal(run(model, tokens), clean)
            assert cache(model, tokens, "features.z.1")["features.z.1"].dtype == saes["z.1"].W_enc.dtype
            found = run(model, tokens, ablate.features("resid_post.0", [0, 1, 2]))
        with splice(wide, {site: Autoencoder(seed=i) for i, site in enumerate(three)}):
            expected = run(wide, tokens, ablate.features("resid_post.0", [0, 1, 2]))
        assert found.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        assert (found - expected).abs().max() <= tolerance * (expected - run(wide, tokens)).abs().max()


@torch.no_grad()
def test_features_while_the_model_generates(make_model, family, tokens, by_hand):
    model = make_model(family=family, **CAUSAL, n_ctx=16, positional_embedding_type="rotary")
    sae = Autoencoder()
    prompt, new = tokens[:3, :4], 4

    def steered(f):
        f[:, 4:, 3] += 5
        return f

    expected = prompt
    for _ in range(new):
        logits = by_hand(model, expected, inlined({"resid_post.0": sae}, {"resid_post.0": steered}))
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    push = edit("features.resid_post.0", lambda f: f + 5, features=3, positions="new")
    with splice(model, {"resid_post.0": sae}), intervene(model, push):
        for use_cache in (True, False):
            settings = {"max_new_tokens": new, "do_sample": False, "stop_at_eos": False, "verbose": False}
            assert torch.equal(model.generate(prompt, use_past_kv_cache=use_cache, **settings), expected)


def test_blocks_end_in_any_order_and_leave_nothing(causal, tokens):
    model = causal
    hooks = [len(module._forward_hooks) for module in model.modules()]
    one, two = splice(model, {"resid_post.0": Autoencoder()}), splice(model, {"z.1": Autoencoder()})
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert list(cache(model, tokens, "features.z")) == ["blocks.1.attn.hook_z.features"]
    with pytest.raises(CircuitsError, match="no autoencoder is spliced in there"):
        cache(model, tokens, "features.resid_post.0")
    two.__exit__(None, None, None)
    with pytest.raises(ZeroDivisionError), splice(model, {"resid_post.0": Autoencoder()}):
        _ = 1 / 0
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
