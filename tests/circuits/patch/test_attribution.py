"""Attribution patching against gradients taken through the forward written by hand, and against real patches."""

import numpy as np
import pytest

from circuits import CircuitsError, patch
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
