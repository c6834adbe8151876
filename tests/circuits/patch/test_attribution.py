"""Attribution patching against gradients taken through the forward written by hand, and against real patches."""

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, patch, permute, transplant
from tests.circuits.patch.by_hand import FEW, weighed


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
    for by, values in (
        ("layer", layers.sum((1, 2, 3))),
        ("head", layers.sum((1, 3))),
        ("auto", layers.sum((1, 3))),
        ("position", layers.sum((2, 3))),
        ("head,position", layers.sum(3).transpose(1, 2)),
    ):
        frame = patch.attribution(causal, tokens, other_tokens, weighed, "z", by=by, **FEW).frame
        np.testing.assert_allclose(frame["effect"], values.flatten(), rtol=1e-8, atol=1e-10)
        assert frame["variant"].is_unique
    row = frame.set_index("variant").loc["1.2, position 3"]
    assert (row["site"], row["layer"], row["head"], row["position"]) == ("z", 1, 2, 3)
    one = patch.attribution(causal, tokens, other_tokens, weighed, "resid_pre.1", **FEW)
    assert list(one.frame["variant"]) == [f"resid_pre.1, position {i}" for i in range(6)]
    # The direction is named in every row, and again with the result.
    assert set(one.frame["intervention"]) == {"patch.attribution (source -> base)"}
    assert one.interventions["resid_pre.1, position 2"][0]["direction"] == "source -> base"


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
