"""Estimates of nodes against forwards by hand and each other, exact effects beside them, and what both verbs share."""

import numpy as np
import pytest
import torch

from circuits import run
from tests.circuits.patch.by_hand import ONE, assert_equal, by_name, edges, nodes, weighed

BOTH = [pytest.param(nodes, id="screen"), pytest.param(edges, id="edges")]


@pytest.mark.parametrize("screened", BOTH)
def test_without_a_metric_the_logit_difference_of_base(screened, causal, tokens, other_tokens):
    order = run(causal, tokens).topk(2, -1).indices

    def difference(output, order):
        gap = output.gather(-1, order)
        return (gap[..., 0] - gap[..., 1]).mean(1)

    found = screened(causal, tokens, other_tokens, **ONE)
    expected = screened(causal, tokens, other_tokens, difference, batch=order, **ONE)
    assert found.metrics == ["logit_diff"]
    for column in ("estimate", "effect"):
        np.testing.assert_allclose(found.frame[column], expected.frame[column], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("screened", BOTH)
def test_effects_of_either_sign_are_noticed_and_ranked_by_size(model, tokens, other_tokens, screened):
    """Two copies of the examples, the metric of the second with the other sign: every mean is 0, no size is."""
    tokens, other_tokens = tokens[:2], other_tokens[:2]
    twice, others = tokens.repeat(2, 1), other_tokens.repeat(2, 1)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

    def signed(output, sign):
        return weighed(output) * sign

    assert screened(model, tokens[:1], other_tokens[:1], weighed, **ONE).notes == ()
    (note,) = screened(model, twice, others, signed, batch=signs, **ONE).notes
    assert note.endswith('keep 0% of the sizes of the estimated effects; rank="size" ranks by mean sizes')
    assert "all estimates are 0" in screened(model, tokens, tokens, weighed, **ONE).notes[0]
    assert not screened(model, tokens, tokens, lambda out: (0 * weighed(out), 0 * weighed(out)), **ONE).notes
    ranked = screened(model, twice, others, signed, batch=signs, rank="size", **ONE)
    assert ranked.notes == ()
    alone = [screened(model, tokens[row, None], other_tokens[row, None], weighed, **ONE) for row in (0, 1)]
    sizes = {name: sum(abs(by_name(one)[name]) for one in alone) / 2 for name in by_name(ranked)}
    assert_equal(by_name(ranked, column="size"), sizes)
    assert np.abs(ranked.frame["estimate"]).max() < 1e-9 * max(sizes.values())
    assert ranked.ranking(by="estimate") == sorted(sizes, key=sizes.__getitem__, reverse=True)
    (measured,) = ranked.frame[ranked.frame["effect_size"].notna()].to_dict("records")
    assert measured["rank"] == 1
    assert abs(measured["effect"]) < 1e-9 < measured["effect_size"]
