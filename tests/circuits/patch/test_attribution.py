"""Attribution patching against gradients taken through the forward written by hand, and against real patches."""

import copy

import numpy as np
import pytest
import torch

from circuits import (
    CircuitsError,
    ablate,
    cache,
    edit,
    heads,
    intervene,
    patch,
    permute,
    run,
    sweep,
    transplant,
)
from circuits.model.hooked_model import HookedModel

WEIGHT = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
FEW = {"draws": 20, "flips": 20}


def weighed(output):
    """Linear in the output; every position and class counts."""
    return (output * WEIGHT).sum((1, 2))


def by_autograd(by_hand, model, base, source, site, metric):
    """(source − base)·∂metric/∂site at base, by layer: [batch ...]."""
    forward, theirs, ours = by_hand.__wrapped__, {}, {}

    def keep_theirs(s, at, x):
        return theirs.setdefault(at, x.detach()) if s == site else x

    def keep_ours(s, at, x):
        if s != site:
            return x
        x = x.detach().requires_grad_() if not x.requires_grad else x.clone()
        x.retain_grad()
        ours[at] = x
        return x

    forward(model, source, keep_theirs)
    metric(forward(model, base, keep_ours)).sum().backward()
    model.zero_grad()
    return {at: (theirs[at] - x.detach()).nan_to_num() * x.grad for at, x in ours.items()}


SITES = {
    "z": ("head", (1, 3)),
    "q": ("head", (1, 3)),
    "pattern": ("head", (2, 3)),
    "scores": ("head", (2, 3)),
    "resid_mid": ("position", (2,)),
    "mlp_post": ("neuron", (1,)),
    "embed": ("position", (2,)),
}


def test_against_autograd_through_a_forward_by_hand(model, tokens, other_tokens, by_hand):
    clean = weighed(by_hand(model, tokens))
    for site, (by, summed) in SITES.items():
        if model.cfg.attn_only and site in ("resid_mid", "mlp_post"):
            with pytest.raises(CircuitsError, match=f"no site {site}"):
                patch.attribution(model, tokens, other_tokens, weighed, site)
            continue
        expected = by_autograd(by_hand, model, tokens, other_tokens, site, weighed)
        frame = patch.attribution(model, tokens, other_tokens, weighed, site, by=by, **FEW).frame
        effects = np.concatenate([x.sum(summed).mean(0).numpy() for x in expected.values()])
        np.testing.assert_allclose(frame["effect"], effects, rtol=1e-8, atol=1e-10 * np.abs(effects).max())
        assert np.abs(effects).max() > 0.01 * float(clean.std())
        np.testing.assert_allclose(frame["value"], frame["baseline"] + effects, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(frame["baseline"], clean.mean(), rtol=1e-12)


def test_what_gets_a_row(causal, tokens, other_tokens, by_hand):
    expected = by_autograd(by_hand, causal, tokens, other_tokens, "z", weighed)
    layers = torch.stack(list(expected.values())).mean(1)  # [layer pos head d_head]
    for by, values, columns in (
        ("layer", layers.sum((1, 2, 3)), {"layer": [0, 1]}),
        ("head", layers.sum((1, 3)), {"layer": [0] * 4 + [1] * 4, "head": [0, 1, 2, 3] * 2}),
        ("auto", layers.sum((1, 3)), {"head": [0, 1, 2, 3] * 2}),
        ("position", layers.sum((2, 3)), {"position": [*range(6)] * 2}),
        (
            "head,position",
            layers.sum(3).transpose(1, 2),
            {"head": [h for h in range(4) for _ in range(6)] * 2, "position": [*range(6)] * 8},
        ),
    ):
        frame = patch.attribution(causal, tokens, other_tokens, weighed, "z", by=by, **FEW).frame
        np.testing.assert_allclose(frame["effect"], values.flatten(), rtol=1e-8, atol=1e-10)
        for column in ("layer", "head", "position"):
            wanted = columns.get(column)
            if wanted is not None:
                assert frame[column].tolist() == wanted
        assert frame["variant"].is_unique
    assert list(frame["variant"][:2]) == ["0.0, position 0", "0.0, position 1"]
    one = patch.attribution(causal, tokens, other_tokens, weighed, "resid_pre.1", **FEW)
    assert list(one.frame["variant"]) == [f"resid_pre.1, position {i}" for i in range(6)]
    assert set(one.frame["site"]) == {"resid_pre"}
    assert set(one.frame["engine"]) == {"gradient"}
    # The direction is named in every row, and again with the result.
    assert set(one.frame["intervention"]) == {"patch.attribution (source -> base)"}
    assert one.interventions["resid_pre.1, position 2"][0]["direction"] == "source -> base"


def test_exact_where_the_metric_is_linear_in_the_site(family, make_model, tokens, other_tokens):
    """Without norms the logits are linear in the last residual stream, and in everything added to it last."""
    model = make_model(family=family, n_layers=2, normalization_type=None)
    for site in ("resid_post.1", "mlp_out.1"):
        estimated = patch.attribution(model, tokens, other_tokens, weighed, site, **FEW).frame
        real = {
            f"{site}, position {at}": patch.activations(site, other_tokens, positions=at) for at in range(6)
        }
        patched = sweep(model, tokens, real, metric=weighed, **FEW).frame
        assert list(estimated["variant"]) == list(real)
        for column in ("value", "effect", "effect_ci_low", "value_ci_high", "p_value", "p_adjusted"):
            np.testing.assert_allclose(estimated[column], patched[column], rtol=1e-9, atol=1e-11)
        assert float(np.abs(estimated["effect"]).max()) > 0.1
    attention = make_model(family=family, n_layers=1, attn_only=True, normalization_type=None)
    estimated = patch.attribution(attention, tokens, other_tokens, weighed, **FEW).frame
    real = ablate.each(
        lambda head, **given: patch.activations("z", heads=head, **given),
        heads("all", attention),
        source=other_tokens,
    )
    patched = sweep(attention, tokens, real, metric=weighed, **FEW).frame
    assert list(estimated["variant"]) == list(patched["variant"])
    np.testing.assert_allclose(estimated["effect"], patched["effect"], rtol=1e-9, atol=1e-11)


def test_the_direction_is_from_source_to_base(causal, tokens, other_tokens):
    """The gradient is taken at base, so the two directions are not each other's negative."""
    there = patch.attribution(causal, tokens, other_tokens, weighed, **FEW).frame
    back = patch.attribution(causal, other_tokens, tokens, weighed, **FEW).frame
    np.testing.assert_allclose(there["baseline"][0], weighed(run(causal, tokens)).mean())
    assert not np.allclose(there["effect"], -back["effect"], rtol=0.05)
    same = patch.attribution(causal, tokens, tokens, weighed, **FEW).frame
    assert (same["effect"] == 0).all()
    assert same["null_effect"].all()


def test_pairs_batches_and_pieces(causal, tokens, other_tokens, by_hand):
    hidden = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[2] = False

    def metric(output, rows):
        loss = output.square().mean(-1)
        return {"hidden": ((loss * hidden[rows]).sum(1), hidden[rows].sum(1)), "last": loss[:, -1]}

    whole = patch.attribution(causal, tokens, other_tokens, metric, batch=torch.arange(8), **FEW).frame
    expected = by_autograd(
        by_hand, causal, tokens, other_tokens, "z", lambda o: (o.square().mean(-1) * hidden).sum(1)
    )
    total = torch.stack(list(expected.values())).sum((2, 4)).sum(1).flatten() / hidden.sum()
    np.testing.assert_allclose(whole[whole["metric"] == "hidden"]["effect"], total, rtol=1e-8, atol=1e-11)
    sizes = []
    handle = HookedModel.of(causal).on_run(lambda args, kwargs: sizes.append(len(args[0])))
    pieces = patch.attribution(
        causal, tokens, other_tokens, metric, batch=torch.arange(8), batch_size=3, **FEW
    ).frame
    handle.remove()
    assert sizes == [3] * 4 + [2] * 2
    for column in ("value", "effect", "effect_ci_low", "p_value"):
        np.testing.assert_allclose(pieces[column], whole[column], rtol=1e-9, atol=1e-12)


def test_weights_gradients_and_modes_are_left_alone(causal, tokens, other_tokens):
    frozen = copy.deepcopy(causal)
    for weight in frozen.parameters():
        weight.requires_grad_(False)
    expected = patch.attribution(causal, tokens, other_tokens, weighed, **FEW).frame["effect"]
    assert all(weight.grad is None for weight in causal.parameters())
    assert causal.training
    with torch.no_grad():
        found = patch.attribution(frozen, tokens, other_tokens, weighed, **FEW).frame["effect"]
        assert not torch.is_grad_enabled()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert not any(weight.requires_grad for weight in frozen.parameters())


def test_inside_blocks_of_every_kind_it_is_of_the_model_outside_of_them(
    family, make_model, tokens, other_tokens, by_hand
):
    """Head edits, paths, permutations, weights, one in the other: the gradient by hand knows of none of them."""
    model, donor = (make_model(family=family, seed=seed) for seed in (0, 1))
    few = torch.zeros(tokens.shape, dtype=torch.bool)
    few[3:5, 2:] = True
    blocks = (
        (ablate.uniform("0.1", positions=few), edit("resid_pre.1", lambda x: 3 * x)),
        (patch.path("0.2", ("q", "1.0"), other_tokens), permute.positions(3)),
        (transplant.weights(donor, ["qkv", "mlp"]), ablate.mean("mlp_out.0", other_tokens)),
    )
    clean = weighed(by_hand(model, tokens)).mean()
    for site in ("z", "resid_post"):
        by_layer = by_autograd(by_hand, model, tokens, other_tokens, site, weighed)
        summed = (1, 3) if site == "z" else (2,)
        expected = np.concatenate([x.sum(summed).mean(0).numpy() for x in by_layer.values()])
        with intervene(model, *blocks[0]), intervene(model, *blocks[1]), intervene(model, *blocks[2]):
            frame = patch.attribution(model, tokens, other_tokens, weighed, site, **FEW).frame
            # They are in force for what comes after it.
            inside = weighed(model(tokens)).mean().detach()
        np.testing.assert_allclose(frame["effect"], expected, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(frame["baseline"], clean, rtol=1e-12)
        assert abs(float(inside - clean)) > 0.01


def test_heads_that_share_keys_have_a_row_for_each_group(family, make_model, tokens, other_tokens):
    """The slope of the metric along `patch.activations` of that group, under its own name."""
    model = make_model(family=family, n_key_value_heads=2, positional_embedding_type="rotary")

    def metric(output):
        return output.square().sum((1, 2))

    for site in ("k", "v"):
        ours, theirs = (cache(model, given, [site]) for given in (tokens, other_tokens))
        frame = patch.attribution(model, tokens, other_tokens, metric, site, **FEW).frame
        assert frame["head"].isna().all()
        found = dict(zip(frame["variant"], frame["effect"], strict=True))
        assert list(found) == [f"{x}.k{y} (heads {h})" for x in (0, 1) for y, h in ((0, "0,1"), (1, "2,3"))]
        for name, estimate in found.items():
            values = [
                metric(
                    run(
                        model,
                        tokens,
                        patch.activations(
                            site,
                            {at: ours[at] + step * (theirs[at] - ours[at]) for at in ours},
                            heads=name.split()[0],
                        ),
                    )
                ).mean()
                for step in (1e-5, -1e-5)
            ]
            assert estimate == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-5)
        by_position = patch.attribution(
            model, tokens, other_tokens, metric, site, by="head,position", **FEW
        ).frame
        assert by_position["variant"][1] == "0.k0 (heads 0,1), position 1"
        assert by_position["effect"].sum() == pytest.approx(sum(found.values()), rel=1e-9)


def test_faults_are_one_line(causal, tokens, other_tokens):
    for arguments, message in (
        (
            {"source": other_tokens[:3]},
            r"source is \[3, 6\], base \[8, 6\]; the source must have base's shape, or",
        ),
        ({"source": other_tokens[:, :5]}, r"source is \[8, 5\], base \[8, 6\]"),
        ({"source": None}, "source must be texts, lists of ids or a tensor"),
        (
            {"metric": lambda output: output.argmax(-1)[:, -1].double()},
            "(?<!metric )metric has no gradient; compute it",
        ),
        ({"metric": lambda output: output.detach()[:, -1, 0]}, "no gradient"),
        (
            {"metric": lambda output: {"a": output[:, -1, 0], "b": output.detach()[:, -1, 0]}},
            "b has no gradient; compute it with torch, without detach or argmax; or leave it out here",
        ),
        ({"metric": lambda output: output.mean()}, r"returned \[\] for 8 examples"),
        ({"metric": lambda output: output[:, -1, 0] / 0}, "not finite"),
        ({"metric": "loss"}, "metric: expected a function"),
        ({"metric": lambda output, rows: output}, "pass batch="),
        (
            {"batch": [1, 2], "metric": lambda output, rows: output[:, 0, 0]},
            "8 examples, batch has 2",
        ),
        ({"site": "resid_pre", "by": "head"}, "site resid_pre has no heads; by= position, neuron or layer"),
        ({"site": "z", "by": "neuron"}, "site z has no neurons; those are at mlp_pre and mlp_post"),
        ({"by": "token"}, "by='token'; choose from 'auto', 'head'"),
        ({"site": "z.4"}, r"no site z\.4: the model has layers 0-1"),
        ({"seed": -1}, "seed=-1"),
        ({"draws": 0}, "draws and flips are positive numbers up to"),
    ):
        given = {"base": tokens, "source": other_tokens, "metric": weighed, **arguments}
        with pytest.raises(CircuitsError, match=message) as caught:
            patch.attribution(causal, **given)
        assert "\n" not in str(caught.value)
