"""Attribution patching against gradients taken through the forward written by hand, and against real patches."""

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, patch, permute, transplant
from tests.circuits.patch.by_hand import FEW, by_autograd, weighed

#: The axes over which a row sums.
SITES = {
    "z": (1, 3),
    "q": (1, 3),
    "pattern": (2, 3),
    "scores": (2, 3),
    "resid_mid": (2,),
    "mlp_post": (2,),
    "embed": (2,),
}


def test_against_autograd_through_a_forward_by_hand(model, tokens, other_tokens, by_hand):
    clean = weighed(by_hand(model, tokens))
    for site, summed in SITES.items():
        if model.cfg.attn_only and site in ("resid_mid", "mlp_post"):
            with pytest.raises(CircuitsError, match=f"no site {site}"):
                patch.attribution(model, tokens, other_tokens, weighed, site)
            continue
        expected = by_autograd(by_hand, model, tokens, other_tokens, site, weighed)
        frame = patch.attribution(model, tokens, other_tokens, weighed, site, **FEW).frame
        effects = np.concatenate([x.sum(summed).mean(0).numpy() for x in expected.values()])
        np.testing.assert_allclose(frame["effect"], effects, rtol=1e-8, atol=1e-10 * np.abs(effects).max())
        assert np.abs(effects).max() > 0.01 * float(clean.std())
        np.testing.assert_allclose(frame["value"], frame["baseline"] + effects, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(frame["baseline"], clean.mean(), rtol=1e-12)


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
