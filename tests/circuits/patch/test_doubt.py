"""Verified search: where estimates are exact nothing is measured, and where a gradient vanishes the edge is found."""

from functools import partial

import numpy as np
import pytest
import torch

from circuits import CircuitsError, patch
from circuits.patch._doubt import Evidence, carried

WEIGHT = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
verified = partial(patch.edges, exact="verified", draws=20, flips=20)


def weighed(output):
    """Linear in the output."""
    return (output * WEIGHT[:, : output.shape[-1]]).sum((1, 2))


def parameter(model, layer, name):
    """A weight of a layer's attention, of either class of model."""
    attention = model.blocks[layer].attn
    found = getattr(attention, name, None)
    return found if found is not None else getattr(attention, f"_{name}")


def without_queries(model):
    """Makes every pattern constant."""
    with torch.no_grad():
        for layer in range(model.cfg.n_layers):
            parameter(model, layer, "W_Q").zero_()
            parameter(model, layer, "b_Q").zero_()
    return model


@pytest.fixture
def plain(make_model, hooked_only):
    return partial(make_model, family=hooked_only, attn_only=True, normalization_type=None)


def test_nothing_is_measured_where_all_is_linear(plain, tokens, other_tokens):
    model = without_queries(plain(n_layers=2))
    found = verified(model, tokens, other_tokens, weighed, budget=1000)
    assert found.settings["doubtful"] == found.settings["verified"] == 0
    assert (found.frame["doubt"] == 0).all()
    assert not found.frame["verified"].any()
    assert found.frame["effect"].isna().all()
    exact = patch.edges(model, tokens, other_tokens, weighed, exact="all", draws=20, flips=20).frame
    exact = exact.set_index("variant")["effect"]
    assert exact.abs().max() > 0.1
    estimates = found.frame.set_index("variant")["estimate"]
    np.testing.assert_allclose(estimates[exact.index], exact, rtol=1e-9, atol=1e-11)
    # They can be kept, ranked and drawn like others.
    assert found.ranking()[0] == exact.abs().idxmax()
    assert len(found.top(3)) == 3


def test_a_curve_is_measured_where_it_bends(plain, tokens, other_tokens):
    """With a constant pattern and the square of the output, the edges that reach the output bend: all others too."""
    model = without_queries(plain(n_layers=1))
    found = verified(model, tokens, other_tokens, lambda output: weighed(output) ** 2, budget=1000).frame
    attention = found["receiver"].str.contains(r"\.[qk]$")
    assert attention.sum() == 8
    assert (found["verified"] == ~attention).all()
    assert (found["doubt"][attention] == 0).all()


def saturated(model, size=1e5):
    """Makes the scores so large that every pattern is one position, and no gradient passes."""
    with torch.no_grad():
        for layer in range(model.cfg.n_layers):
            parameter(model, layer, "W_Q").mul_(size)
    return model


def test_a_saturated_softmax_is_computed_anew(plain, tokens, other_tokens):
    """Before a linear metric nothing else bends, so that nothing need be measured."""
    model = saturated(plain(n_layers=1, n_heads=1, d_head=16))
    exact = patch.edges(
        model, tokens, other_tokens, weighed, method="gradient", exact="all", draws=20, flips=20
    )
    exact = exact.frame.set_index("variant")
    found = verified(model, tokens, other_tokens, weighed, method="gradient").frame.set_index("variant")
    for edge in ("embed -> 0.0.q", "embed -> 0.0.k"):
        assert abs(exact["effect"][edge]) > 0.1 > 1e-3 > abs(exact["estimate"][edge])
        assert found["estimate"][edge] == pytest.approx(exact["effect"][edge], rel=1e-9)
        assert found["doubt"][edge] == 0
        assert not found["verified"][edge]


def test_a_gradient_that_vanishes_is_not_trusted(plain, tokens, other_tokens):
    """What head 0.0 reads reaches the metric through the saturated softmax of head 1.0 alone."""
    model = saturated(plain(n_layers=2, n_heads=1, d_head=16))
    reads = parameter(model, 1, "W_Q").detach()[0]
    with torch.no_grad():
        # Head 0.0 writes into half of the stream, which only queries of head 1.0 read.
        parameter(model, 0, "W_O")[:, :, 8:] = 0
        for name in ("W_K", "W_V"):
            parameter(model, 1, name)[:, :8] = 0
        model.unembed.W_U[:8] = 0
        assert reads[:8].abs().max() > 0
    asked = {"method": "gradient", "draws": 20, "flips": 20}
    edge = "embed -> 0.0.v"
    exact = patch.edges(model, tokens, other_tokens, weighed, exact="all", **asked).frame.set_index("variant")
    assert abs(exact["effect"][edge]) > 0.1 > 1e-3 > abs(exact["estimate"][edge])
    found = verified(model, tokens, other_tokens, weighed, budget=1000, method="gradient").frame
    found = found.set_index("variant")
    assert found["verified"][edge]
    assert not found["verified"].all()
    assert found["effect"][edge] == pytest.approx(exact["effect"][edge], rel=1e-12)
    # Measured or not, all that is known now is right.
    best = found["effect"].fillna(found["estimate"])
    np.testing.assert_allclose(best[exact.index], exact["effect"], rtol=1e-7, atol=1e-9)


FORMS = [
    {"attention_dir": "causal", "normalization_type": None},
    {"normalization_type": None, "positional_embedding_type": "rotary", "n_key_value_heads": 2},
]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "groups, rotary"])
def test_queries_and_keys_by_the_softmax_are_exact_before_a_linear_metric(
    form, family, make_model, tokens, other_tokens
):
    """In the last layer, with no norm and no MLP on the way, nothing but the softmax bends."""
    model = make_model(family=family, n_layers=2, attn_only=True, **form)
    found = verified(model, tokens, other_tokens, weighed, method="gradient", budget=1000).frame
    rows = found[found["receiver"].str.match(r"1\..*\.[qk]")]
    assert len(rows) == 5 * (4 + (2 if "n_key_value_heads" in form else 4))
    assert not rows["verified"].any()
    assert (rows["doubt"] == 0).all()
    exact = patch.edges(
        model, tokens, other_tokens, weighed, method="gradient", exact="all", draws=20, flips=20
    )
    exact = exact.frame.set_index("variant")["effect"][rows["variant"]]
    assert exact.abs().max() > 0.01
    np.testing.assert_allclose(rows["estimate"], exact, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("line", ["input", "site"])
@pytest.mark.parametrize("method", ["gradient", "integrated"])
def test_other_estimates_are_those_of_the_method(method, line, causal, tokens, other_tokens):
    asked = {"method": method, "line": line, "steps": 2, "draws": 20, "flips": 20}
    plain = patch.edges(causal, tokens, other_tokens, weighed, exact=1, **asked).frame
    found = patch.edges(causal, tokens, other_tokens, weighed, exact="verified", budget=3, **asked).frame
    plain, found = (frame.set_index("variant")["estimate"].sort_index() for frame in (plain, found))
    attention = found.index.str.contains(r"\.[qk]")
    np.testing.assert_allclose(found[~attention], plain[~attention], rtol=1e-9, atol=1e-12)
    assert not np.allclose(found[attention], plain[attention], rtol=1e-3)


def test_the_budget_goes_to_the_largest_doubts(causal, tokens, other_tokens):
    def two(output):
        return {"a": weighed(output), "b": (output.log_softmax(-1) * WEIGHT).sum((1, 2))}

    default = verified(causal, tokens, other_tokens, two)
    assert default.settings["budget"] == default.settings["verified"] == 110 // 3
    assert default.frame.groupby("metric")["verified"].sum().tolist() == [36, 36]
    assert (default.frame["effect"].notna() == default.frame["verified"]).all()
    one = verified(causal, tokens, other_tokens, weighed, budget=7).frame
    assert one["verified"].sum() == 7
    assert one["doubt"][one["verified"]].min() >= one["doubt"][~one["verified"]].max() > 0
    none = verified(causal, tokens, other_tokens, weighed, budget=0)
    assert not none.frame["verified"].any()
    assert none.settings["doubtful"] > 90


def test_padded_prompts_are_those_of_their_own_lengths(causal, tokens, other_tokens):
    def last(output, rows):
        return output[torch.arange(len(rows)), rows - 1, 3]

    lengths = torch.tensor([6, 4] * 4)
    asked = {"method": "gradient", "exact": "verified", "budget": 0, "draws": 20, "flips": 20}

    def estimates(rows):
        base, source = (
            [given[row, : lengths[row]].tolist() for row in rows] for given in (tokens, other_tokens)
        )
        found = patch.edges(causal, base, source, last, batch=lengths[rows], **asked).frame
        return found.set_index("variant")["estimate"]

    whole, long, short = (estimates(rows) for rows in (range(8), range(0, 8, 2), range(1, 8, 2)))
    assert whole.abs().max() > 0.01
    np.testing.assert_allclose(whole, (long + short)[whole.index] / 2, rtol=1e-7, atol=1e-10)


def test_pieces_are_taken_together(causal, tokens, other_tokens, monkeypatch):
    whole = verified(causal, tokens, other_tokens, weighed, budget=5).frame
    monkeypatch.setattr("circuits.patch._edges.EXAMPLES_PER_PASS", 3)
    pieces = verified(causal, tokens, other_tokens, weighed, budget=5).frame
    assert whole["variant"].tolist() == pieces["variant"].tolist()
    np.testing.assert_allclose(whole["doubt"], pieces["doubt"], rtol=1e-9, atol=1e-12)


def test_the_rule_by_hand():
    def row(arrived=1.0, whole=1.0, moved=4.0, z=(np.nan,) * 3, spread=0.1, largest=1.0, terms=1.0, gap=2.0):
        return np.array([arrived, whole, moved, *z, spread, largest, terms, gap])

    rows = [
        row(),  # half of the change arrives, of a gap of 2
        row(spread=3.0),
        row(moved=0.25),  # at most the whole gap
        row(arrived=1e-14),  # nothing arrives
        row(spread=1e-9),  # estimates agree
        row(spread=0.0, largest=0.0, terms=0.0),  # there are none to agree
        row(spread=1e-9, largest=1e-9),  # the change is orthogonal to the gradients
        row(z=(0.0, 1.0, 1.0)),  # queries change, and the pattern does not
        row(z=(0.25, 1.0, 4.0)),  # a quarter of the change of z
    ]
    assert Evidence.of(rows).doubts(1e-6).tolist() == [1.0, 3.0, 2.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5]


def test_changes_are_carried_forward():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    changes = torch.randn(2, 3, 4, dtype=torch.float64)
    found = carried(x.sin(), x, changes)
    torch.testing.assert_close(found, changes * x.detach().cos())
    assert carried(torch.randn(3, requires_grad=True) * 2, x, changes) is None


def test_faults_are_one_line(causal, make_model, hooked_only, tokens, other_tokens):
    for arguments, message in (
        ({"exact": 3, "budget": 3}, 'budget= is of exact="verified"'),
        ({"exact": "verified", "budget": -1}, "budget=-1; give the largest number of exact effects"),
        ({"exact": "verify"}, "exact='verify'; give how many top rows to measure"),
    ):
        with pytest.raises(CircuitsError, match=message):
            patch.edges(causal, tokens, other_tokens, weighed, **arguments)
    with pytest.raises(CircuitsError, match="exact='verified'; give how many top rows"):
        patch.screen(causal, tokens, other_tokens, weighed, exact="verified")
    normed = make_model(norm="post", family=hooked_only)
    with pytest.raises(CircuitsError, match='exact="verified" is not supported where the residual stream'):
        verified(normed, tokens, other_tokens, weighed)


def test_models_of_other_forms(featured, tokens, other_tokens):
    """What no softmax is in is estimated as by the method, and all that is measured is what a sweep measures."""
    if "PostNorm" in type(featured).__name__:
        pytest.skip("refused")
    asked = {"method": "gradient", "draws": 20, "flips": 20}
    plain = patch.edges(featured, tokens, other_tokens, weighed, exact=1, **asked).frame.set_index("variant")
    found = verified(featured, tokens, other_tokens, weighed, budget=4, method="gradient").frame
    assert found["verified"].sum() == 4
    found = found.set_index("variant")
    others = found.index[~found.index.str.contains(r"\.[qk]")]
    np.testing.assert_allclose(found["estimate"][others], plain["estimate"][others], rtol=1e-7, atol=1e-10)
