"""Estimates of nodes against forwards by hand and each other, exact effects beside them, and what both verbs share."""

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, patch, run, sweep
from tests.circuits.patch.by_hand import (
    FEW,
    ONE,
    WEIGHT,
    assert_equal,
    by_autograd,
    by_name,
    edges,
    nodes,
    path_of,
    weighed,
)


def test_what_gets_a_row(causal, tokens, other_tokens, by_hand):
    found = nodes(causal, tokens, other_tokens, weighed, ["z", "mlp_out.1"], by="position", **ONE).frame
    assert len(found) == 2 * 4 * 6 + 6
    row = found.set_index("variant").loc["1.2, position 3"]
    assert (row["site"], row["layer"], row["head"], row["position"]) == ("z", 1, 2, 3)
    expected = by_autograd(by_hand, causal, tokens, other_tokens, "z", weighed)[1][:, 3, 2].sum(1).mean()
    assert row["estimate"] == pytest.approx(float(expected), rel=1e-8)
    assert "mlp_out.1, position 5" in set(found["variant"])
    names = nodes(causal, tokens, other_tokens, weighed, ["z.0", "q.0", "z"], **ONE).frame["variant"]
    assert set(names) == {f"{layer}.{head}" for layer in (0, 1) for head in range(4)} | {
        f"0.{head}.q" for head in range(4)
    }
    neurons = nodes(causal, tokens, other_tokens, weighed, "mlp_post.1", by="neuron", **FEW)
    assert len(neurons.frame) == 24
    expected = by_autograd(by_hand, causal, tokens, other_tokens, "mlp_post", weighed)[1].sum(1).mean(0)
    for neuron, estimate in zip(neurons.frame["neuron"], neurons.frame["estimate"], strict=True):
        assert estimate == pytest.approx(float(expected[neuron]), rel=1e-8)
    assert found["intervention"].unique().tolist() == ["patch.activations (source -> run)"]
    assert neurons.settings["direction"] == "source -> run"


def test_exact_values_are_those_of_a_sweep(causal, tokens, other_tokens):
    def two(output, rows):
        early = output[:, 1].log_softmax(-1) @ WEIGHT[1]
        return {"a": weighed(output), "b": (early, torch.arange(1, 9)[rows])}

    given = {"metric": two, "batch": torch.arange(8)}
    found = nodes(causal, tokens, other_tokens, exact=2, by="position", **given, **FEW)
    frame = found.frame
    assert len(frame) == 2 * (6 + 48 + 12)
    # Rows stand by exact effects; which are measured, by estimates.
    top = set(frame.loc[frame["rank"] <= 2, "variant"])
    assert len(top) > 2
    assert set(frame.loc[frame["effect"].notna(), "variant"]) == top
    assert frame["effect"].notna().sum() == 2 * len(top)
    patches = {}
    for name in found.exact.interventions:
        where, at = name.split(", position ")
        site, chosen = ("z", where) if where[0].isdigit() else (where, None)
        patches[name] = patch.activations(site, other_tokens, heads=chosen, positions=int(at))
        assert [patches[name].describe()] == found.exact.interventions[name]
    real = sweep(causal, tokens, patches, **given, **FEW).frame
    columns = ["value", "effect", "effect_ci_low", "effect_ci_high", "p_value", "p_adjusted", "baseline", "n"]
    merged = frame[frame["effect"].notna()].merge(real, on=["variant", "metric"])
    assert len(merged) == 2 * len(top)
    for column in columns:
        np.testing.assert_allclose(
            merged[f"{column}_x"].astype(float), merged[f"{column}_y"].astype(float), rtol=1e-10, atol=1e-13
        )
    paths = edges(causal, tokens, other_tokens, exact=3, **given, **FEW)
    patches = {name: path_of(name, other_tokens) for name in paths.exact.interventions}
    for name, given_path in patches.items():
        assert [given_path.describe()] == paths.exact.interventions[name]
    real = sweep(causal, tokens, patches, **given, **FEW).frame
    merged = paths.frame[paths.frame["effect"].notna()].merge(real, on=["variant", "metric"])
    np.testing.assert_allclose(merged["effect_x"], merged["effect_y"], rtol=1e-10, atol=1e-13)
    assert len(merged) == len(real)


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
def test_refused_inside_a_block_that_edits_the_model(screened, causal, tokens, other_tokens):
    """Also where the edit does not show in the first example, or in none but a patched run."""
    later = torch.arange(len(tokens))[:, None].expand(tokens.shape) > 0
    for edited in (
        ablate.zero("0.1"),
        edit("z.0", lambda z: 2 * z, positions=later),
        edit("mlp_out.1", lambda x: x.clamp(max=1e3)),
    ):
        with intervene(causal, edited):
            with pytest.raises(CircuitsError, match="a block around this call edits the model"):
                screened(causal, tokens, other_tokens, weighed, **ONE)
            causal(tokens)
    with intervene(causal):
        screened(causal, tokens, other_tokens, weighed, **ONE)


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
    assert "keep 0%" in note
    assert 'rank="size"' in note
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
