"""Ablations, where test_matrix does not reach: what is visible, means of edited passes, noise, neurons, gradients."""

import numpy as np
import pytest
import torch

from circuits import ablate, run, sweep
from tests.circuits.conftest import activations


def only(site, layer, function):
    return lambda s, at, x: function(x) if (s, at) == (site, layer) else x


def of_heads(heads, function, axis=2):
    """Apply `function` to some heads along `axis` of a copy."""

    def apply(x):
        x, index = x.clone(), [slice(None)] * x.ndim
        index[axis] = heads
        x[tuple(index)] = function(x)[tuple(index)]
        return x

    return apply


@pytest.mark.parametrize("kept", [None, "head", "queries"])
def test_mean_pattern_within_the_edited_pass(model, tokens, other_tokens, by_hand, assert_same, kept):
    """As the released code of Gopalani et al. does: every layer's mean is over what the earlier means have made."""
    rows = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.5

    def chosen(x, where):
        mask = torch.ones_like(x, dtype=torch.bool)
        if kept == "head":
            mask[:, 2] = False
        return mask & where[:, None, :, None] if kept == "queries" else mask

    def expected(tokens, reference, where):
        means = {}

        def averaged(s, at, x):
            means.setdefault((s, at), x.mean(0, keepdim=True))
            return torch.where(chosen(x, rows), means[s, at], x) if s == "pattern" else x

        by_hand(model, reference, averaged)
        return by_hand(
            model,
            tokens,
            lambda s, at, x: torch.where(chosen(x, where), means[s, at], x) if s == "pattern" else x,
        )

    last = model.cfg.n_layers - 1
    heads = (
        "all" if kept != "head" else "+".join(f"{layer}.{h}" for layer in range(last + 1) for h in (0, 1, 3))
    )
    options = {"positions": rows} if kept == "queries" else {}
    reference = torch.cat([other_tokens, other_tokens.flip(1)])[:8]
    edited = ablate.mean_pattern(heads, reference, of="edited", **options)
    assert_same(run(model, tokens, edited), expected(tokens, reference, rows), model(tokens))
    own = ablate.mean_pattern(heads, tokens, of="edited", **options)
    assert_same(run(model, tokens, own), expected(tokens, tokens, rows), model(tokens))
    if last:
        before = run(model, tokens, ablate.mean_pattern(heads, tokens, **options))
        assert not torch.allclose(run(model, tokens, own), before)


@pytest.mark.parametrize(
    ("at", "columns"), [(slice(1, None), range(1, 6)), (slice(-2, None), [4, 5]), ([-1, 1], [1, 5])]
)
def test_a_pooled_mean_leaves_positions_of_the_reference_out(
    causal, tokens, other_tokens, by_hand, assert_same, at, columns
):
    z = activations(by_hand, causal, other_tokens)[0]["z", 0]
    mean = z[:, list(columns)].mean([0, 1], keepdim=True)
    expected = by_hand(causal, tokens, only("z", 0, of_heads([1, 2], mean.expand_as)))
    edit = ablate.mean("0.1-2", reference=other_tokens, over="batch,pos", reference_positions=at)
    assert_same(run(causal, tokens, edit), expected, causal(tokens))
    # Of prompts of unequal length, the same positions of each.
    rows = [other_tokens[0].tolist(), other_tokens[1, :4].tolist()]
    chosen = [
        z[0, torch.arange(6)[at]],
        activations(by_hand, causal, other_tokens[1:2, :4])[0]["z", 0][0, torch.arange(4)[at]],
    ]
    mean = torch.cat(chosen).mean(0)
    edit = ablate.mean("0.1-2", reference=rows, over="batch,pos", reference_positions=at)
    expected = by_hand(causal, tokens, only("z", 0, of_heads([1, 2], lambda x: mean.expand_as(x))))
    assert_same(run(causal, tokens, edit), expected, causal(tokens))


def test_noise_has_its_scale_and_is_the_same_whatever_the_batch_size(model, tokens):
    def added(edit, site="z.0"):
        return run(model, tokens, edit, cache=[site])[1][site] - run(model, tokens, cache=[site])[1][site]

    found = added(ablate.noise("0.0, 0.2", 0.5, seed=3))
    assert not found[:, :, [1, 3]].any()
    assert float(found[:, :, [0, 2]].std()) == pytest.approx(0.5, rel=0.1)
    twice = added(ablate.noise("0.0, 0.2", 1.0, seed=3))
    torch.testing.assert_close(twice, 2 * found)
    assert not torch.allclose(added(ablate.noise("0.0, 0.2", 0.5, seed=4)), found)
    if model.cfg.n_layers == 1:
        return  # It has attention alone.
    mlp = added(ablate.noise("mlp_out.1", 0.5, seed=3, positions=[2]), "mlp_out.1")
    assert mlp[:, 2].all()
    assert not mlp[:, [0, 1, 3]].any()
    variants = {"0.1": ablate.noise("0.1", 0.3), "all": ablate.noise("all", 0.1, seed=1)}
    frames = [sweep(model, tokens, variants, batch_size=size).frame for size in (None, 3)]
    np.testing.assert_allclose(frames[0]["value"], frames[1]["value"], rtol=1e-9)
    assert variants["0.1"].describe()["scale"] == 0.3
